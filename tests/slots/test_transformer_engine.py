"""Specs of Transformer Engine, through Megatron's own wrappers around the stand-in of te_package.py; and what
Megatron-Bridge does with such models by the classes of their modules: adapters, and the ranks' shares of weights.

Bridge is the wheel that pip fetches, or another one that --megatron-bridge DIR has unpacked.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import megatron_wheels
import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron_versions import find_versions, is_equal
from script_ranks import results

from tempo_megatron.slots.linear import TempoColumnParallelLinear, TempoRowParallelLinear
from tempo_megatron.slots.transformer_engine import has_transformer_engine, is_installed

FOLDER = os.environ.get("MEGATRON_CORE_VERSIONS", "")
VERSIONS = find_versions(Path(FOLDER)) if FOLDER else []
S, B, H = 16, 2, 32
LAYOUTS = pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["TP 1", "TP 2 + SP"])


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """What bridge_cases.py finds on each rank, by their number."""
    given = request.config.getoption("--megatron-bridge") or os.environ.get("MEGATRON_BRIDGE")
    bridge: list[str] = []
    with contextlib.suppress(pytest.skip.Exception):  # of all that is Bridge's, as `of_bridge` says
        bridge = [str(Path(given).resolve() if given else megatron_wheels.unpack("megatron-bridge==0.6.2"))]
    folder = str(tmp_path_factory.mktemp("transformer_engine"))
    return lambda ranks: results((1, 2), folder, "", "bridge_cases.py", *bridge)[ranks]


@pytest.fixture
def of_bridge(found):
    def find(ranks: int) -> list[dict[str, Any]]:
        if "adapted" not in found(ranks)[0]:
            pytest.skip("needs a megatron-bridge: --megatron-bridge DIR, or a pip that fetches it")
        return found(ranks)

    return find


def check(cases) -> None:
    for name, case in cases.items():
        assert is_equal(case), (name, case)
        assert case["gradients"] > 15 and case["extra_states"] >= 12, (name, case)


@LAYOUTS
def test_loss_gradients_parameters_and_checkpoint_keys_equal_stock(found, ranks: int) -> None:
    for rank in found(ranks):
        assert (len(rank["gpt"]), len(rank["latent"])) == (15 if ranks == 1 else 7, 3)
        check({**rank["gpt"], **rank["latent"], "BERT with padding": rank["bert"], "fp8": rank["fp8"]["case"]})


@pytest.mark.slow
@pytest.mark.skipif(not VERSIONS, reason="MEGATRON_CORE_VERSIONS names no folder with a megatron-core per version")
@pytest.mark.parametrize("root", VERSIONS, ids=lambda root: root.name)
def test_specs_of_every_version_equal_stock(root: Path, tmp_path: Path) -> None:
    (told,) = results((1,), str(tmp_path), str(root))[1]
    check({**told["gpt"], "BERT with padding": told["bert"]})
    stock, tempo, tempo_with_stocks, stock_with_tempos = told["resumed"]
    assert [tempo_with_stocks, stock_with_tempos] == pytest.approx([stock, tempo], rel=1e-6)


@LAYOUTS
def test_a_norm_in_place_and_the_linear_keep_one_output_and_linears_that_run_again_their_inputs(found, ranks) -> None:
    # [s, b, h] in bf16, this rank's part; statistics are 4 bytes per token, and a norm may note a few channels.
    output, token = S * B * H * 2 // ranks, S * B * 4 // ranks
    for rank in found(ranks):
        for linear in ("self_attention.linear_qkv", "mlp.linear_fc1"):
            kept = {name: each["by_module"][f"decoder.layers.0.{linear}"] for name, each in rank["kept"].items()}
            assert kept["stock"] == 2 * output + 2 * token
            assert output + token <= kept["inplace"] <= output + token + 8 * H
            assert kept["recompute"] == output + 2 * token
        total = {name: each["total"] for name, each in rank["kept"].items()}
        assert total["recompute"] < total["inplace"] < 0.7 * total["stock"]
        # Of both norms x, mean and rstd; or y, rstd, gamma and beta.
        assert total["again"] == 2 * (output + 2 * token)
        assert 2 * (output + token) <= total["inplace, again"] <= 2 * (output + token + 8 * H)
        # The outputs of the linear and of GELU, 4 h each, on each rank its columns.
        assert total["stock"] - total["stock, fc1 again"] == 2 * (S * B * 4 * H * 2 // ranks)


@LAYOUTS
def test_in_fp8_an_output_that_is_kept_takes_the_place_of_a_quantised_copy(found, ranks: int) -> None:
    # Elements of [s, b, h], this rank's part; its columns of the MLP are four times as many.
    elements, token, wide = S * B * H // ranks, S * B * 4 // ranks, S * B * 4 * H // ranks
    for rank in found(ranks):
        stock, inplace = (rank["fp8"]["kept"][name]["by_module"] for name in ("stock", "inplace"))
        for linear in ("self_attention.linear_qkv", "mlp.linear_fc1"):
            assert stock[f"decoder.layers.0.{linear}"] == (2 + 1) * elements + 2 * token
            assert 0 <= inplace[f"decoder.layers.0.{linear}"] - 2 * elements - token <= 8 * H
        mlp, fc2 = "decoder.layers.0.mlp", "decoder.layers.0.mlp.linear_fc2"
        assert stock[mlp] + stock[fc2] == (2 + 1) * wide
        assert inplace[mlp] + inplace.get(fc2, 0) == 2 * wide + wide // 8
        assert rank["fp8"]["auto"][1]["norm"].startswith("fp8 is on, whose linears keep quantised copies")


def test_slots_are_counted_and_described(found) -> None:
    replaced = found(1)[0]["replaced"]
    counts = {"activation": [2, 2], "norm": [5, 5], "dropout": [4, 4], "attention": [2, 2]}
    assert replaced["gpt"] == replaced["again"] == counts
    assert replaced["bert"] == {**counts, "attention": [0, 2]}
    assert replaced["stock"] == {name: [0, total] for name, (_, total) in counts.items()}
    gpt, bert, stock = replaced["left"]
    assert gpt == []
    assert bert == [
        "attention in encoder.layers.0-1 (self_attention.core_attention): "
        "Transformer Engine's attention, under a mask whose conventions are its own"
    ]
    assert "norm in decoder.layers.0-1 (self_attention.linear_qkv, mlp.linear_fc1): off" in stock
    assert replaced["left by single layers"] == [
        "attention in decoder.layers.1 (self_attention.core_attention): auto: Transformer Engine's attention keeps no "
        "s*s tensor and no mask either",
        "norm in decoder.layers.1 (self_attention.linear_qkv, mlp.linear_fc1): off for layer 1",
    ]
    assert replaced["final norm"] == ["TENorm", "TempoTENorm"]


def test_what_has_a_linear_do_more_than_keep_its_input_is_refused(found) -> None:
    refused = found(1)[0]["refusals"]
    for name in ("delay_wgrad_compute", "tp_comm_overlap", "cpu_offloading", "quant_recipe", "qk_clip", "fp8"):
        assert refused[name].startswith(name) and "off" in refused[name]
    assert "TEFusedMLP" in refused["op fuser"] and "leave use_transformer_engine_op_fuser off" in refused["op fuser"]
    assert refused["linear_qkv"] == (
        'tempo.linear_qkv is "recompute" in a layer whose core attention is TEDotProductAttention, which may keep '
        "copies of q, k and v; expected Tempo's attention, or one that Megatron recomputes (core_attn); set "
        'tempo.attention to "flash", or tempo.linear_qkv to "off"'
    )


def test_auto_leaves_what_transformer_engine_does_and_says_why(found) -> None:
    auto = found(1)[0]["auto"]
    chosen, reasons = auto["nothing"]
    assert chosen == {
        "activation": "inplace", "norm": "inplace", "dropout": "recompute", "attention": "off", "loss": "fused",
        "linear_fc1": "off", "linear_qkv": "off", "moe_permute": "off", "offload": "off", "check": "auto",
        "layers": {},
    }  # fmt: skip
    assert reasons == {"attention": "Transformer Engine's attention keeps no s*s tensor and no mask either"}
    chosen, reasons = auto["delay_wgrad_compute"]
    assert chosen["activation"] == chosen["norm"] == "off" and chosen["dropout"] == "recompute"
    assert reasons["norm"].startswith("delay_wgrad_compute is on, by which linears hold their inputs")
    assert auto["qk_clip"][1]["attention"] == "qk_clip is on, which Tempo's attention does not support"


@pytest.mark.parametrize("kind", ["loaded", "resumed"], ids=["plain", "sharded"])
def test_checkpoints_go_both_ways_strictly(found, kind: str) -> None:
    stock, tempo, tempo_with_stocks, stock_with_tempos = found(1)[0][kind]
    assert stock != pytest.approx(tempo, rel=1e-4)
    assert [tempo_with_stocks, stock_with_tempos] == pytest.approx([stock, tempo], rel=1e-6)


def test_a_local_layer_has_no_transformer_engine() -> None:
    if is_installed():
        pytest.skip("Transformer Engine is installed")
    assert not has_transformer_engine(get_gpt_layer_local_spec())


@LAYOUTS
def test_adapters_are_given_what_the_norm_gave_and_learn_as_beside_stock(of_bridge, ranks: int) -> None:
    for rank in of_bridge(ranks):
        adapted = rank["adapted"]
        stock = adapted["rms"]["stock"]
        # Of a norm's output in front of linear_qkv and linear_fc1 of both layers; the residual stream's is far larger.
        assert sum(0.9 < each < 1.1 for each in stock) >= 4
        assert len(adapted["loss"]) == 4
        for name, loss in adapted["loss"].items():
            assert loss == pytest.approx(adapted["loss"]["stock"], rel=1e-6), name
            assert adapted["rms"][name] == pytest.approx(stock, rel=1e-5), name
            assert adapted["gradients"][name] == adapted["gradients"]["stock"]
            assert adapted["gradient_error_eps"][name] <= 100, name


@pytest.mark.parametrize("kind", ["LoRA", "DoRA", "CanonicalLoRA"])
def test_a_llama_that_is_fine_tuned_by_bridges_adapters_learns_and_is_exported_as_stocks(of_bridge, kind: str) -> None:
    models = of_bridge(1)[0]["fine-tuning"][kind]
    stock = models["stock"]
    assert stock["losses"][-1] < stock["losses"][0] - 1e-3 and stock["trained"] >= 16
    assert stock["merged"] == (8 if kind == "LoRA" else 0)
    for name, each in models.items():
        assert each["losses"] == pytest.approx(stock["losses"], rel=2e-6), name
        assert each["trained"] == stock["trained"] and each["is_exported"], name
        assert each["merged"] == stock["merged"] and each["merged_error"] < 1e-5, name


def test_every_weight_is_shared_by_the_ranks_as_stocks_and_its_module_is_named_as_stocks(of_bridge) -> None:
    kinds = of_bridge(1)[0]["kinds"]
    assert {kind for _, kind in kinds["stock"].values()} == {"column", "row", "replicated"}
    for name, of_model in kinds.items():
        assert of_model == kinds["stock"], name


def test_a_linear_with_an_adapter_is_not_run_again(of_bridge) -> None:
    again = of_bridge(1)[0]["again"]
    assert again.startswith("a linear is a LoRALinear around another module, which may draw other random numbers")
    assert again.endswith('set tempo.linear_fc1 and tempo.linear_qkv to "off"')


def test_local_linears_have_the_names_of_megatrons_and_are_told_apart_by_qualname() -> None:
    for tempo, stock in (
        (TempoColumnParallelLinear, ColumnParallelLinear),
        (TempoRowParallelLinear, RowParallelLinear),
    ):
        assert tempo.__name__ == stock.__name__ and issubclass(tempo, stock)
        assert tempo.__qualname__ == f"Tempo{stock.__name__}"

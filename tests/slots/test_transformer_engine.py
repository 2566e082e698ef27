"""Specs of Transformer Engine, through Megatron's own wrappers around the stand-in of te_stand_ins.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from megatron_versions import find_versions
from te_ranks import results

FOLDER = os.environ.get("MEGATRON_CORE_VERSIONS", "")
VERSIONS = find_versions(Path(FOLDER)) if FOLDER else []
S, B, H = 16, 2, 32
LAYOUTS = pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["TP 1", "TP 2 + SP"])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory):
    folder = str(tmp_path_factory.mktemp("transformer_engine"))
    return lambda ranks: results(ranks, folder)


def check(case) -> None:
    stock, tempo = case["loss"]
    assert tempo == pytest.approx(stock, rel=1e-6)
    assert case["gradients"] > 15
    # Of each gradient's largest element, in float32's round-off; as in gpt.assert_equal_to_stock.
    assert case["gradient_error_eps"] <= 100
    assert case["same"] == dict.fromkeys(case["same"], True)
    assert case["extra_states"] >= 12


@LAYOUTS
def test_loss_gradients_parameters_and_checkpoint_keys_of_a_gpt_equal_stock(found, ranks: int) -> None:
    for rank in found(ranks):
        assert len(rank["gpt"]) == 14
        for name, case in rank["gpt"].items():
            try:
                check(case)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


@LAYOUTS
def test_latent_attention_with_norms_in_its_projections_equals_stock(found, ranks: int) -> None:
    for rank in found(ranks):
        assert len(rank["latent"]) == 3
        for case in rank["latent"].values():
            check(case)


def test_the_op_fusers_mlp_is_replaced_with_its_form_of_gelu(found) -> None:
    case = found(1)[0]["op fuser"]
    assert case["loss"][1] == pytest.approx(case["loss"][0], rel=1e-6)
    assert case["gradient_error_eps"] <= 100 and case["same"]["gradients"]


@pytest.mark.slow
@pytest.mark.skipif(not VERSIONS, reason="MEGATRON_CORE_VERSIONS names no folder with a megatron-core per version")
@pytest.mark.parametrize("root", VERSIONS, ids=lambda root: root.name)
def test_specs_of_every_version_equal_stock(root: Path, tmp_path: Path) -> None:
    (told,) = results(1, str(tmp_path), str(root))
    for case in (*told["gpt"].values(), told["bert"]):
        check(case)
    stock, tempo, tempo_with_stocks, stock_with_tempos = told["resumed"]
    assert [tempo_with_stocks, stock_with_tempos] == pytest.approx([stock, tempo], rel=1e-6)


@LAYOUTS
def test_a_bert_with_padding_equals_stock(found, ranks: int) -> None:
    for rank in found(ranks):
        check(rank["bert"])


@LAYOUTS
def test_a_norm_in_place_and_the_linear_keep_one_output(found, ranks: int) -> None:
    # [s, b, h] in bf16, this rank's part; statistics are 4 bytes per token, and a norm may note a few channels.
    output, token = S * B * H * 2 // ranks, S * B * 4 // ranks
    for rank in found(ranks):
        for linear in ("self_attention.linear_qkv", "mlp.linear_fc1"):
            kept = {name: each["by_module"][f"decoder.layers.0.{linear}"] for name, each in rank["kept"].items()}
            assert kept["stock"] == 2 * output + 2 * token
            assert output + token <= kept["inplace"] <= output + token + 8 * H
            assert kept["recompute"] == output + 2 * token


@LAYOUTS
def test_linears_that_run_again_keep_their_inputs_only(found, ranks: int) -> None:
    output, token = S * B * H * 2 // ranks, S * B * 4 // ranks
    for rank in found(ranks):
        total = {name: each["total"] for name, each in rank["kept"].items()}
        # Of both norms x, mean and rstd; or y, rstd, gamma and beta.
        assert total["again"] == 2 * (output + 2 * token)
        assert 2 * (output + token) <= total["inplace, again"] <= 2 * (output + token + 8 * H)
        # The outputs of the linear and of GELU, 4 h each, on each rank its columns.
        assert total["stock"] - total["stock, fc1 again"] == 2 * (S * B * 4 * H * 2 // ranks)


@LAYOUTS
def test_a_layer_keeps_less_than_stocks(found, ranks: int) -> None:
    for rank in found(ranks):
        total = {name: each["total"] for name, each in rank["kept"].items()}
        assert total["recompute"] < total["inplace"] < 0.7 * total["stock"]


@LAYOUTS
def test_in_fp8_an_output_that_is_kept_takes_the_place_of_a_quantised_copy(found, ranks: int) -> None:
    # Elements of [s, b, h], this rank's part; its columns of the MLP are four times as many.
    elements, token, wide = S * B * H // ranks, S * B * 4 // ranks, S * B * 4 * H // ranks
    for rank in found(ranks):
        check(rank["fp8"]["case"])
        stock, inplace = (rank["fp8"]["kept"][name]["by_module"] for name in ("stock", "inplace"))
        for linear in ("self_attention.linear_qkv", "mlp.linear_fc1"):
            assert stock[f"decoder.layers.0.{linear}"] == (2 + 1) * elements + 2 * token
            assert 0 <= inplace[f"decoder.layers.0.{linear}"] - 2 * elements - token <= 8 * H
        mlp, fc2 = "decoder.layers.0.mlp", "decoder.layers.0.mlp.linear_fc2"
        assert stock[mlp] + stock[fc2] == (2 + 1) * wide
        assert inplace[mlp] + inplace.get(fc2, 0) == 2 * wide + wide // 8
        assert rank["fp8"]["auto"]["norm"].startswith("fp8 is on, whose linears keep quantised copies")


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
    assert replaced["final norm"] == ["TENorm", "TempoTELayerNorm"]


def test_what_has_a_linear_do_more_than_keep_its_input_is_refused(found) -> None:
    refused = found(1)[0]["refusals"]
    for name in ("delay_wgrad_compute", "tp_comm_overlap", "cpu_offloading", "quant_recipe", "qk_clip", "fp8"):
        assert refused[name].startswith(name) and "off" in refused[name]
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
        "linear_fc1": "off", "linear_qkv": "off", "moe_permute": "off", "layers": {},
    }  # fmt: skip
    assert reasons == {"attention": "Transformer Engine's attention keeps no s*s tensor and no mask either"}
    chosen, reasons = auto["delay_wgrad_compute"]
    assert chosen["activation"] == chosen["norm"] == "off" and chosen["dropout"] == "recompute"
    assert reasons["norm"].startswith("delay_wgrad_compute is on, by which linears hold their inputs")
    assert auto["qk_clip"][1]["attention"] == "qk_clip is on, which Tempo's attention does not support"


def test_plain_checkpoints_go_both_ways_strictly(found) -> None:
    stock, tempo, tempo_with_stocks, stock_with_tempos = found(1)[0]["loaded"]
    assert stock != pytest.approx(tempo, rel=1e-4)
    assert [tempo_with_stocks, stock_with_tempos] == pytest.approx([stock, tempo], rel=1e-6)


def test_sharded_checkpoints_go_both_ways(found) -> None:
    stock, tempo, tempo_with_stocks, stock_with_tempos = found(1)[0]["resumed"]
    assert stock != pytest.approx(tempo, rel=1e-4)
    assert [tempo_with_stocks, stock_with_tempos] == pytest.approx([stock, tempo], rel=1e-6)


def test_a_local_layer_has_no_transformer_engine() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from tempo_megatron.slots.transformer_engine import has_transformer_engine, is_installed

    if is_installed():
        pytest.skip("Transformer Engine is installed")
    assert not has_transformer_engine(get_gpt_layer_local_spec())

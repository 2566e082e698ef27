"""What Megatron-Bridge does with a model by the classes of its modules: adapters, and the ranks' shares of weights.

Bridge wants Transformer Engine, whose stand-in te_stand_ins.py is. Its decisions are those of bridge_cases.py, and its
own: of the wheel that pip fetches, or of another one that --megatron-bridge DIR has unpacked.
"""

from __future__ import annotations

import os
from pathlib import Path

import megatron_wheels
import pytest
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from te_ranks import results

from tempo_megatron.slots.linear import TempoColumnParallelLinear, TempoRowParallelLinear

RANKS = pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["TP 1", "TP 2 + SP"])
# Bridge's own are asked beside those of bridge_cases.py, so that the latter alone are for who has no time.
DECIDERS = [
    pytest.param("bridge_cases.py", marks=pytest.mark.quick), pytest.param("Bridge", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.fixture(scope="module", params=DECIDERS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """What bridge_cases.py prints on each rank."""
    arguments = []
    if request.param == "Bridge":
        given = request.config.getoption("--megatron-bridge") or os.environ.get("MEGATRON_BRIDGE")
        arguments = [str(Path(given).resolve() if given else megatron_wheels.unpack("megatron-bridge==0.6.2"))]
    folder = str(tmp_path_factory.mktemp("bridge"))
    return lambda ranks: results(ranks, folder, "", "bridge_cases.py", *arguments)


@RANKS
def test_adapters_are_given_what_the_norm_gave_and_learn_as_beside_stock(found, ranks: int) -> None:
    for rank in found(ranks):
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
def test_a_llama_that_is_fine_tuned_by_bridges_adapters_learns_and_is_exported_as_stocks(found, kind: str) -> None:
    (rank,) = found(1)
    if "fine-tuning" not in rank:
        pytest.skip("needs Bridge's own code")
    models = rank["fine-tuning"][kind]
    stock = models["stock"]
    assert stock["losses"][-1] < stock["losses"][0] - 1e-3 and stock["trained"] >= 16
    assert stock["merged"] == (8 if kind == "LoRA" else 0)
    for name, each in models.items():
        assert each["losses"] == pytest.approx(stock["losses"], rel=2e-6), name
        assert each["trained"] == stock["trained"] and each["is_exported"], name
        assert each["merged"] == stock["merged"] and each["merged_error"] < 1e-5, name


def test_every_weight_is_shared_by_the_ranks_as_stocks(found) -> None:
    (rank,) = found(1)
    for decider, kinds in rank["kinds"].items():
        stock = kinds["stock"]
        assert set(stock.values()) == {"column", "row", "replicated"}
        for name, of_model in kinds.items():
            assert of_model == stock, f"{decider}: {name}"


def test_a_linear_with_an_adapter_is_not_run_again(found) -> None:
    (rank,) = found(1)
    assert rank["again"].startswith(
        "a linear is a LoRALinear around another module, which may draw other random numbers"
    )
    assert rank["again"].endswith('set tempo.linear_fc1 and tempo.linear_qkv to "off"')


def test_local_linears_have_the_names_of_megatrons_and_are_told_apart_by_qualname() -> None:
    for tempo, stock in (
        (TempoColumnParallelLinear, ColumnParallelLinear),
        (TempoRowParallelLinear, RowParallelLinear),
    ):
        assert tempo.__name__ == stock.__name__ and issubclass(tempo, stock)
        assert tempo.__qualname__ == f"Tempo{stock.__name__}"

"""Linears, and attention, that run again in backward: the same losses and gradients, bit by bit, from fewer bytes; and
the MLP a tile of tokens at a time, from its input alone."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any
from unittest import mock

import megatron_cpu
import pytest
import torch
from covering import exhaustive
from distributed import run_megatron_ranks
from gpt import build_gpt, gpt_config, losses
from grid.cases import Case, Layout
from grid.run_model import run_model
from linear_cases import AGAIN, CASES, RECOMPUTE, Difference, Found, compare, count_alive, list_calls, run

from tempo_megatron import TempoConfig, tempo_block_spec
from tempo_megatron.slots.linear import LinearCall
from tempo_megatron.slots.mlp import TempoTiledMLP
from tempo_megatron.slots.report import report_on

ONE_RANK = pytest.mark.usefixtures("one_rank")
# Its head has a norm of Megatron's own, which refuses sequence parallelism without Apex.
PARALLEL = [name for name in CASES if name != "BERT"]
FEW = ["GPT", "GPT, norms in place", "GPT, stock", "Llama, q and k normed", "GPT, core attention recomputed"]
TILED = ["GPT", "GPT, stock", "Llama, stock MLP", "T5", "GPT, all recomputed"]
TILED_TP = ["Llama"]


Tiles = dict[str, tuple[Found, Found]]


def run_tiles(names: list[str], sequence_parallel: bool) -> Tiles:
    """Name -> the run with an MLP whose first linear runs again as a whole, and that in tiles."""
    found = {}
    for name in names:
        values = ({"linear_fc1": "recompute"}, {"linear_fc1": "tile"})
        tempo = CASES[name].tempo
        # Three tiles of 16 rows of 2 samples: 6, 6 and 4; on two ranks with sequence parallelism 3, 3 and 2 of 8.
        with mock.patch.object(TempoTiledMLP, "count_tile_tokens", lambda _: 12):
            runs = [
                run(CASES[name], dataclasses.replace(tempo, **value), torch.float32, 0.1, sequence_parallel)
                for value in values
            ]
        found[name] = runs[0], runs[1]
    return found


Differences = dict[tuple[str, str], Difference]


def run_all(
    names: list[str], dtype: torch.dtype, dropout: float, sequence_parallel: bool, tiled: list[str]
) -> tuple[Differences, Tiles]:
    return compare(names, dtype, dropout, sequence_parallel), run_tiles(tiled, sequence_parallel)


def check(found: Differences, tiles: Tiles) -> None:
    for (name, again), difference in found.items():
        assert difference.changed == [], (name, again)
        is_recomputed = {
            "GPT, MLP recomputed": again == "fc1",
            "GPT, core attention recomputed": again == "attention",
            "GPT, all recomputed": True,
        }
        for stack, (without, kept, counted) in difference.kept.items():
            assert kept == without if is_recomputed.get(name) else kept < without, (name, again, stack)
            assert counted in (kept, None), (name, again, stack)
    for name, (whole, tiled) in tiles.items():
        assert (whole.keys, whole.kept) == (tiled.keys, tiled.kept), name
        torch.testing.assert_close(tiled.losses, whole.losses, rtol=1e-6, atol=1e-6)
        assert whole.gradients.keys() == tiled.gradients.keys()
        for key, expected in whole.gradients.items():
            error = (tiled.gradients[key] - expected).abs().max() / expected.abs().max()
            assert error < 1e-5, (name, key, error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "dropout"), [(torch.bfloat16, 0.1), *exhaustive((torch.float32, 0.0), (torch.float32, 0.1))]
)
def test_losses_gradients_and_keys_are_those_of_the_run_without_and_the_formula_says_what_is_kept(
    dtype: torch.dtype, dropout: float
) -> None:
    ((found, tiles),) = run_megatron_ranks(run_all, 1, 1, list(CASES), dtype, dropout, False, TILED)
    assert len(found) == sum(len(case.again) for case in CASES.values()) >= 20
    check(found, tiles)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "dtype", "sequence_parallel"),
    [(FEW, torch.float32, True), *exhaustive((PARALLEL, torch.float32, False), (PARALLEL, torch.bfloat16, True))],
    ids=["SP, few", "TP", "SP"],
)
def test_they_are_in_two_tensor_parallel_ranks(names: list[str], dtype: torch.dtype, sequence_parallel: bool) -> None:
    for found in run_megatron_ranks(run_all, 2, 2, names, dtype, 0.1, sequence_parallel, TILED_TP):
        check(*found)


@ONE_RANK
def test_nobody_else_holds_what_is_dropped() -> None:
    alive, counted = count_alive({})
    for name, again in AGAIN.items():
        alive_again, counted_again = count_alive(again)
        assert alive - alive_again == pytest.approx(counted - counted_again, rel=0.01), name


@ONE_RANK
def test_each_linear_and_attention_runs_once_more_and_a_norm_is_made_again_once() -> None:
    once = list_calls({})
    fc1, qkv = "forward of mlp.linear_fc1.weight", "forward of self_attention.linear_qkv.weight"
    assert once[fc1] == once["attention"] == 1 and once["norm made again"] == 2
    more = {name: dict(Counter(list_calls(again)) - Counter(once)) for name, again in AGAIN.items()}
    assert more["fc1"] == {fc1: 1} and more["qkv"] == {qkv: 1} and more["attention"] == {"attention": 1}
    assert more["all"] == {fc1: 1, qkv: 1, "attention": 1}


@dataclasses.dataclass(frozen=True)
class Stages(Case):
    """A case of the grid whose TempoConfig is another."""

    again: str = ""

    @property
    def tempo(self) -> TempoConfig:
        return dataclasses.replace(RECOMPUTE, loss="fused", **AGAIN.get(self.again, {}))


def run_stages(layout: Layout) -> dict[str, tuple[Any, Any, Any]]:
    megatron_cpu.install()
    found = {}
    for again in ("", *AGAIN):
        run = run_model(Stages("Llama", layout, "none", "", 0.1, "fp32", again=again))
        found[again] = (run.losses, run.gradients, run.masks)
    return found


@pytest.mark.slow
def test_with_pipeline_stages_losses_gradients_and_masks_are_those_of_the_run_without() -> None:
    for rank in run_megatron_ranks(run_stages, 2, 1, Layout(1, False, 2), pipeline_model_parallel_size=2):
        plain = rank.pop("")
        assert list(rank) == list(AGAIN)
        for ours in rank.values():
            torch.testing.assert_close(ours[:2], plain[:2], rtol=0, atol=0)
            assert ours[2].keys() == plain[2].keys()
            assert all((mask == plain[2][place]).all() for place, mask in ours[2].items())


@ONE_RANK
def test_reports_speak_of_them_where_somebody_asked() -> None:
    spec = tempo_block_spec(gpt_config(), TempoConfig(linear_fc1="recompute", linear_qkv="recompute"))
    counts = report_on(spec).counts
    assert counts["linear_fc1"] == counts["linear_qkv"] == (2, 2)
    assert "linear_fc1=recompute linear_qkv=recompute" in spec.choices.describe()
    assert "linear" not in tempo_block_spec(gpt_config(), TempoConfig()).choices.describe()
    of_one = tempo_block_spec(gpt_config(), TempoConfig(layers={"1": {"linear_fc1": "recompute"}}))
    assert report_on(of_one).describe_left() == ["linear_fc1 in decoder.layers.0 (mlp): off"]


@ONE_RANK
def test_queries_that_were_written_to_inside_of_attention_are_refused() -> None:
    # Grouped queries are no view of the projection.
    model = build_gpt(gpt_config(num_query_groups=2), TempoConfig(linear_qkv="recompute"))
    core_attention = model.decoder.layers[0].self_attention.core_attention
    core_attention.register_forward_pre_hook(lambda _, args: args[0].detach().zero_() is None or None)
    with pytest.raises(ValueError, match=r"queries, keys or values were written to .* set tempo.linear_qkv to \"off\""):
        losses(model, 0, 2, gives_mask=False)


def test_weights_that_zero_3_partitions_are_refused() -> None:
    linear = torch.nn.Linear(4, 4)
    linear.weight.ds_id = 0  # type: ignore[assignment]
    with pytest.raises(ValueError, match="the weight of a Linear is partitioned by ZeRO-3, .* expected ZeRO 0, 1 or 2"):
        LinearCall(linear)(torch.ones(2, 4))

"""A run goes on in another layout: the same weights and moments bit for bit, the same samples, the same masks."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from live_states import join, keep_states
from training_job import BF16, Data, Run, run, successful, zero

from tempo_megatron.training.checkpoint import load_resharded

# 512 tokens in 540 rows, which another tensor parallel size would pad to 600 or 720 in a run that starts.
COMMON = [
    "--global-batch-size", "4", "--micro-batch-size", "1", "--make-vocab-size-divisible-by", "60", "--seq-length", "32",
]  # fmt: skip
NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")
LLAMA = (
    "--swiglu", "--normalization", "RMSNorm", "--group-query-attention", "--num-query-groups", "2", "--qk-layernorm",
    "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights", "--ffn-hidden-size", "96",
)  # fmt: skip
# Of float32 sums in another order, relative to the loss, an ulp of which is 8e-8. Whole runs of the same weights in two
# layouts differ by that one ulp in four steps.
LIMIT = 5e-7


@dataclasses.dataclass(frozen=True)
class L:
    """Tensor parallel size, with sequence parallelism or not, data parallel size, ZeRO stage."""

    tp: int = 1
    dp: int = 1
    stage: int = 0
    sp: bool = False

    def __str__(self) -> str:
        return f"TP {self.tp}, DP {self.dp}, ZeRO {self.stage}"

    @property
    def world_size(self) -> int:
        return self.tp * self.dp

    def arguments(self) -> list[str]:
        return ["--tensor-model-parallel-size", str(self.tp), *(["--sequence-parallel"] if self.sp else [])]

    def config(self, **more: Any) -> dict[str, Any]:
        return {**zero(self.stage), **more}


def go(data: Data, folder: Path, layout: L, *options: str, config: dict[str, Any] | None = None, **more: Any) -> Run:
    everything = [*COMMON, *layout.arguments(), *options]
    return run(data, folder, *everything, world_size=layout.world_size, config=config or layout.config(), **more)


# Legs of one step each. The first layout also trains all steps alone, without a change.
MASKS = [L(1, 1, 0), L(2, 2, 3, sp=True), L(1, 2, 2), L(2, 1, 1)]
# Every stage to every stage; every tensor parallel size to every other, with sequence parallelism and without.
EVERY = [
    *(L(1, 1, 0), L(1, 4, 0), L(2, 2, 1, sp=True), L(1, 2, 0), L(4, 1, 2, sp=True), L(2, 1, 0), L(2, 2, 3)),
    *(L(4, 1, 1), L(4, 1, 1, sp=True), L(1, 4, 2), L(1, 2, 1), L(2, 2, 3, sp=True), L(4, 1, 2), L(2, 1, 2)),
    *(L(1, 4, 3), L(2, 2, 3), L(1, 1, 0)),
]
# BF16_Optimizer, which is what stage 1 gets, and ZeRO's own hand over to each other. The last leg has no other layout,
# so DeepSpeed itself loads.
GATED = [L(1, 2, 1), L(4, 1, 3), L(1, 2, 2), L(2, 1, 1), L(2, 1, 1)]
TEMPO, IN_TURNS = ("--use-tempo",), ("--no-use-tempo", "--use-tempo")
# Arguments, what each leg has in turns, DeepSpeed JSON, layouts, how far losses may be from those of the whole run.
CHAINS: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any], list[L], float]] = {
    "masks": ((), TEMPO, {}, MASKS, LIMIT),
    "gated, fewer groups than ranks, float32 masters": ((*LLAMA, *NO_DROPOUT), IN_TURNS, BF16, GATED, 2e-3),
    "every pair": ((), TEMPO, {}, EVERY, LIMIT),
    "gated, others": (LLAMA, TEMPO, {}, [L(4, 1, 2, sp=True), L(2, 2, 3), L(1, 1, 1)], LIMIT),
}
RARELY = ("every pair", "gated, others")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "switches", "config", "layouts", "limit"),
    [
        pytest.param(*chain, id=name, marks=pytest.mark.exhaustive if name in RARELY else ())
        for name, chain in CHAINS.items()
    ],
)
def test_a_run_goes_on_from_layout_to_layout(
    data: Data,
    tmp_path: Path,
    words: tuple[str, ...],
    switches: tuple[str, ...],
    config: dict[str, Any],
    layouts: list[L],
    limit: float,
) -> None:
    save = str(tmp_path / "save")

    def train(step: int, *options: str) -> Run:
        layout = layouts[step - 1]
        options = (*words, switches[(step - 1) % len(switches)], "--train-iters", str(len(layouts)), *options)
        folder = tmp_path / f"step{step}"
        return successful(
            go(data, folder, layout, *options, "--save", save, config=layout.config(**config), before=keep_states)
        )

    whole = train(1, "--save-interval", "1")
    Path(save, "latest").write_text("iter_0000001\n")
    for step, (source, target) in enumerate(itertools.pairwise(layouts), start=2):
        resumed = train(step, "--load", save, "--exit-interval", str(step))
        assert_same_states(
            tmp_path / f"step{step}/loaded", tmp_path / f"step{step - 1}/saved{step - 1}", "--swiglu" in words
        )
        assert f"going on after step {step - 1}" in resumed.output
        assert str(source) == str(target) or f"{source} to {target}" in resumed.output
        (ours,), theirs = resumed.of_kind("train"), whole.of_kind("train")[step - 1]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=limit), (source, target)
        assert ours["learning_rate"] == theirs["learning_rate"]


def assert_same_states(first: Path, second: Path, is_gated: bool) -> None:
    ours, theirs = join(first, is_gated), join(second, is_gated)
    assert ours.keys() == theirs.keys() and len(ours) > 40
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


# The tests below go on from a run of TP 2 that was stopped in the middle.
STEPS, SAVED = 4, 2
STOCK = ("--no-use-tempo", *NO_DROPOUT, "--train-iters", str(STEPS))


@pytest.fixture(scope="module")
def stopped(data: Data, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    folder = tmp_path_factory.mktemp("stopped")
    save = ["--save", str(folder / "save"), "--save-interval", str(SAVED)]
    whole = successful(go(data, folder, L(2, 1, 0), *STOCK, *save))
    (folder / "save" / "latest").write_text(f"iter_{SAVED:07d}\n")
    return folder / "save", whole


@pytest.mark.slow
@pytest.mark.parametrize("saved_in_turns", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_an_option_that_moves_the_weights_within_a_layout(data: Data, tmp_path: Path, saved_in_turns: bool) -> None:
    """round_robin_gradients gives the data-parallel ranks other parameters, and DeepSpeed does not say so."""
    layout, save = L(1, 2, 2), ["--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")]

    def config(in_turns: bool) -> dict[str, Any]:
        return zero(2, round_robin_gradients=in_turns)

    whole = [*STOCK, "--save-interval", str(SAVED), *save]
    first = successful(go(data, tmp_path / "whole", layout, *whole, config=config(saved_in_turns)))
    (tmp_path / "save" / "latest").write_text(f"iter_{SAVED:07d}\n")
    rest = successful(go(data, tmp_path / "rest", layout, *STOCK, *save, config=config(not saved_in_turns)))
    assert "resharding" in rest.output
    assert rest.losses == pytest.approx(first.losses[SAVED:], rel=LIMIT)


def die_while_saving() -> None:
    """kill -9 between the files being written and the rename."""
    from tempo_megatron.training import checkpoint

    checkpoint.flush_all_to_disk = lambda folder: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_kill_9_in_the_first_save_after_it_loses_nothing(data: Data, stopped: tuple[Path, Run], tmp_path: Path) -> None:
    saved, whole = stopped
    save = tmp_path / "save"
    shutil.copytree(saved, save)
    before = {path: path.read_bytes() for path in (save / "iter_0000002").iterdir()}
    options = [*STOCK, "--save", str(save), "--load", str(save)]
    killed = go(data, tmp_path, L(1, 1, 2), *options, "--save-interval", "1", before=die_while_saving)
    assert killed.exit_codes == [-signal.SIGKILL]
    assert "TP 2, DP 1, ZeRO 0 to TP 1, DP 1, ZeRO 2" in killed.output
    assert (save / "iter_0000003.tmp" / "rank_00000.pt").exists()
    assert (save / "latest").read_text() == "iter_0000002\n"
    assert {path: path.read_bytes() for path in (save / "iter_0000002").iterdir()} == before
    resumed = successful(go(data, tmp_path / "resumed", L(1, 1, 1), *options))
    assert f"going on after step {SAVED}" in resumed.output and not list(save.glob("*.tmp"))
    assert resumed.losses == pytest.approx(whole.losses[SAVED:], rel=LIMIT)


def test_states_on_nvme_are_refused_before_anything_changes() -> None:
    offloaded = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
    engine: Any = SimpleNamespace(run=SimpleNamespace(deepspeed=offloaded))
    source: Any = SimpleNamespace(where="--load save/iter_0000003")
    with pytest.raises(ValueError, match='or is of another run, .* use "cpu" for zero_optimization.offload_optimizer'):
        load_resharded(engine, source)

"""A run goes on in another layout: the same weights and moments bit for bit, the same samples, the same masks."""

from __future__ import annotations

import functools
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layouts import BF16, Layout, join, keep_states
from training_job import Data, Run, run, successful, write_unsealed

from tempo_megatron.training.resharding import load_resharded

L = Layout
STEPS, SAVED = 4, 2
# 512 tokens in 540 rows, which another tensor parallel size would pad to 600 or 720 in a run that starts.
COMMON = [
    "--global-batch-size", "4", "--micro-batch-size", "1", "--train-iters", str(STEPS),
    "--make-vocab-size-divisible-by", "60", "--seq-length", "32",
]  # fmt: skip
NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")
STOCK = ("--no-use-tempo", *NO_DROPOUT)
TEMPO = ("--use-tempo", *NO_DROPOUT)
DROPOUT = ("--use-tempo", "--attention-dropout", "0.1", "--hidden-dropout", "0.1")
LLAMA = (
    "--swiglu", "--normalization", "RMSNorm", "--group-query-attention", "--num-query-groups", "2", "--qk-layernorm",
    "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights", "--ffn-hidden-size", "96",
)  # fmt: skip
# Of float32 sums in another order, relative to the loss, an ulp of which is 8e-8. Whole runs of the same weights in two
# layouts differ by that one ulp in four steps.
LIMIT = 5e-7


def go(data: Data, folder: Path, layout: L, *options: str, config: dict[str, Any] | None = None, **more: Any) -> Run:
    everything = [*COMMON, *layout.arguments(), *options]
    return run(data, folder, *everything, world_size=layout.world_size, config=config or layout.config(), **more)


class Sources:
    """Runs of STEPS steps with a checkpoint after SAVED, made when they are asked for."""

    def __init__(self, data: Data, folder: Path) -> None:
        self.data, self.folder = data, folder
        self.get = functools.cache(self._make)

    def _make(self, layout: L, options: tuple[str, ...], bf16: bool = False) -> tuple[Path, Run]:
        folder = self.folder / str(len(list(self.folder.iterdir())))
        save = ["--save", str(folder / "save"), "--save-interval", str(SAVED)]
        config = layout.config(**(BF16 if bf16 else {}))
        whole = successful(go(self.data, folder, layout, *options, *save, config=config, before=keep_states))
        (folder / "save" / "latest").write_text(f"iter_{SAVED:07d}\n")
        return folder, whole


@pytest.fixture(scope="module")
def sources(data: Data, tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(data, tmp_path_factory.mktemp("sources"))


def assert_same_states(first: Path, second: Path, is_gated: bool = False) -> None:
    ours, theirs = join(first, is_gated), join(second, is_gated)
    assert ours.keys() == theirs.keys() and len(ours) > 40
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def assert_same_losses(resumed: list[float], whole: list[float]) -> None:
    assert resumed == pytest.approx(whole, rel=LIMIT)


# Every stage to every stage; every tensor parallel size to every other, with sequence parallelism and without.
PAIRS = [
    (L(1, 1, 0), L(4, 1, 0, sp=True), DROPOUT, DROPOUT),
    (L(1, 4, 0), L(2, 2, 1, sp=True), STOCK, STOCK),
    (L(2, 1, 0), L(1, 2, 2), STOCK, TEMPO),
    (L(4, 1, 0), L(1, 4, 3), TEMPO, STOCK),
    (L(2, 2, 1, sp=True), L(1, 1, 0), DROPOUT, DROPOUT),
    (L(1, 2, 1), L(4, 1, 1, sp=True), STOCK, STOCK),
    (L(4, 1, 1), L(2, 2, 2), DROPOUT, DROPOUT),
    (L(1, 4, 1), L(2, 2, 3, sp=True), DROPOUT, DROPOUT),
    (L(1, 2, 2), L(2, 2, 0), STOCK, STOCK),
    (L(2, 1, 2), L(1, 4, 1), DROPOUT, DROPOUT),
    (L(4, 1, 2, sp=True), L(1, 2, 2), STOCK, TEMPO),
    (L(2, 2, 2), L(4, 1, 3), STOCK, STOCK),
    (L(1, 4, 3), L(4, 1, 0), DROPOUT, DROPOUT),
    (L(2, 1, 3), L(2, 2, 1), TEMPO, STOCK),
    (L(4, 1, 3), L(1, 1, 2), STOCK, STOCK),
    (L(2, 2, 3, sp=True), L(1, 2, 3), DROPOUT, DROPOUT),
    # One layout, where DeepSpeed itself loads.
    (L(2, 1, 1, sp=True), L(2, 1, 1, sp=True), STOCK, TEMPO),
    (L(2, 1, 1, sp=True), L(2, 1, 1, sp=True), TEMPO, STOCK),
]
# With these and the tests below each stage and each tensor parallel size is on both sides.
SLOW = (0, 10, 15, 16)
WORDS = {STOCK: "stock", TEMPO: "Tempo", DROPOUT: "Tempo p 0.1"}


def find_marks(number: int) -> list[pytest.MarkDecorator]:
    """Of a pair of PAIRS."""
    if number == 2:
        return []
    return [pytest.mark.slow] if number in SLOW else [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.mark.parametrize(
    ("source", "target", "before", "after"),
    [
        pytest.param(
            *pair,
            id=f"{pair[0]} {WORDS[pair[2]]} - {pair[1]} {WORDS[pair[3]]}",
            marks=find_marks(number),
        )
        for number, pair in enumerate(PAIRS)
    ],
)
def test_a_run_goes_on_in_another_layout(
    data: Data, sources: Sources, tmp_path: Path, source: L, target: L, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    folder, whole = sources.get(source, before)
    load = ["--load", str(folder / "save")]
    resumed = successful(go(data, tmp_path, target, *after, *load, before=keep_states))
    assert_same_states(tmp_path / "loaded", folder / f"saved{SAVED}")
    assert f"going on after step {SAVED}" in resumed.output
    if source != target:
        assert f"DP {source.dp}, ZeRO {source.stage} to TP {target.tp}, DP {target.dp}, ZeRO {target.stage}" in (
            resumed.output
        )
    assert_same_losses(resumed.losses, whole.losses[SAVED:])
    rates = [[record["learning_rate"] for record in result.of_kind("train")] for result in (resumed, whole)]
    assert rates[0] == rates[1][SAVED:]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 0), (3, 2), (0, 1)])
def test_another_stage_alone(data: Data, sources: Sources, tmp_path: Path, before: int, after: int) -> None:
    folder, whole = sources.get(L(1, 2, before), DROPOUT)
    resumed = successful(go(data, tmp_path, L(1, 2, after), *DROPOUT, "--load", str(folder / "save")))
    assert_same_losses(resumed.losses, whole.losses[SAVED:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (L(1, 2, 1), L(2, 1, 3)),
        (L(1, 2, 2), L(2, 1, 1)),
        pytest.param(L(2, 1, 3), L(1, 2, 1), marks=pytest.mark.exhaustive),
        pytest.param(L(2, 2, 1, sp=True), L(1, 2, 2), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_bf16_keeps_its_float32_masters(data: Data, sources: Sources, tmp_path: Path, source: L, target: L) -> None:
    """BF16_Optimizer, which is what stage 1 gets, and ZeRO's own hand over to each other."""
    folder, whole = sources.get(source, DROPOUT, True)
    config = target.config(**BF16)
    load = ["--load", str(folder / "save")]
    resumed = successful(go(data, tmp_path, target, *DROPOUT, *load, config=config, before=keep_states))
    assert_same_states(tmp_path / "loaded", folder / f"saved{SAVED}")
    assert resumed.losses == pytest.approx(whole.losses[SAVED:], rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (L(1, 2, 1), L(4, 1, 3)),
        pytest.param(L(4, 1, 2, sp=True), L(2, 1, 0), marks=pytest.mark.exhaustive),
        pytest.param(L(2, 2, 3), L(1, 1, 1), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_gated_model_with_fewer_groups_than_ranks(
    data: Data, sources: Sources, tmp_path: Path, source: L, target: L
) -> None:
    options = (*LLAMA, *DROPOUT)
    folder, whole = sources.get(source, options)
    load = ["--load", str(folder / "save")]
    resumed = successful(go(data, tmp_path, target, *options, *load, before=keep_states))
    assert_same_states(tmp_path / "loaded", folder / f"saved{SAVED}", is_gated=True)
    assert_same_losses(resumed.losses, whole.losses[SAVED:])


@pytest.mark.slow
def test_the_way_there_and_back_and_on(data: Data, sources: Sources, tmp_path: Path) -> None:
    """The checkpoints go into one folder; the last run is in the first one's layout again."""
    folder, whole = sources.get(L(2, 2, 1, sp=True), DROPOUT)
    shutil.copytree(folder / "save", tmp_path / "save")
    save = ["--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")]
    successful(go(data, tmp_path, L(1, 2, 3), *DROPOUT, *save, "--exit-interval", "3", "--micro-batch-size", "2"))
    last = successful(go(data, tmp_path, L(2, 2, 1, sp=True), *DROPOUT, *save))
    assert_same_losses(last.losses, whole.losses[SAVED:])


@pytest.mark.slow
@pytest.mark.parametrize("saved_in_turns", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_an_option_that_moves_the_weights_within_a_layout(data: Data, tmp_path: Path, saved_in_turns: bool) -> None:
    """round_robin_gradients gives the data-parallel ranks other parameters, and DeepSpeed does not say so."""
    layout, save = L(1, 2, 2), ["--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")]

    def config(in_turns: bool) -> dict[str, Any]:
        return {"zero_optimization": {"stage": 2, "round_robin_gradients": in_turns}}

    whole = successful(go(data, tmp_path / "whole", layout, *STOCK, config=config(saved_in_turns)))
    first = [*STOCK, *save, "--exit-interval", str(SAVED)]
    successful(go(data, tmp_path / "parts", layout, *first, config=config(saved_in_turns)))
    second = successful(go(data, tmp_path / "parts", layout, *STOCK, *save, config=config(not saved_in_turns)))
    assert "resharding" in second.output
    assert_same_losses(second.losses, whole.losses)


@pytest.mark.slow
def test_the_global_batch_stays_when_it_was_left_out(data: Data, tmp_path: Path) -> None:
    """It was 2 micro batches of 2; two processes now take one each."""
    left_out = [*STOCK, "--train-iters", "3", "--micro-batch-size", "2"]
    save = ["--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")]
    options = [*left_out, *save]
    config = {"gradient_accumulation_steps": 2}
    first = successful(run(data, tmp_path, *options, "--exit-interval", "2", config=config))
    second = successful(run(data, tmp_path, *options, world_size=2, config=L(1, 2, 1).config()))
    assert [record["consumed_samples"] for record in second.of_kind("train")] == [4, 8, 12]
    assert second.losses[:2] == first.losses


def die_while_saving() -> None:
    """kill -9 between the files being written and the rename."""
    from tempo_megatron.training import checkpoint

    checkpoint.flush_all_to_disk = lambda folder: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_kill_9_in_the_first_save_after_it_loses_nothing(data: Data, sources: Sources, tmp_path: Path) -> None:
    folder, whole = sources.get(L(2, 1, 0), STOCK)
    save = tmp_path / "save"
    shutil.copytree(folder / "save", save)
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
    assert_same_losses(resumed.losses, whole.losses[SAVED:])


def strip(save: Path) -> None:
    """Make it a checkpoint of a version that did not write what lies where."""
    for path in save.rglob("rank_*.pt"):
        state = torch.load(path, weights_only=False)
        del state["layout"]
        torch.save(state, path)
    write_unsealed(save / f"iter_{SAVED:07d}")


@pytest.mark.slow
def test_a_checkpoint_that_does_not_say_what_lies_where_goes_on_in_its_layout(
    data: Data, sources: Sources, tmp_path: Path
) -> None:
    layout = L(2, 1, 0)
    folder, whole = sources.get(layout, STOCK)
    shutil.copytree(folder / "save", tmp_path / "save")
    strip(tmp_path / "save")
    load = [*STOCK, "--load", str(tmp_path / "save")]
    refused = go(data, tmp_path / "refused", L(1, 2, 1), *load)
    assert refused.exit_codes == [1, 1] and "Traceback" not in refused.output
    assert "was saved by an older version of the trainer" in refused.output
    resumed = successful(go(data, tmp_path / "resumed", layout, *load))
    assert resumed.losses_hex == whole.losses_hex[SAVED:]


@pytest.mark.slow
def test_rows_of_padding_that_do_not_divide_are_one_sentence(data: Data, tmp_path: Path) -> None:
    odd = [*STOCK, "--vocab-size", "513", "--make-vocab-size-divisible-by", "1"]
    save = str(tmp_path / "save")
    successful(go(data, tmp_path, L(), *odd, "--exit-interval", "1", "--save", save))
    refused = go(data, tmp_path, L(2, 1, 0), *odd, "--load", save)
    assert refused.exit_codes == [1, 1] and "Traceback" not in refused.output
    assert (
        "has 513 rows of vocabulary, padding included, which the run keeps and --tensor-model-parallel-size 2 does"
        in (refused.output)
    )


def test_states_on_nvme_are_refused_before_anything_changes() -> None:
    offloaded = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
    run_of_nvme: Any = SimpleNamespace(deepspeed=offloaded)
    source: Any = SimpleNamespace(where="--load save/iter_0000003")
    with pytest.raises(ValueError, match='or is of another run, .* use "cpu" for zero_optimization.offload_optimizer'):
        load_resharded(None, source, run_of_nvme)  # type: ignore[arg-type]

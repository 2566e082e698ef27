"""A run whose memory ends: it says what stood at the peak and what would have fitted, and every rank ends."""

from __future__ import annotations

import dataclasses
import functools
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training_job import Data, fork_beside, run, successful

from tempo_megatron import TempoConfig
from tempo_megatron.memory.live.out_of_memory import find_requested, is_out_of_memory
from tempo_megatron.memory.live.remedies import explain, list_changes
from tempo_megatron.memory.rank.estimate import estimate_ranks
from tempo_megatron.memory.run import OptimizerSettings, Run
from tempo_megatron.models.shape import make_shape

SHAPE = make_shape(num_layers=4, hidden_size=128, num_attention_heads=4, seq_length=256, vocab_size=1024)
RUN = Run(
    model=SHAPE,
    tempo=TempoConfig.off(),
    optimizer=OptimizerSettings(kind="deepspeed", zero_stage=0),
    micro_batch_size=2,
    num_micro_batches=1,
)
CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.02 GiB is free."
)
CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "


def test_both_kinds_of_lack_are_known_and_how_much_was_asked_for() -> None:
    on_gpu, on_cpu = torch.OutOfMemoryError(CUDA), RuntimeError(CPU + "4096 bytes. Error code 12")
    assert is_out_of_memory(on_gpu) and is_out_of_memory(on_cpu) and is_out_of_memory(MemoryError())
    assert find_requested(on_gpu) == int(2.5 * 2**30) and find_requested(on_cpu) == 4096
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


@pytest.mark.slow
def test_the_first_change_that_fits_is_named() -> None:
    texts, runs = zip(*list_changes(RUN), strict=True)
    assert texts[0] == "--use-tempo" and texts[-1].endswith("--micro-batch-size 1")
    peaks = [estimate_ranks(run)[0].peak_bytes for run in runs]
    # A little less than what Tempo takes, so that it is not enough.
    for capacity in (peaks[0] - 1, min(peaks)):
        fitting = next(text for text, each in zip(texts, peaks, strict=True) if each <= capacity)
        assert f": {fitting}\n" in explain(RUN, capacity=capacity)
    assert "nothing on this list fits" in explain(RUN, capacity=1000)


def test_what_stood_is_named_by_operation() -> None:
    text = explain(RUN)
    for name in ("weights", "optimizer states", "layers", "kept by core_attention (s*s), 4 layers"):
        assert f" {name} " in text


def test_layers_that_block_leaves_are_not_taken_as_recomputed() -> None:
    """--recompute-granularity full --recompute-method block --recompute-num-layers 1."""
    every = dataclasses.replace(RUN, recompute=("full",))
    first = dataclasses.replace(every, recompute_num_layers=1)
    peaks = [estimate_ranks(run)[0].peak_bytes for run in (every, first, RUN)]
    assert peaks == sorted(peaks) and len(set(peaks)) == 3
    text = explain(first)
    assert " kept by core_attention (s*s), 3 layers" in text and " kept by checkpoint (layer input), 1 layers" in text
    assert any("--recompute-method uniform" in words for words, _ in list_changes(first))
    assert not any("--recompute-method uniform" in words for words, _ in list_changes(every))


def act_in_the_second_step(rank: int, act: Callable[[], None]) -> None:
    """Call act on one rank before the second step's forward."""
    from tempo_megatron.training.tasks import task

    fork_beside()
    call, calls = task.Task.forward, []

    def act_and_call(self: Any, *args: Any) -> Any:
        calls.extend([1] * torch.is_grad_enabled())  # without it a checkpoint is tried before it is saved
        if len(calls) == 2 and os.environ["RANK"] == str(rank):
            act()
        return call(self, *args)

    task.Task.forward = act_and_call  # type: ignore[method-assign]


def find_no_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB. GPU 0 is full.")


def limit_memory() -> None:
    """Real allocations fail."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**20, resource.RLIM_INFINITY))


@pytest.mark.slow
def test_a_run_whose_allocation_fails_says_so_without_a_traceback_and_goes_on_from_its_checkpoint(
    data: Data, tmp_path: Path
) -> None:
    save = ("--save", str(tmp_path / "save"), "--save-interval", "1", "--train-iters", "3")
    argv = ("--hidden-size", "256", "--seq-length", "512", "--micro-batch-size", "8", *save)
    failed = run(data, tmp_path, *argv, before=functools.partial(act_in_the_second_step, 0, limit_memory))
    assert failed.exit_codes == [1]
    assert "error on rank 0: out of memory: " in failed.output and "DefaultCPUAllocator" in failed.output
    assert "at the peak, in the" in failed.output and "kept by core_attention (s*s), 2 layers" in failed.output
    assert "the smallest change that would have fitted" in failed.output and "Traceback" not in failed.output
    assert "Traceback" in (tmp_path / "save" / "out_of_memory.rank0.txt").read_text()
    again = successful(run(data, tmp_path / "again", *argv, "--load", str(tmp_path / "save"), "--use-tempo"))
    assert "going on after step 1" in again.output and len(again.losses) == 2


@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_all_ranks_end_when_one_runs_out(data: Data, tmp_path: Path, rank: int) -> None:
    argv = ["--train-iters", "3", "--distributed-timeout-minutes", "30", "--save", str(tmp_path / "save")]
    fail = functools.partial(act_in_the_second_step, rank, find_no_memory)
    failed = run(data, tmp_path, *argv, world_size=2, before=fail, timeout_s=120)
    logs = [(tmp_path / f"rank{n}.log").read_text() for n in range(2)]
    assert failed.exit_codes == [1, 1], logs
    assert f"error on rank {rank}: out of memory" in logs[rank]
    assert "Traceback" not in "".join(logs)
    assert rank == 0 or "error on rank 1 (" in logs[0]  # told by rank 0, too
    other = (tmp_path / "save" / "logs" / f"rank_{1 - rank:05d}.log").read_text()
    assert "This rank was here:" in other or "out of memory" in other

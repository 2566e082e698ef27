"""The launcher of the distributed tests: what a rank returns comes back, and why one failed is said."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist
from distributed import run_megatron_ranks, run_ranks

from tempo_kernels import compiled


def sum_over_ranks(offset: int) -> tuple[int, torch.Tensor]:
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return dist.get_rank(), value


def end_in_rank_1(how: str) -> None:
    if dist.get_rank() == 0:
        return dist.barrier() if how != "sleep" else None
    if how == "raise":
        raise ValueError("the cause")
    if how == "die":
        os._exit(7)
    time.sleep(600)


def list_modules_that_compiling_imports() -> tuple[int, set[str]]:
    """Also how many threads the rank had before."""
    num_threads, before = len(os.listdir("/proc/self/task")), set(sys.modules)
    compiled.get_obstacle()
    return num_threads, set(sys.modules) - before


def layout() -> tuple[int, int]:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank()


def test_results_come_back_by_rank() -> None:
    for rank, (found, total) in enumerate(run_ranks(sum_over_ranks, 4, 10)):
        assert found == rank
        assert total.item() == 46


@pytest.mark.parametrize(
    ("how", "message", "options"),
    [
        ("raise", r"(?s)end_in_rank_1 failed in rank 1:.*ValueError: the cause", {}),
        ("die", r"end_in_rank_1 failed in rank 1:\nexit code 7", {}),
        ("sleep", "end_in_rank_1: ranks .*1.* still ran after 3 s", {"timeout_s": 3}),
    ],
)
def test_a_rank_that_fails_dies_or_hangs_is_named_with_the_cause(how: str, message: str, options: dict) -> None:
    with pytest.raises(RuntimeError, match=message):
        run_ranks(end_in_rank_1, 2, how, **options)


def test_megatron_ranks_are_laid_out_tensor_parallel_first() -> None:
    assert run_megatron_ranks(layout, 4, 2) == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_a_rank_finds_what_is_slow_to_import_done() -> None:
    ((num_threads, imported),) = run_ranks(list_modules_that_compiling_imports, 1)
    assert {name for name in imported if name.startswith("torch.") and "compile_tasks" not in name} == set()
    assert num_threads < 10

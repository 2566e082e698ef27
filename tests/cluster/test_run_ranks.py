"""The launcher of the distributed tests: what a rank returns comes back, and why one failed is said."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks


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

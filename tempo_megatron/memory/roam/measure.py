"""What a step really allocates, as torch's CPU allocator reports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

_Result = TypeVar("_Result")


def measure_allocated(function: Callable[[], _Result]) -> tuple[_Result, int]:
    """What `function` returns, and the most bytes that the allocator gave out beyond those there before.

    Every allocation counts, also those that an operation makes and gives back inside itself. On a GPU
    torch.cuda.max_memory_allocated says the same.
    """
    torch.empty(1, dtype=torch.float32)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = function()
    assert found.profiler is not None and found.profiler.kineto_results is not None
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return result, most

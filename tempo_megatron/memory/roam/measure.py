"""What a step really allocates, as torch's CPU allocator reports it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
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
    with _keep_garbage(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = function()
    assert found.profiler is not None and found.profiler.kineto_results is not None
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return result, most


@contextlib.contextmanager
def _keep_garbage() -> Iterator[None]:
    """No collection of Python's garbage inside, which would give back at any moment what was there before."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

"""Measures what a function really allocates, as torch's CPU allocator reports it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch._C._profiler import _ExtraFields_Allocation
from torch.profiler import ProfilerActivity, profile

_Result = TypeVar("_Result")


def measure_allocated(function: Callable[[], _Result]) -> tuple[_Result, int]:
    """Returns function()'s result, and the most bytes that it held at once of those that it allocated.

    Every allocation counts, even those that an operation makes and frees inside itself. Blocks that existed before and
    are freed inside do not count: torch knows their size only if an earlier profile saw their address.
    """
    result, most, _ = measure_held(function)
    return result, most


def measure_held(function: Callable[[], _Result]) -> tuple[_Result, int, int]:
    """Returns what measure_allocated does, and the bytes that it allocated and still holds at its end."""
    torch.empty(1, dtype=torch.float32)
    with _keep_garbage(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = function()
    held = dict[int, int]()
    alive = most = 0
    for address, nbytes in _read_allocations(found):
        if nbytes > 0:
            held[address] = nbytes
            alive += nbytes
            most = max(most, alive)
        else:
            alive -= held.pop(address, 0)
    return result, most, alive


def _read_allocations(found: profile) -> list[tuple[int, int]]:
    """Lists (address, size) of each allocation in the order of time; the size is negative when a block is freed."""
    assert found.profiler is not None and found.profiler.kineto_results is not None
    waiting = list(found.profiler.kineto_results.experimental_event_tree())
    allocations = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        fields = event.extra_fields
        if isinstance(fields, _ExtraFields_Allocation):
            allocations.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return [(address, nbytes) for _, address, nbytes in sorted(allocations)]


@contextlib.contextmanager
def _keep_garbage() -> Iterator[None]:
    """Switches Python's garbage collector off inside the context, because it could free older blocks at any time."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

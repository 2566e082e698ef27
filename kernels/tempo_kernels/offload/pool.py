"""Host memory for what is offloaded: slabs that are made in the first step and used again in every later one.

A slab holds what one layer moves in one forward. A training step moves the same bytes again and again, so a slab of the
right size is free when it is needed, and nothing is allocated. Where sizes change (rows of other lengths) the smallest
free slab that is large enough is taken; a new one takes the place of one that is too small, so that there are never
more slabs than were in use at once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor


class Slab:
    """A piece of pinned host memory, uint8, which the units of a group share until the last of them is gone."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.num_bytes = memory, memory.numel()
        self.free: list[Any] = []
        """Events of the copies that may still use it; whoever writes to it next waits for them."""
        self.is_used = False

    def lend(self, num_units: int) -> None:
        """Gives the memory to a group."""
        self.is_used, self._num_units, self._events = True, num_units, list[Any]()
        # Garbage may be collected while a unit is freed, and free another: `next` comes between no two of its steps.
        self._num_gone = itertools.count(1)

    def give_back(self, event: Any) -> None:
        """Takes a unit's part back, which is free after the event. It may be called in the midst of a HostPool's own
        work."""
        self._events.append(event)
        if next(self._num_gone) == self._num_units:
            self.free, self.is_used = self._events, False


class HostPool:
    """The slabs of one engine.

    Args:
        allocate: returns that many bytes of pinned memory.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._slabs: list[Slab] = []
        self.num_allocations = 0
        self.peak_bytes_in_use = 0

    @property
    def num_bytes(self) -> int:
        """Of all slabs."""
        return sum(slab.num_bytes for slab in self._slabs)

    @property
    def num_bytes_in_use(self) -> int:
        return sum(slab.num_bytes for slab in self._slabs if slab.is_used)

    def take(self, num_bytes: int, num_units: int) -> Slab:
        """Lends a slab of at least num_bytes. Raises ValueError where the host refuses to pin a new one."""
        unused = sorted((slab for slab in self._slabs if not slab.is_used), key=lambda slab: slab.num_bytes)
        slab = next((slab for slab in unused if slab.num_bytes >= num_bytes), None)
        if slab is None:
            if unused:
                self._slabs.remove(unused.pop())
            del unused
            slab = Slab(self._allocate(num_bytes))
            self._slabs.append(slab)
            self.num_allocations += 1
        slab.lend(num_units)
        self.peak_bytes_in_use = max(self.peak_bytes_in_use, self.num_bytes_in_use)
        return slab


_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""What a control group may take and has taken, of both versions."""


def get_free_host_bytes() -> int | None:
    """Returns the host memory that this process can still take: what the system says is available, and no more than is
    left of its control group's limit. None where neither is known."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    for limit, taken in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            found.append(int(Path(limit).read_text()) - int(Path(taken).read_text()))
    return min(found, default=None)


def count_ranks_of_host() -> int:
    """Returns how many ranks of the run share this host's memory, by the launcher's LOCAL_WORLD_SIZE."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

"""Host memory for what is offloaded: slabs that are made in the first step and used again in every later one.

A slab holds what one layer moves in one forward. A training step moves the same bytes again and again, so a slab of the
right size is free when it is needed, and nothing is allocated. Where sizes change (rows of other lengths) the smallest
free slab that is large enough is taken.
"""

from __future__ import annotations

import bisect
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclasses.dataclass(eq=False)
class Slab:
    """A piece of pinned host memory."""

    memory: Tensor
    """uint8."""

    free: list[Any] = dataclasses.field(default_factory=list)
    """Events of the copies that may still use it; whoever writes to it next waits for them."""


class HostPool:
    """The slabs of one engine.

    Args:
        allocate: returns that many bytes of pinned memory.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._unused: list[Slab] = []  # by size
        self.num_bytes = 0
        """Of all slabs."""
        self.num_allocations = 0
        self.num_bytes_in_use = 0
        self.peak_bytes_in_use = 0

    def take(self, num_bytes: int) -> Slab:
        """Takes a slab of at least num_bytes. Raises ValueError where the host refuses to pin a new one."""
        place = bisect.bisect_left(self._unused, num_bytes, key=lambda slab: slab.memory.numel())
        if place < len(self._unused):
            slab = self._unused.pop(place)
        else:
            slab = Slab(self._allocate(num_bytes))
            self.num_bytes += num_bytes
            self.num_allocations += 1
        self.num_bytes_in_use += slab.memory.numel()
        self.peak_bytes_in_use = max(self.peak_bytes_in_use, self.num_bytes_in_use)
        return slab

    def give_back(self, slab: Slab) -> None:
        """Lets others take a slab that is not needed any more."""
        self.num_bytes_in_use -= slab.memory.numel()
        bisect.insort(self._unused, slab, key=lambda slab: slab.memory.numel())


def find_free_host_bytes() -> int | None:
    """Returns the host memory that this process can still take: what the system says is available, and no more than is
    left of its control group's limit. None where neither is known."""
    found = [_read_available(), *(_read_left(*names) for names in _LIMITS)]
    return min((number for number in found if number is not None), default=None)


_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def _read_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _read_left(limit: str, used: str) -> int | None:
    try:
        return int(Path(limit).read_text()) - int(Path(used).read_text())
    except (OSError, ValueError):  # "max" is no limit
        return None


def count_ranks_of_host() -> int:
    """Returns how many ranks of the run share this host's memory, by the launcher's LOCAL_WORLD_SIZE."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

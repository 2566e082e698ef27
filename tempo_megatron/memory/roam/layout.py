"""Addresses of storages in an arena of least height: rectangles of bytes by time, of which no two overlap."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tempo_megatron.memory.roam.graph import StepGraph, find_lifetimes

WORK_LIMIT = 200_000
# So many rectangles are placed by trying everything that may be better.
_FEW = 9


@dataclasses.dataclass(frozen=True)
class Rectangle:
    """A storage of `size` bytes that is alive from step `first` through step `last`."""

    size: int
    first: int
    last: int

    def meets(self, other: Rectangle) -> bool:
        """Whether both are alive at once."""
        return self.first <= other.last and other.first <= self.last


@dataclasses.dataclass(frozen=True)
class Layout:
    """Offsets of rectangles, and the height of the arena that holds them."""

    offsets: tuple[int, ...]
    height: int
    lower_bound: int
    """No layout is lower."""

    @property
    def is_optimal(self) -> bool:
        return self.height == self.lower_bound


def list_rectangles(graph: StepGraph, order: Sequence[int]) -> tuple[list[int | None], list[Rectangle]]:
    """The storages that an arena of this order holds, and when; a None is the scratch of an operation.

    Storages that are there before the step and after it are no part of it.
    """
    made = {storage for operation in graph.operations for storage in operation.makes}
    lives = [each for each in find_lifetimes(graph, order) if each.storage in made or each.storage not in graph.kept]
    storages: list[int | None] = [each.storage for each in lives]
    found = [Rectangle(graph.sizes[each.storage], each.first, each.last) for each in lives]
    for step, place in enumerate(order):
        if scratch := graph.operations[place].scratch_bytes:
            storages.append(None)
            found.append(Rectangle(scratch, step, step))
    return storages, found


def find_layout(
    rectangles: Sequence[Rectangle],
    *,
    alignment: int = 1,
    work_limit: int = WORK_LIMIT,
    note_progress: Callable[[int, int], None] | None = None,
) -> Layout:
    """The lowest layout that is found.

    Rectangles are cut where none is alive on both sides. Each part is placed largest first in several senses of the
    word; then what reached highest is placed earlier, again and again. A part of few rectangles that is not as low as
    what is alive at once is then solved exactly.

    Args:
        rectangles: what to place.
        alignment: of every offset; sizes are rounded up to it.
        work_limit: rectangles placed in all; the answer depends on it and on no clock.
        note_progress: called with the rectangles placed, and all.
    """
    sizes = [-(-each.size // alignment) * alignment for each in rectangles]
    rounded = [dataclasses.replace(each, size=size) for each, size in zip(rectangles, sizes, strict=True)]
    offsets, heights, bounds, placed = [0] * len(rounded), [0], [0], 0
    parts = _split(rounded)
    # The highest part first: what the others need less is no gain.
    for part in sorted(parts, key=lambda part: -find_most_alive([rounded[i] for i in part])):
        found = _place_part([rounded[i] for i in part], max(bounds), work_limit * len(part) // len(rounded))
        for index, offset in zip(part, found.offsets, strict=True):
            offsets[index] = offset
        heights.append(found.height)
        bounds.append(found.lower_bound)
        placed += len(part)
        if note_progress:
            note_progress(placed, len(rounded))
    check_layout(rounded, offsets)
    return Layout(tuple(offsets), max(heights), max(bounds))


def find_most_alive(rectangles: Iterable[Rectangle]) -> int:
    """The most bytes that are alive at once: no layout is lower."""
    changes = dict[int, int]()
    for each in rectangles:
        changes[each.first] = changes.get(each.first, 0) + each.size
        changes[each.last + 1] = changes.get(each.last + 1, 0) - each.size
    alive = most = 0
    for step in sorted(changes):
        alive += changes[step]
        most = max(most, alive)
    return most


def check_layout(rectangles: Sequence[Rectangle], offsets: Sequence[int]) -> None:
    """Assert that no two rectangles that are alive at once have a byte in common."""
    first, last, size = (
        np.array([getattr(r, name) for r in rectangles], np.int64) for name in ("first", "last", "size")
    )
    low = np.array(offsets, np.int64)
    high = low + size
    assert (low >= 0).all(), "a rectangle lies below the arena"
    for i in range(len(rectangles)):
        others = slice(i + 1, None)
        meets = (first[others] <= last[i]) & (first[i] <= last[others])
        shares = (low[others] < high[i]) & (low[i] < high[others]) & (size[others] > 0) & bool(size[i])
        assert not (meets & shares).any(), f"rectangle {i} overlaps another"


def place_longest_first(rectangles: Sequence[Rectangle]) -> int:
    """The height where the longest-lived go first, each where it fits best: with which the paper compares (LLFB)."""
    order = sorted(
        range(len(rectangles)), key=lambda i: (rectangles[i].first - rectangles[i].last, -rectangles[i].size)
    )
    return _Arena(rectangles).place(order, best=True)[1]


def _split(rectangles: Sequence[Rectangle]) -> list[list[int]]:
    parts, end = list[list[int]](), -1
    for index in sorted(range(len(rectangles)), key=lambda i: rectangles[i].first):
        if not parts or rectangles[index].first > end:
            parts.append([])
        parts[-1].append(index)
        end = max(end, rectangles[index].last)
    return parts


def _place_part(rectangles: Sequence[Rectangle], enough: int, work_limit: int) -> Layout:
    bound = find_most_alive(rectangles)
    goal, arena = max(bound, enough), _Arena(rectangles)
    best: tuple[list[int], int] | None = None
    starts: list[Callable[[Rectangle], int]] = [
        lambda r: -r.size * (r.last - r.first + 1),
        lambda r: r.first - r.last,
        lambda r: -r.size,
        lambda r: r.first,
    ]
    rounds = max(1, work_limit // max(1, len(rectangles)) // len(starts))
    for key in starts:
        order = sorted(range(len(rectangles)), key=lambda i: (key(rectangles[i]), -rectangles[i].size, i))
        for _ in range(rounds):
            offsets, height = arena.place(order)
            if best is None or height < best[1]:
                best = offsets, height
            if best[1] <= goal:
                return Layout(tuple(best[0]), best[1], bound)
            top = [i for i in order if offsets[i] + rectangles[i].size == height]
            moved = set(top)
            if order[: len(top)] == top:
                break
            order = top + [i for i in order if i not in moved]
    assert best is not None
    if len(rectangles) <= _FEW:
        offsets, height = BranchAndBound(rectangles, *best, goal=goal).run()
        return Layout(tuple(offsets), height, max(bound, height if height > goal else bound))
    return Layout(tuple(best[0]), best[1], bound)


class _Arena:
    """Places rectangles one by one, each at the lowest offset at which it fits, or in the narrowest gap."""

    def __init__(self, rectangles: Sequence[Rectangle]) -> None:
        self._rectangles = rectangles

    def place(self, order: Sequence[int], *, best: bool = False) -> tuple[list[int], int]:
        """Offsets, and the height."""
        n = len(self._rectangles)
        low, high, first, last = (np.zeros(n, np.int64) for _ in range(4))
        offsets, height = [0] * n, 0
        for count, index in enumerate(order):
            each = self._rectangles[index]
            if not each.size:
                first[count], last[count] = 0, -1
                continue
            meets = np.flatnonzero((first[:count] <= each.last) & (last[:count] >= each.first) & (high[:count] > 0))
            by_offset = meets[np.argsort(low[meets], kind="stable")]
            below = np.maximum.accumulate(np.concatenate(([0], high[by_offset])))
            gaps = np.concatenate((low[by_offset] - below[:-1], [np.iinfo(np.int64).max]))
            fitting = np.flatnonzero(gaps >= each.size)
            chosen = fitting[np.argmin(gaps[fitting])] if best else fitting[0]
            offset = int(below[chosen])
            low[count], high[count], first[count], last[count] = offset, offset + each.size, each.first, each.last
            offsets[index], height = offset, max(height, offset + each.size)
        return offsets, height


class BranchAndBound:
    """The lowest layout, by branch and bound.

    In some lowest layout every rectangle lies on the ground or on another. Rectangles are placed in the order of their
    offsets, each at the lowest that is left: every such layout is one order, and no better one is left out.
    """

    def __init__(self, rectangles: Sequence[Rectangle], offsets: list[int], height: int, *, goal: int) -> None:
        self._rectangles, self._best, self._height, self._goal = rectangles, offsets, height, goal
        self._offsets = dict[int, int]()

    def run(self) -> tuple[list[int], int]:
        self._extend(0, 0)
        return self._best, self._height

    def _extend(self, ground: int, height: int) -> None:
        if len(self._offsets) == len(self._rectangles):
            self._best, self._height = [self._offsets[i] for i in range(len(self._rectangles))], height
            return
        left = [i for i in range(len(self._rectangles)) if i not in self._offsets]
        for index in left:
            each = self._rectangles[index]
            under = (i for i in self._offsets if self._rectangles[i].meets(each))
            offset = max((self._offsets[i] + self._rectangles[i].size for i in under), default=0)
            new_height = max(height, offset + each.size)
            if offset >= ground and new_height < self._height and self._height > self._goal:
                self._offsets[index] = offset
                self._extend(offset, new_height)
                del self._offsets[index]

"""Finds addresses of storages in an arena of least height: rectangles of bytes by time, no two overlapping."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from tempo_megatron.roam.fill import fill_arena
from tempo_megatron.roam.graph import StepGraph, find_lifetimes, scale_progress

WORK_LIMIT = 600_000
# So many rectangles are placed by trying everything that may be better.
_FEW = 9
_UNLIMITED = 1 << 62


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
    num_fills: int = 4,
    note_progress: Callable[[int, int], None] | None = None,
) -> Layout:
    """The lowest layout that is found.

    Rectangles are cut where none is alive on both sides. Of each part, an arena as high as what is alive at once is
    filled from the bottom. Where that fails, the part is placed largest first in several senses of the word, then in
    orders drawn with a fixed seed; what reaches too high is placed earlier, again and again. A part of few rectangles
    that is still higher is then solved exactly.

    Args:
        rectangles: what to place.
        alignment: of every offset; sizes are rounded up to it.
        work_limit: rectangles placed greedily in all; the answer depends on it and on no clock.
        num_fills: orders in which an arena is filled.
        note_progress: called with the rectangles placed, and all, also while one part takes long.
    """
    sizes = [-(-each.size // alignment) * alignment for each in rectangles]
    rounded = [dataclasses.replace(each, size=size) for each, size in zip(rectangles, sizes, strict=True)]
    offsets, heights, bounds, placed = [0] * len(rounded), [0], [0], 0
    parts = _split(rounded)
    # The highest part first: what the others need less is no gain.
    for part in sorted(parts, key=lambda part: -find_most_alive([rounded[i] for i in part])):
        note_share = scale_progress(note_progress, placed, len(part), len(rounded))
        share_of_work = work_limit * len(part) // len(rounded)
        found = _place_part([rounded[i] for i in part], max(bounds), share_of_work, num_fills, note_share)
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
    offsets = _Arena(rectangles).place(order, best=True).offsets
    return _find_height(rectangles, offsets)


def _find_height(rectangles: Sequence[Rectangle], offsets: Sequence[int]) -> int:
    return max((offset + each.size for offset, each in zip(offsets, rectangles, strict=True)), default=0)


def _split(rectangles: Sequence[Rectangle]) -> list[list[int]]:
    parts, end = list[list[int]](), -1
    for index in sorted(range(len(rectangles)), key=lambda i: rectangles[i].first):
        if not parts or rectangles[index].first > end:
            parts.append([])
        parts[-1].append(index)
        end = max(end, rectangles[index].last)
    return parts


# Of a failed placement: what did not fit is placed earlier, so often.
_ROUNDS = 12


def _place_part(
    rectangles: Sequence[Rectangle],
    enough: int,
    work_limit: int,
    num_fills: int,
    note_share: Callable[[float], None] | None = None,
) -> Layout:
    """The lowest that is found: greedily in many orders, each given up as soon as it is no lower than the best."""
    bound = find_most_alive(rectangles)
    goal, arena, work = max(bound, enough), _Arena(rectangles), 0
    stacked = [0, *itertools.accumulate(each.size for each in rectangles)]
    offsets, height = stacked[:-1], stacked[-1]
    if height > goal and (filled := _fill_part(rectangles, goal, num_fills)) is not None:
        offsets, height = filled, _find_height(rectangles, filled)
    for order, best in _list_starts(rectangles):
        for _ in range(_ROUNDS):
            if height <= goal:
                return Layout(tuple(offsets), height, bound)
            found = arena.place(order, best=best, limit=height - 1)
            work += found.num_placed
            if found.num_placed == len(order):
                offsets, height = found.offsets, _find_height(rectangles, found.offsets)
            else:
                order.insert(0, order.pop(found.num_placed))
        if work >= work_limit:
            break
        if note_share:
            note_share(work / work_limit)
    if len(rectangles) <= _FEW:
        offsets, height = BranchAndBound(rectangles, offsets, height, goal=goal).run()
        bound = max(bound, height if height > goal else bound)
    return Layout(tuple(offsets), height, bound)


def _fill_part(rectangles: Sequence[Rectangle], height: int, num_fills: int) -> list[int] | None:
    """Offsets in an arena of this height, if they are found."""
    chosen = [i for i, each in enumerate(rectangles) if each.size]
    sizes, firsts, lasts = (
        np.array([getattr(rectangles[i], name) for i in chosen], np.int64) for name in ("size", "first", "last")
    )
    found = fill_arena(sizes, firsts, lasts, height, num_fills)
    if found is None:
        return None
    offsets = dict(zip(chosen, found.tolist(), strict=True))
    return [offsets.get(i, 0) for i in range(len(rectangles))]


def _list_starts(rectangles: Sequence[Rectangle]) -> Iterator[tuple[list[int], bool]]:
    """Orders in which to place, and whether each goes to the narrowest gap or to the lowest.

    First comes what is large, or lives long, or both; in half of the orders what lives when most is alive before all
    else. Then the same with weights drawn from a generator of a fixed seed, without end.
    """
    rng = random.Random(0)
    sizes = [max(each.size, 1) for each in rectangles]
    lengths = [each.last - each.first + 1 for each in rectangles]
    crowds = _find_crowds(rectangles)
    most = max(crowds, default=0)
    exact = itertools.product(((1, 1), (0, 1), (1, 0)), (0.0, 1.0), (False, True))
    drawn = (
        ((rng.random(), rng.random()), rng.choice((0.0, 0.9, 0.97, 0.99, 1.0)), rng.random() < 0.5)
        for _ in itertools.count()
    )
    for number, ((by_size, by_length), share, best) in enumerate(itertools.chain(exact, drawn)):
        noise = rng.choice((0.0, 0.0, 0.1, 0.3)) if number >= 12 else 0.0
        keys = [
            (-min(crowd, share * most), -(size**by_size) * length**by_length * (1 + noise * rng.random()))
            for crowd, size, length in zip(crowds, sizes, lengths, strict=True)
        ]
        yield sorted(range(len(keys)), key=keys.__getitem__), best


def _find_crowds(rectangles: Sequence[Rectangle]) -> list[int]:
    """Of each rectangle the most bytes that are alive at once while it is."""
    alive = np.zeros(max((each.last for each in rectangles), default=0) + 1, np.int64)
    for each in rectangles:
        alive[each.first : each.last + 1] += each.size
    return [int(alive[each.first : each.last + 1].max()) for each in rectangles]


@dataclasses.dataclass(frozen=True)
class _Placement:
    offsets: list[int]
    """In the order of the rectangles."""
    num_placed: int
    """Fewer than all where the next one would have reached above the limit."""


class _Arena:
    """Places rectangles one by one, each at the lowest offset at which it fits, or in the narrowest gap."""

    def __init__(self, rectangles: Sequence[Rectangle]) -> None:
        self._rectangles = rectangles

    def place(self, order: Sequence[int], *, best: bool, limit: int = _UNLIMITED) -> _Placement:
        """Place in this order, until one reaches above the limit."""
        n = len(self._rectangles)
        low, high, first, last = (np.zeros(n, np.int64) for _ in range(4))
        offsets = [0] * n
        for count, index in enumerate(order):
            each = self._rectangles[index]
            if not each.size:
                first[count], last[count] = 0, -1
                continue
            meets = np.flatnonzero((first[:count] <= each.last) & (last[:count] >= each.first) & (high[:count] > 0))
            by_offset = meets[np.argsort(low[meets], kind="stable")]
            below = np.maximum.accumulate(np.concatenate(([0], high[by_offset])))
            gaps = np.concatenate((low[by_offset] - below[:-1], [_UNLIMITED]))
            fitting = np.flatnonzero(gaps >= each.size)
            chosen = fitting[np.argmin(gaps[fitting])] if best else fitting[0]
            offset = int(below[chosen])
            if offset + each.size > limit:
                return _Placement(offsets, count)
            low[count], high[count], first[count], last[count] = offset, offset + each.size, each.first, each.last
            offsets[index] = offset
        return _Placement(offsets, n)


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

"""Finds addresses of storages in an arena of least height: rectangles of bytes by time, no two of which overlap.

This is the second of the two problems of ROAM (arXiv 2310.19295), known as dynamic storage allocation; ROAM solves it
by integer programs. `find_placement` keeps the order of operations and takes no solver:

1. Rectangles are split where none is alive on both sides. The most bytes alive at once are a lower bound of each part.
2. `Filler` fills an arena of exactly that height from the bottom, so that at every step the rest can still fit.
3. If that fails, `_place_greedily` places rectangles one by one at the lowest or the narrowest fitting gap, in twelve
   orders. Where a rectangle reaches too high, it goes earlier in the next attempt.

`find_arena` may also change the order of operations: where the peak is flat and long, an arena of its height has no
room for gaps, so it tries orders of the same peak in which fewer steps come close to it (`order.flatten_order`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tempo_megatron.roam.graph import StepGraph, find_lifetimes
from tempo_megatron.roam.order import flatten_order

_UNLIMITED = 1 << 62


@dataclasses.dataclass(frozen=True)
class Rectangle:
    """A storage of `size` bytes that is alive from step `first` through step `last`."""

    size: int
    first: int
    last: int

    def meets(self, other: Rectangle) -> bool:
        """Whether there is a step in which both are alive."""
        return self.first <= other.last and other.first <= self.last


@dataclasses.dataclass(frozen=True)
class Placement:
    """Offsets of rectangles in an arena, and the height of that arena."""

    offsets: tuple[int, ...]
    height: int
    lower_bound: int
    """No placement is lower."""

    @property
    def is_optimal(self) -> bool:
        return self.height == self.lower_bound


def list_rectangles(graph: StepGraph, order: Sequence[int]) -> tuple[list[int | None], list[Rectangle]]:
    """Lists the storages that an arena of this order holds, and their rectangles; None is an operation's scratch.

    Storages that exist both before and after the step are not part of an arena.
    """
    made = {storage for operation in graph.operations for storage in operation.makes}
    lives = {s: life for s, life in find_lifetimes(graph, order).items() if s in made or s not in graph.kept}
    storages: list[int | None] = [*lives]
    found = [Rectangle(graph.sizes[storage], *life) for storage, life in lives.items()]
    for step, place in enumerate(order):
        if scratch := graph.operations[place].scratch_bytes:
            storages.append(None)
            found.append(Rectangle(scratch, step, step))
    return storages, found


def find_placement(
    rectangles: Sequence[Rectangle],
    *,
    alignment: int = 1,
    num_fills: int = 4,
    only_fills: bool = False,
) -> Placement:
    """Finds a placement that is as low as the three steps above get it.

    Args:
        rectangles: the storages to place.
        alignment: the alignment of every offset; sizes are rounded up to it.
        num_fills: how many orders `Filler` tries.
        only_fills: whether to leave step 3 out.
    """
    sizes = [-(-each.size // alignment) * alignment for each in rectangles]
    rounded = [dataclasses.replace(each, size=size) for each, size in zip(rectangles, sizes, strict=True)]
    offsets, heights, bounds = [0] * len(rounded), [0], [0]
    parts = _split(rounded)
    # The highest part first: the others have nothing to gain below its bound.
    for part in sorted(parts, key=lambda part: -find_most_alive([rounded[i] for i in part])):
        found = _place_part([rounded[i] for i in part], max(bounds), num_fills, only_fills)
        for index, offset in zip(part, found.offsets, strict=True):
            offsets[index] = offset
        heights.append(found.height)
        bounds.append(found.lower_bound)
    check_placement(rounded, offsets)
    return Placement(tuple(offsets), max(heights), max(bounds))


def find_most_alive(rectangles: Iterable[Rectangle]) -> int:
    """Returns the most bytes that are alive at once: no placement is lower."""
    changes = dict[int, int]()
    for each in rectangles:
        changes[each.first] = changes.get(each.first, 0) + each.size
        changes[each.last + 1] = changes.get(each.last + 1, 0) - each.size
    alive = most = 0
    for step in sorted(changes):
        alive += changes[step]
        most = max(most, alive)
    return most


def check_placement(rectangles: Sequence[Rectangle], offsets: Sequence[int]) -> None:
    """Asserts that no two rectangles that are alive at once share a byte."""
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
    """Returns the height of "long-lived first, best fit" (LLFB), with which the paper compares."""
    order = sorted(
        range(len(rectangles)), key=lambda i: (rectangles[i].first - rectangles[i].last, -rectangles[i].size)
    )
    offsets, _ = _place_greedily(rectangles, order, best=True)
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


# How often a failed attempt is repeated, with the rectangle that did not fit placed first.
_ROUNDS = 12


def _place_part(rectangles: Sequence[Rectangle], enough: int, num_fills: int, only_fills: bool) -> Placement:
    """Places one part by steps 2 and 3; an attempt ends as soon as it gets as high as the best so far."""
    bound = find_most_alive(rectangles)
    goal = max(bound, enough)
    stacked = [0, *itertools.accumulate(each.size for each in rectangles)]
    offsets, height = stacked[:-1], stacked[-1]
    if height > goal and (filled := _fill_part(rectangles, goal, num_fills)) is not None:
        offsets, height = filled, _find_height(rectangles, filled)
    starts = [] if only_fills or height <= goal else _list_starts(rectangles)
    for order, best in starts:
        for _ in range(_ROUNDS):
            if height <= goal:
                return Placement(tuple(offsets), height, bound)
            attempt, num_placed = _place_greedily(rectangles, order, best=best, limit=height - 1)
            if num_placed == len(order):
                offsets, height = attempt, _find_height(rectangles, attempt)
            else:
                order.insert(0, order.pop(num_placed))
    return Placement(tuple(offsets), height, bound)


def _fill_part(rectangles: Sequence[Rectangle], height: int, num_fills: int) -> list[int] | None:
    """Returns offsets in an arena of this height if `Filler` finds them in one of num_fills orders, else None."""
    chosen = [i for i, each in enumerate(rectangles) if each.size]
    sizes, firsts, lasts = (
        np.array([getattr(rectangles[i], name) for i in chosen], np.int64) for name in ("size", "first", "last")
    )
    filler = Filler(sizes, firsts, lasts, height)
    for ranks in itertools.islice(_list_ranks(sizes, firsts, lasts), num_fills):
        found = filler.place(ranks)
        if (found >= 0).all():
            offsets = dict(zip(chosen, found.tolist(), strict=True))
            return [offsets.get(i, 0) for i in range(len(rectangles))]
    return None


def _list_starts(rectangles: Sequence[Rectangle]) -> list[tuple[list[int], bool]]:
    """Lists orders in which to place, each with whether rectangles go to the narrowest gap or to the lowest.

    Large or long-lived rectangles come first, or those that are both. In half of the orders, rectangles that live while
    most bytes are alive come before all others.
    """
    sizes = [max(each.size, 1) for each in rectangles]
    lengths = [each.last - each.first + 1 for each in rectangles]
    crowds = _find_crowds(rectangles)
    starts = []
    for (by_size, by_length), crowded_first, best in itertools.product(
        ((1, 1), (0, 1), (1, 0)), (False, True), (False, True)
    ):
        keys = [
            (-crowd if crowded_first else 0, -(size**by_size) * length**by_length)
            for crowd, size, length in zip(crowds, sizes, lengths, strict=True)
        ]
        starts.append((sorted(range(len(keys)), key=keys.__getitem__), best))
    return starts


def _find_crowds(rectangles: Sequence[Rectangle]) -> list[int]:
    """Returns for each rectangle the most bytes that are alive at once during its life."""
    alive = np.zeros(max((each.last for each in rectangles), default=0) + 1, np.int64)
    for each in rectangles:
        alive[each.first : each.last + 1] += each.size
    return [int(alive[each.first : each.last + 1].max()) for each in rectangles]


def _place_greedily(
    rectangles: Sequence[Rectangle], order: Sequence[int], *, best: bool, limit: int = _UNLIMITED
) -> tuple[list[int], int]:
    """Places rectangles in this order, each at the lowest offset where it fits, or in the narrowest gap.

    Returns the offsets, and how many were placed: fewer than all if the next one would reach above the limit.
    """
    n = len(rectangles)
    low, high, first, last = (np.zeros(n, np.int64) for _ in range(4))
    offsets = [0] * n
    for count, index in enumerate(order):
        each = rectangles[index]
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
            return offsets, count
        low[count], high[count], first[count], last[count] = offset, offset + each.size, each.first, each.last
        offsets[index] = offset
    return offsets, n


_PLACED = 1 << 62


def _list_ranks(sizes: Any, firsts: Any, lasts: Any) -> Iterator[Any]:
    """Yields rankings of rectangles: by first step, last step, area and length, then ever finer mixtures of these."""
    lengths = lasts - firsts + 1
    begin, end, length, area = (_rank(keys) for keys in (firsts, -lasts, -lengths, -lengths * sizes))
    yield from (begin, end, area, length)
    for whole in itertools.count(2):
        for first, last in itertools.product(range(whole, -1, -1), repeat=2):
            rest = whole - first - last
            if rest >= 0 and math.gcd(first, last, rest) == 1:
                yield _rank(first * begin + last * end + rest * length)


def _rank(keys: Any) -> Any:
    return np.argsort(np.argsort(keys, kind="stable"), kind="stable")


class Filler:
    """Fills an arena of a given height from the bottom, so that at every step the rest can still fit.

    The next rectangle is one of those that can lie lowest. Bytes below it that are free are lost, because later
    rectangles lie higher. At each step the arena can afford to lose its height less the bytes alive at that step, which
    is nothing at the peak of a tight arena. A rectangle that would lose more is not taken, so a wrong choice shows at
    once and not at the top of the arena.

    Args:
        sizes, firsts, lasts: for each rectangle its bytes, not 0, and the first and last step of its life; integers.
        height: the height of the arena.
    """

    def __init__(self, sizes: Any, firsts: Any, lasts: Any, height: int) -> None:
        # Only steps at which a rectangle begins count: until the next one, none is alive that was not before.
        begins = np.unique(np.asarray(firsts, np.int64))
        self._sizes = np.asarray(sizes, np.int64)
        self._firsts = np.searchsorted(begins, firsts, "right") - 1
        self._ends = np.searchsorted(begins, lasts, "right")
        self._room = np.full(len(begins), height, np.int64)
        for size, first, end in zip(self._sizes, self._firsts, self._ends, strict=True):
            self._room[first:end] -= size

    def place(self, ranks: Any) -> Any:
        """Returns the offset of each rectangle, and -1 for those that were left when none fitted.

        Of rectangles that can lie equally low, the one of the lowest rank goes first.
        """
        sizes, firsts, ends = self._sizes, self._firsts, self._ends
        room, tops = self._room.copy(), np.zeros_like(self._room)
        lowest, offsets = np.zeros(len(sizes), np.int64), np.full(len(sizes), -1, np.int64)
        if (room < 0).any():
            return offsets
        for _ in range(len(sizes)):
            chosen = self._choose(lowest, ranks, room, tops)
            if chosen is None:
                return offsets
            offset, steps = lowest[chosen], slice(firsts[chosen], ends[chosen])
            offsets[chosen], lowest[chosen] = offset, _PLACED
            room[steps] -= offset - tops[steps]
            tops[steps] = offset + sizes[chosen]
            meets = (firsts < ends[chosen]) & (ends > firsts[chosen])
            np.maximum(lowest, tops[firsts[chosen]], out=lowest, where=meets)
        return offsets

    def _choose(self, lowest: Any, ranks: Any, room: Any, tops: Any) -> int | None:
        """Chooses the first rectangle by offset and rank below which no step loses more than it can afford."""

        def fits(place: Any) -> bool:
            steps = slice(self._firsts[place], self._ends[place])
            return bool((lowest[place] - tops[steps] <= room[steps]).all())

        lying_lowest = np.flatnonzero(lowest == lowest.min())
        for place in lying_lowest[np.argsort(ranks[lying_lowest], kind="stable")]:
            if fits(place):
                return int(place)
        others = np.flatnonzero((lowest > lowest.min()) & (lowest < _PLACED))
        for place in others[np.lexsort((ranks[others], lowest[others]))]:
            if fits(place):
                return int(place)
        return None


# Flatter orders lower the steps within 1/20 of the arena's height below its peak, then within 1/14, ...
_DEPTHS = (20, 14, 10, 7)
# For each flatter order, so many operations are reordered, and rectangles filled in.
_FLAT_WORK = 100_000


@dataclasses.dataclass(frozen=True)
class ArenaPlacement:
    """An order, and a placement of the rectangles that `list_rectangles` lists for it."""

    order: tuple[int, ...]
    placement: Placement


def find_arena(
    graph: StepGraph,
    order: Sequence[int],
    *,
    alignment: int = 1,
) -> ArenaPlacement:
    """Finds the lowest arena for this order, or for an order whose peak is no higher.

    If the placement of the given order does not get down to its bound, flatter orders are filled in.

    Args:
        graph: the step.
        order: an order of its operations.
        alignment: of every offset; sizes are rounded up to it.
    """

    def place(order: Sequence[int], rectangles: Sequence[Rectangle], **fills: Any) -> ArenaPlacement:
        placement = find_placement(rectangles, alignment=alignment, **fills)
        return ArenaPlacement(tuple(order), placement)

    best = place(order, list_rectangles(graph, order)[1])
    for part in _DEPTHS:
        if not best.placement.is_optimal:
            flat = flatten_order(graph, order, best.placement.lower_bound // part, work_limit=_FLAT_WORK)
            of_flat = list_rectangles(graph, flat)[1]
            found = place(flat, of_flat, only_fills=True, num_fills=max(1, _FLAT_WORK // max(1, len(of_flat))))
            best = min(best, found, key=lambda plan: plan.placement.height)
    return best

"""Finds addresses of storages in an arena of least height: rectangles of bytes by time, no two of which overlap.

This is the second of the two problems of ROAM (arXiv 2310.19295), known as dynamic storage allocation; ROAM solves it
by integer programs. `find_placement` keeps the order of operations and takes no solver:

1. Rectangles are split where none is alive on both sides. The most bytes alive at once are a lower bound of each part.
2. `Filler` fills an arena of exactly that height from the bottom, so that at every step the rest can still fit. If that
   fails, it fills a higher one.

`find_arena` may also change the order of operations: where the peak is flat and long, an arena of its height has no
room for gaps, so it tries orders of the same peak in which fewer steps come close to it (`order.flatten_order`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tempo_megatron.roam.graph import StepGraph
from tempo_megatron.roam.order import flatten_order


class Rectangle(NamedTuple):
    """A storage of `size` bytes that is alive from step `first` through step `last`."""

    size: int
    first: int
    last: int


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
    first, last = dict[int, int](), dict[int, int]()
    for step, place in enumerate(order):
        for storage in graph.uses[place]:
            first.setdefault(storage, step if storage in graph.makers else 0)
            last[storage] = len(order) - 1 if storage in graph.kept else step
    storages: list[int | None] = [*sorted(first)]
    found = [Rectangle(graph.sizes[storage], first[storage], last[storage]) for storage in sorted(first)]
    for step, place in enumerate(order):
        if scratch := graph.operations[place].scratch_bytes:
            storages.append(None)
            found.append(Rectangle(scratch, step, step))
    return storages, found


def find_placement(
    rectangles: Sequence[Rectangle], *, alignment: int = 1, num_fills: int = 4, part: int = 64
) -> Placement:
    """Finds a placement that is as low as the two steps above get it.

    Args:
        rectangles: the storages to place.
        alignment: the alignment of every offset; sizes are rounded up to it.
        num_fills: how many orders `Filler` tries for each height.
        part: by 1 / `part` the height grows where it fails.
    """
    size, first, last = np.array(rectangles, np.int64).reshape(-1, 3).T
    size = -(-size // alignment) * alignment
    by_first = np.argsort(first, kind="stable")
    starts = 1 + np.flatnonzero(first[by_first][1:] > np.maximum.accumulate(last[by_first])[:-1])
    parts = [inside[size[inside] > 0] for inside in np.split(by_first, starts)]
    fillers = [(inside, Filler(size[inside], first[inside], last[inside])) for inside in parts]
    offsets, height, lower_bound = np.zeros_like(size), 0, 0
    # The highest part first: the others have nothing to gain below its height.
    for inside, filler in sorted(fillers, key=lambda each: -each[1].most_alive):
        lower_bound = max(lower_bound, filler.most_alive)
        goal = height = max(height, lower_bound)
        while (found := filler.fill(goal, num_fills)) is None:
            goal += max(1, goal // part)
        offsets[inside] = found
        height = int((found + size[inside]).max(initial=height))
    check_placement(np.stack((size, first, last), 1), offsets)
    return Placement(tuple(offsets.tolist()), height, lower_bound)


def check_placement(rectangles: Any, offsets: Any) -> None:
    """Asserts that no two rectangles that are alive at once share a byte."""
    size, first, last = np.array(rectangles, np.int64).reshape(-1, 3).T
    low = np.array(offsets, np.int64)
    high = low + size
    assert (low >= 0).all(), "a rectangle lies below the arena"
    for i in range(len(low)):
        others = slice(i + 1, None)
        meets = (first[others] <= last[i]) & (first[i] <= last[others])
        shares = (low[others] < high[i]) & (low[i] < high[others]) & (size[others] > 0) & bool(size[i])
        assert not (meets & shares).any(), f"rectangle {i} overlaps another"


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
    """

    def __init__(self, sizes: Any, firsts: Any, lasts: Any) -> None:
        self._columns = sizes, firsts, lasts
        # Only steps at which a rectangle begins count: until the next one, none is alive that was not before.
        begins = np.unique(firsts)
        self._firsts = np.searchsorted(begins, firsts, "right") - 1
        self._ends = np.searchsorted(begins, lasts, "right")
        self._alive = np.zeros(len(begins), np.int64)
        for size, first, end in zip(sizes, self._firsts, self._ends, strict=True):
            self._alive[first:end] += size
        self.most_alive = int(self._alive.max(initial=0))
        """The most bytes that are alive at once: no placement is lower."""

    def fill(self, height: int, num_fills: int) -> Any:
        """Returns offsets in an arena of this height if one of num_fills orders finds them, else None."""
        for ranks in itertools.islice(_list_ranks(*self._columns), num_fills):
            offsets = self.place(height, ranks)
            if (offsets >= 0).all():
                return offsets
        return None

    def place(self, height: int, ranks: Any) -> Any:
        """Returns the offset of each rectangle, and -1 for those that were left when none fitted.

        Of rectangles that can lie equally low, the one of the lowest rank goes first.
        """
        sizes, firsts, ends = self._columns[0], self._firsts, self._ends
        room, tops = height - self._alive, np.zeros_like(self._alive)
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
        least = lowest.min()
        # The second pass, which sorts all others, is seldom needed.
        for low, high in ((least, least), (least + 1, _PLACED - 1)):
            places = np.flatnonzero((low <= lowest) & (lowest <= high))
            for place in places[np.lexsort((ranks[places], lowest[places]))]:
                steps = slice(self._firsts[place], self._ends[place])
                if (lowest[place] - tops[steps] <= room[steps]).all():
                    return int(place)
        return None


# Flatter orders lower the steps within 1/20 of the arena's height below its peak, then within 1/14, ...
_DEPTHS = (20, 14, 10, 7)
# For each flatter order, so many operations are reordered, and rectangles filled in.
_FLAT_WORK = 100_000


def find_arena(graph: StepGraph, order: Sequence[int], *, alignment: int = 1) -> tuple[tuple[int, ...], Placement]:
    """Finds the lowest arena for this order, or for an order whose peak is no higher.

    If the placement of the given order does not get down to its bound, flatter orders are filled in. Every offset is
    a multiple of `alignment`, to which sizes are rounded up.

    Returns the order, and a placement of the rectangles that `list_rectangles` lists for it.
    """
    best = tuple(order), find_placement(list_rectangles(graph, order)[1], alignment=alignment)
    lower_bound = best[1].lower_bound
    for depth in _DEPTHS:
        if not best[1].is_optimal:
            flat = flatten_order(graph, order, lower_bound // depth, work_limit=_FLAT_WORK)
            rectangles = list_rectangles(graph, flat)[1]
            num_fills = max(1, _FLAT_WORK // max(1, len(rectangles)))
            # It is worth its time only where it gets down to the bound.
            found = find_placement(rectangles, alignment=alignment, num_fills=num_fills, part=1)
            best = min(best, (tuple(flat), found), key=lambda each: each[1].height)
    return best

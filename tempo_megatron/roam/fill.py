"""Fills an arena of a given height from the bottom, so that what is left can still fit at every step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

_PLACED = 1 << 62


def fill_arena(sizes: Any, firsts: Any, lasts: Any, height: int, num_orders: int) -> Any | None:
    """Offsets in an arena of this height, if they are found by filling it in so many orders.

    The other arguments are those of `Filler`.
    """
    filler = Filler(sizes, firsts, lasts, height)
    for ranks in itertools.islice(_list_ranks(sizes, firsts, lasts), num_orders):
        offsets = filler.place(ranks)
        if (offsets >= 0).all():
            return offsets
    return None


def _list_ranks(sizes: Any, firsts: Any, lasts: Any) -> Iterator[Any]:
    """First go those that begin first, or end last, or live longest, or are largest; then mixtures, ever finer."""
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
    """Places rectangles of bytes by time in an arena of a given height, without an overlap.

    The next rectangle is one of those that can lie lowest. Below it, bytes are lost that no other can take any more. At
    each step no more may be lost than the arena is higher than what is alive then: at the peak of an arena without
    fragmentation that is nothing, so that a wrong choice is seen at once and not at the top.

    Args:
        sizes, firsts, lasts: integers; of each rectangle its bytes, not 0, and the first and the last step of its life.
        height: of the arena.
    """

    def __init__(self, sizes: Any, firsts: Any, lasts: Any, height: int) -> None:
        # Between two steps at which something begins, nothing is alive that was not before.
        begins = np.unique(np.asarray(firsts, np.int64))
        self._sizes = np.asarray(sizes, np.int64)
        self._firsts = np.searchsorted(begins, firsts, "right") - 1
        self._ends = np.searchsorted(begins, lasts, "right")
        self._room = np.full(len(begins), height, np.int64)
        for size, first, end in zip(self._sizes, self._firsts, self._ends, strict=True):
            self._room[first:end] -= size

    def place(self, ranks: Any) -> Any:
        """The offset of each rectangle; -1 of those that were left when nothing fitted.

        Of rectangles that can lie equally low the one of the lowest rank goes first.
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
        """The first in order of offset and rank below which no more is lost than there is room for."""

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

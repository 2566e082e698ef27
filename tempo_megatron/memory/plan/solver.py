"""Chooses exactly how many layers of each kind a pipeline stage has, so that it fits and costs least.

All layers of a stage are alike, so that a choice for each is a number of layers for each kind. `Front` holds, for every
number of layers, all sums of kept bytes and cost that no other sum beats in both; it grows by one layer at a time, and
no sum that could be part of a best one is left out. Whole numbers throughout: the answer is the one that trying
everything would find, and the same on every machine.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

Name = TypeVar("Name")


@dataclasses.dataclass(frozen=True)
class LayerOption(Generic[Name]):
    """One way to run a layer."""

    name: Name
    kept_bytes: int
    """From forward to backward, for each micro batch that is in flight."""
    cost: int
    """Of one micro batch."""
    replay_bytes: int = 0
    """What its recomputation has made again when its backward begins."""


@dataclasses.dataclass(frozen=True)
class BareStage:
    """One pipeline stage without what the options of its layers add."""

    num_layers: int
    in_flight: int
    """Micro batches that are between their forward and their backward at most."""
    fixed_bytes: int
    """All that does not depend on the kinds."""
    base_cost: int = 0
    """What one micro batch costs where nothing is saved."""
    head_bytes: int = 0
    """What the loss head makes beside all kept bytes, before any recomputation begins."""


@dataclasses.dataclass(frozen=True)
class RecomputeMode(Generic[Name]):
    """What the whole model shares: Megatron's recomputation, the kinds that its layers can be of, and its stages."""

    kinds: tuple[LayerOption[Name], ...]
    stages: tuple[BareStage, ...]
    full_kinds: tuple[LayerOption[Name], ...] = ()
    """Not empty: the first layers of every stage, as many in each, are of one of these kinds; the same in a stage."""
    num_full: int | None = None
    """How many; None is any number from 1."""


@dataclasses.dataclass(frozen=True)
class StageChoice(Generic[Name]):
    """The kinds of one stage's layers, in the order of the layers."""

    names: tuple[Name, ...]
    peak_bytes: int
    cost: int
    """With the stage's base_cost."""


@dataclasses.dataclass(frozen=True)
class Solution(Generic[Name]):
    """The best choice for all stages."""

    mode: int
    num_full: int
    stages: tuple[StageChoice[Name], ...]

    @property
    def peak_bytes(self) -> int:
        return max(stage.peak_bytes for stage in self.stages)

    @property
    def cost(self) -> int:
        """Of the slowest stage, for which the others wait."""
        return max(stage.cost for stage in self.stages)


def prune(kinds: Sequence[LayerOption[Name]]) -> tuple[LayerOption[Name], ...]:
    """Drop every kind that another one matches or beats in bytes, replay and cost. Of equal kinds the first stays."""

    def beats(one: LayerOption[Name], other: LayerOption[Name]) -> bool:
        ours, theirs = (_list_figures(kind) for kind in (one, other))
        return all(a <= b for a, b in zip(ours, theirs, strict=True))

    kept = list[LayerOption[Name]]()
    for kind in sorted(kinds, key=_list_figures):
        if not any(beats(other, kind) for other in kept):
            kept.append(kind)
    return tuple(kept)


def _list_figures(kind: LayerOption[Name]) -> tuple[int, int, int]:
    return kind.cost, kind.kept_bytes, kind.replay_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class _Point:
    """A choice for one stage, of which only the sums are known yet."""

    cost: int
    peak_bytes: int
    full: LayerOption[Any] | None
    front: _Front
    index: int


def _weigh(points: Sequence[_Point]) -> tuple[int, int, int]:
    """Cost of the slowest stage, of all together, and bytes of the fullest."""
    costs = [point.cost for point in points]
    return max(costs), sum(costs), max(point.peak_bytes for point in points)


class _Front:
    """For each number of layers the sums of kept bytes and cost that no other sum beats, in the order of the bytes."""

    def __init__(self, kinds: Sequence[LayerOption[Any]], num_layers: int) -> None:
        self.kinds = kinds
        kept, costs = (np.array([getattr(kind, name) for kind in kinds], np.int64) for name in ("kept_bytes", "cost"))
        zero = np.zeros(1, np.int64)
        self.kept, self.costs = [zero], [zero]
        self._last_kinds, self._parents = [zero], [zero]
        for _ in range(num_layers):
            sums = [(values[:, None] + last[-1]).ravel() for values, last in ((kept, self.kept), (costs, self.costs))]
            order = np.lexsort((sums[1], sums[0]))
            sorted_costs = sums[1][order]
            is_better = np.ones(len(order), bool)
            is_better[1:] = sorted_costs[1:] < np.minimum.accumulate(sorted_costs)[:-1]
            order = order[is_better]
            last_kinds, parents = np.divmod(order, len(self.kept[-1]))
            self.kept.append(sums[0][order])
            self.costs.append(sums[1][order])
            self._last_kinds.append(last_kinds)
            self._parents.append(parents)

    def find(self, num_layers: int, kept_bytes: int) -> int | None:
        """The cheapest point of so many layers that keeps at most `kept_bytes`."""
        point = bisect.bisect_right(self.kept[num_layers], kept_bytes) - 1
        return point if point >= 0 else None

    def read(self, num_layers: int, point: int) -> list[LayerOption[Any]]:
        """The kinds of a point's layers, equal ones side by side."""
        used = []
        for level in range(num_layers, 0, -1):
            used.append(int(self._last_kinds[level][point]))
            point = int(self._parents[level][point])
        return [self.kinds[index] for index in sorted(used)]


class _Table(Generic[Name]):
    """What a mode offers to its stages."""

    def __init__(self, mode: RecomputeMode[Name]) -> None:
        kinds, self._full_kinds, self.stages = prune(mode.kinds), prune(mode.full_kinds), mode.stages
        self._num_full = mode.num_full
        self._num_layers = num_layers = max(stage.num_layers for stage in mode.stages)
        # What a recomputation has made again counts once, for the kind in which it is largest.
        limits = sorted({kind.replay_bytes for kind in kinds})
        allowed = ([kind for kind in kinds if kind.replay_bytes <= limit] for limit in limits)
        self._fronts = [(limit, _Front(kinds, num_layers)) for limit, kinds in zip(limits, allowed, strict=True)]

    def list_numbers_of_full(self) -> range:
        """How many layers of a stage may be recomputed as a whole."""
        if not self._full_kinds:
            return range(1)
        return range(1, self._num_layers + 1) if self._num_full is None else range(self._num_full, self._num_full + 1)

    def find_cheapest(self, stage: BareStage, num_full: int, budget: int) -> _Point | None:
        """The cheapest choice within the budget, and of equal costs one that needs least; None where there is none."""
        m, num_full = stage.in_flight, min(num_full, stage.num_layers)
        rest = budget - stage.fixed_bytes
        found = list[_Point]()
        for full in self._list_full(num_full):
            for limit, front in self._fronts:
                left = rest - m * num_full * (full.kept_bytes if full else 0)
                kept = (left - max(limit, stage.head_bytes)) // m
                if full and m > 1:
                    kept = min(kept, (left - full.replay_bytes) // (m - 1))
                elif full and left < full.replay_bytes:
                    continue
                index = front.find(stage.num_layers - num_full, kept)
                if index is not None:
                    found.append(self._make_point(stage, num_full, full, limit, front, index))
        return min(found, key=lambda point: (point.cost, point.peak_bytes), default=None)

    def find_smallest(self, stage: BareStage, num_full: int) -> _Point:
        """The choice that needs least."""
        num_full = min(num_full, stage.num_layers)
        found = (
            self._make_point(stage, num_full, full, limit, front, 0)
            for full in self._list_full(num_full)
            for limit, front in self._fronts
        )
        return min(found, key=lambda point: (point.peak_bytes, point.cost))

    def describe(self, stage: BareStage, num_full: int, point: _Point) -> StageChoice[Name]:
        """The kinds behind a point."""
        num_full = min(num_full, stage.num_layers)
        others = point.front.read(stage.num_layers - num_full, point.index)
        kinds = [point.full] * num_full + others if point.full else others
        peak = count_peak(stage, kinds, num_full)
        return StageChoice(tuple(kind.name for kind in kinds), peak, point.cost)

    def _list_full(self, num_full: int) -> Sequence[LayerOption[Name] | None]:
        return self._full_kinds if num_full else (None,)

    def _make_point(
        self, stage: BareStage, num_full: int, full: LayerOption[Name] | None, limit: int, front: _Front, index: int
    ) -> _Point:
        num_others = stage.num_layers - num_full
        m, kept = stage.in_flight, int(front.kept[num_others][index])
        cost = stage.base_cost + int(front.costs[num_others][index])
        peak = m * kept + max(limit if num_others else 0, stage.head_bytes)
        if full:
            of_full = num_full * full.kept_bytes
            cost += num_full * full.cost
            peak = max(peak + m * of_full, (m - 1) * kept + m * of_full + full.replay_bytes)
        return _Point(cost, stage.fixed_bytes + peak, full, front, index)


class Solver(Generic[Name]):
    """The best choices of a problem, for any budget."""

    def __init__(self, modes: Sequence[RecomputeMode[Name]]) -> None:
        self._tables = [_Table(mode) for mode in modes]

    def solve(self, budget: int) -> Solution[Name] | None:
        """The solution of least cost of which every stage fits; None where none fits.

        Of equal costs of the slowest stage, the one whose stages cost least together; then the one that needs least;
        then the earlier mode.
        """
        return self._take_best(lambda table, stage, num_full: table.find_cheapest(stage, num_full, budget), _weigh)

    def find_smallest(self) -> Solution[Name]:
        """The solution whose fullest stage needs least; every stage of it needs as little as its mode allows."""
        found = self._take_best(
            lambda table, stage, num_full: table.find_smallest(stage, num_full),
            lambda points: (_weigh(points)[2], *_weigh(points)[:2]),
        )
        assert found is not None
        return found

    def _take_best(
        self,
        find: Callable[[_Table[Name], BareStage, int], _Point | None],
        weigh: Callable[[list[_Point]], tuple[int, ...]],
    ) -> Solution[Name] | None:
        """The solution of the least weight of those with a point for every stage; the first of equals."""
        best: tuple[tuple[int, ...], int, int, list[_Point]] | None = None
        for index, table in enumerate(self._tables):
            for num_full in table.list_numbers_of_full():
                # Stages that are alike have one answer.
                found = {stage: find(table, stage, num_full) for stage in dict.fromkeys(table.stages)}
                points = [point for stage in table.stages if (point := found[stage]) is not None]
                if len(points) == len(table.stages) and (best is None or weigh(points) < best[0]):
                    best = weigh(points), index, num_full, points
        if best is None:
            return None
        _, index, num_full, points = best
        table = self._tables[index]
        choices = (table.describe(stage, num_full, point) for stage, point in zip(table.stages, points, strict=True))
        return Solution(index, num_full, tuple(choices))


def count_peak(stage: BareStage, kinds: Sequence[LayerOption[Name]], num_full: int) -> int:
    """Bytes of a stage at its fullest.

    That is in the loss head; or when the last layer's backward begins, with what its recomputation makes again, if it
    has one; or when that of the last layer that is recomputed as a whole does: then the layers behind it have given
    back what they kept of this micro batch.
    """
    m, kept = stage.in_flight, sum(kind.kept_bytes for kind in kinds)
    peak = m * kept + max((kind.replay_bytes for kind in kinds[num_full:]), default=0)
    peak = max(peak, m * kept + stage.head_bytes)
    if num_full:
        of_full = sum(kind.kept_bytes for kind in kinds[:num_full])
        peak = max(peak, (m - 1) * kept + of_full + kinds[0].replay_bytes)
    return stage.fixed_bytes + peak

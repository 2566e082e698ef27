"""Chooses an option for every layer of every pipeline stage, so that all stages fit and the slowest costs least.

The layers of a stage are interchangeable, so a choice is a number of layers for each option. `_Front` holds, for every
number of layers, all sums of kept bytes and cost that no other sum beats in both. It grows by one layer at a time, and
drops no sum that could be part of a best one. All numbers are whole: the solution is the one that trying everything
would find, and the same on every machine.
"""

from __future__ import annotations

import bisect
import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

Name = TypeVar("Name")


@dataclasses.dataclass(frozen=True)
class LayerOption(Generic[Name]):
    """One way to run a layer."""

    name: Name
    kept_bytes: int
    """Bytes from forward to backward, for each micro batch in flight."""
    cost: int
    """The time of one micro batch."""
    replay_bytes: int = 0
    """Bytes that its recomputation has made again when its backward begins."""


@dataclasses.dataclass(frozen=True)
class BareStage:
    """One pipeline stage without what the options of its layers add."""

    num_layers: int
    in_flight: int
    """The most micro batches that are between forward and backward at once."""
    fixed_bytes: int
    """Bytes that do not depend on the options."""
    base_cost: int = 0
    """The cost of one micro batch without that of the options."""
    head_bytes: int = 0
    """Bytes that the loss head makes beside all kept bytes, before any recomputation begins."""


@dataclasses.dataclass(frozen=True)
class RecomputeMode(Generic[Name]):
    """The stages of a model with one kind of recomputation by Megatron, and the options of its layers."""

    options: tuple[LayerOption[Name], ...]
    stages: tuple[BareStage, ...]
    full_options: tuple[LayerOption[Name], ...] = ()
    """Where there are some, the first layers of every stage, equally many in each, all have the same one of these."""
    num_full: int | None = None
    """How many layers of each stage have one of `full_options`; None: any number from 1."""


@dataclasses.dataclass(frozen=True)
class StageChoice(Generic[Name]):
    """The options of one stage's layers."""

    names: tuple[Name, ...]
    """In the order of the layers."""
    peak_bytes: int
    cost: int
    """The stage's base_cost and that of the options."""


@dataclasses.dataclass(frozen=True)
class Solution(Generic[Name]):
    """The best choice for all stages."""

    mode: int
    """Its place in the list that the Solver was given."""
    num_full: int
    stages: tuple[StageChoice[Name], ...]

    @property
    def peak_bytes(self) -> int:
        return max(stage.peak_bytes for stage in self.stages)

    @property
    def cost(self) -> int:
        """The cost of the slowest stage, for which the others wait."""
        return max(stage.cost for stage in self.stages)


def _prune(options: Sequence[LayerOption[Name]]) -> list[LayerOption[Name]]:
    """Drop every option that another one matches or beats in all figures. Of equal options the first stays."""

    def list_figures(option: LayerOption[Name]) -> tuple[int, int, int]:
        return option.cost, option.kept_bytes, option.replay_bytes

    kept = list[LayerOption[Name]]()
    for option in sorted(options, key=list_figures):
        figures = list_figures(option)
        if not any(all(map(operator.le, list_figures(other), figures)) for other in kept):
            kept.append(option)
    return kept


@dataclasses.dataclass(frozen=True, slots=True)
class _Point:
    """A choice for one stage: its sums, and where its options can be read."""

    cost: int
    peak_bytes: int
    full: LayerOption[Any] | None
    front: _Front
    index: int


def _weigh(points: Sequence[_Point]) -> tuple[int, int, int]:
    """The cost of the slowest stage, the cost of all together, and the bytes of the fullest."""
    costs = [point.cost for point in points]
    return max(costs), sum(costs), max(point.peak_bytes for point in points)


class _Front:
    """For each number of layers the sums of kept bytes and cost that no other sum beats, by ascending bytes."""

    def __init__(self, options: Sequence[LayerOption[Any]], num_layers: int) -> None:
        self.options = options
        kept = np.array([option.kept_bytes for option in options], np.int64)
        costs = np.array([option.cost for option in options], np.int64)
        zero = np.zeros(1, np.int64)
        self.kept, self.costs = [zero], [zero]
        self._last_options, self._parents = [zero], [zero]
        for _ in range(num_layers):
            kept_sums = (kept[:, None] + self.kept[-1]).ravel()
            cost_sums = (costs[:, None] + self.costs[-1]).ravel()
            order = np.lexsort((cost_sums, kept_sums))
            sorted_costs = cost_sums[order]
            is_better = np.ones(len(order), bool)
            is_better[1:] = sorted_costs[1:] < np.minimum.accumulate(sorted_costs)[:-1]
            order = order[is_better]
            last_options, parents = np.divmod(order, len(self.kept[-1]))
            self.kept.append(kept_sums[order])
            self.costs.append(cost_sums[order])
            self._last_options.append(last_options)
            self._parents.append(parents)

    def find(self, num_layers: int, kept_bytes: int) -> int | None:
        """The cheapest point of `num_layers` layers that keeps at most `kept_bytes`."""
        point = bisect.bisect_right(self.kept[num_layers], kept_bytes) - 1
        return point if point >= 0 else None

    def read(self, num_layers: int, point: int) -> list[LayerOption[Any]]:
        """The options of a point's layers, equal ones next to each other."""
        used = []
        for level in range(num_layers, 0, -1):
            used.append(int(self._last_options[level][point]))
            point = int(self._parents[level][point])
        return [self.options[index] for index in sorted(used)]


class _Table(Generic[Name]):
    """Finds the points of single stages in one mode."""

    def __init__(self, mode: RecomputeMode[Name]) -> None:
        options, self._full_options, self.stages = _prune(mode.options), _prune(mode.full_options), mode.stages
        self._num_full = mode.num_full
        self._num_layers = num_layers = max(stage.num_layers for stage in mode.stages)
        # Only one layer is recomputed at a time, so replay_bytes count once: those of the option with most. A front for
        # each possible limit holds the options that do not exceed it.
        limits = sorted({option.replay_bytes for option in options})
        allowed = ([option for option in options if option.replay_bytes <= limit] for limit in limits)
        self._fronts = [(limit, _Front(options, num_layers)) for limit, options in zip(limits, allowed, strict=True)]

    def list_numbers_of_full(self) -> range:
        """The numbers of layers of a stage that may have a full option."""
        if not self._full_options:
            return range(1)
        return range(1, self._num_layers + 1) if self._num_full is None else range(self._num_full, self._num_full + 1)

    def find_cheapest(self, stage: BareStage, num_full: int, budget: int) -> _Point | None:
        """The cheapest choice within the budget, and of equally cheap ones the smallest; None where none fits."""
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
        """The options of a point, and its exact peak."""
        num_full = min(num_full, stage.num_layers)
        others = point.front.read(stage.num_layers - num_full, point.index)
        options = [point.full] * num_full + others if point.full else others
        peak = count_peak(stage, options, num_full)
        return StageChoice(tuple(option.name for option in options), peak, point.cost)

    def _list_full(self, num_full: int) -> Sequence[LayerOption[Name] | None]:
        return self._full_options if num_full else (None,)

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
        """The cheapest solution whose stages all fit; None where there is none.

        Of solutions with equally costly slowest stages it is the one whose stages cost least together, then the one
        that needs least, then the one of the earlier mode.
        """
        return self._take_best(lambda table, stage, num_full: table.find_cheapest(stage, num_full, budget), _weigh)

    def find_smallest(self) -> Solution[Name]:
        """The solution whose fullest stage needs least; every stage needs as little as its mode allows."""
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
        """The solution of least weight among those with a point for every stage; the first of equals."""
        best: tuple[tuple[int, ...], int, int, list[_Point]] | None = None
        for index, table in enumerate(self._tables):
            for num_full in table.list_numbers_of_full():
                # Equal stages have equal points.
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


def count_peak(stage: BareStage, options: Sequence[LayerOption[Name]], num_full: int) -> int:
    """The peak of a stage: the highest of three moments.

    The first is the loss head. The second is the begin of the last layer's backward, with what its recomputation makes
    again. The third is the begin of the backward of the last layer that is recomputed as a whole; by then the layers
    behind it have freed what they kept of this micro batch.
    """
    m, kept = stage.in_flight, sum(option.kept_bytes for option in options)
    peak = m * kept + max((option.replay_bytes for option in options[num_full:]), default=0)
    peak = max(peak, m * kept + stage.head_bytes)
    if num_full:
        of_full = sum(option.kept_bytes for option in options[:num_full])
        peak = max(peak, (m - 1) * kept + of_full + options[0].replay_bytes)
    return stage.fixed_bytes + peak

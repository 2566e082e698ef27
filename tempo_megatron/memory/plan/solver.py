"""Chooses an option for every layer of every pipeline stage, so that all stages fit and the slowest costs least.

The layers of a stage are interchangeable, so a choice is a number of layers for each option. `_Front` holds, for every
number of layers, all sums of kept bytes and cost that no other sum beats in both. It grows by one layer at a time, and
drops no sum that could be part of a best one. All numbers are whole: the solution is the one that trying everything
would find, and the same on every machine.

An option may send bytes to the host. Of a stage's layers so many may do so that the host has room for the largest such
option in each of them, and never the last one, which has no layer behind it to run meanwhile. What two layers send is
on the device at a time, so the largest counts twice. For each largest option there is a front of the layers that may
send, and one of those that do not.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
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
    moved_bytes: int = 0
    """Bytes beside `kept_bytes` that are on the host from forward to backward, for each micro batch in flight."""
    resident: LayerOption[Name] | None = None
    """Of one that moves bytes: the same layer, if it moves none."""


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
    host_bytes: int = 0
    """What the host has for what the layers send."""


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
    host_bytes: int = 0
    """Of all micro batches in flight."""


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

    def list_figures(option: LayerOption[Name]) -> tuple[int, int, int, int]:
        return option.cost, option.kept_bytes, option.replay_bytes, option.moved_bytes

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
    parts: tuple[tuple[_Front, int, int], ...]
    """Front, number of layers, place there; together the layers behind those of `full`, in their order."""


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


@functools.lru_cache(maxsize=256)
def _make_front(options: tuple[LayerOption[Any], ...], num_layers: int) -> _Front:
    """The planner asks for the same ones again, with other fixed bytes."""
    return _Front(options, num_layers)


@dataclasses.dataclass(frozen=True)
class _Fronts:
    """The fronts of options within two limits."""

    replay_bytes: int
    moved_bytes: int
    moving: _Front
    """Of layers that may send something to the host; the same as `staying` where `moved_bytes` is 0."""
    staying: _Front


class _Table(Generic[Name]):
    """Finds the points of single stages in one mode."""

    def __init__(self, mode: RecomputeMode[Name]) -> None:
        options, self._full_options, self.stages = _prune(mode.options), _prune(mode.full_options), mode.stages
        self._num_full = mode.num_full
        self._num_layers = num_layers = max(stage.num_layers for stage in mode.stages)
        # Only one layer is recomputed at a time, so replay_bytes count once: those of the option with most; and what is
        # sent to the host counts twice. Fronts for each possible pair of limits hold the options that do not exceed it.
        self._fronts = list[_Fronts]()
        for most in sorted({option.moved_bytes for option in options} | {0}):
            within = [option for option in options if option.moved_bytes <= most]
            for limit in sorted({option.replay_bytes for option in within}):
                allowed = [option for option in within if option.replay_bytes <= limit]
                # What sends more than another one is of no use where both may.
                alike = [LayerOption(each, each.kept_bytes, each.cost, each.replay_bytes) for each in allowed]
                staying = tuple(option for option in allowed if not option.moved_bytes)
                if staying:
                    fronts = (tuple(each.name for each in _prune(alike)) if most else staying), staying
                    self._fronts.append(_Fronts(limit, most, *(_make_front(each, num_layers) for each in fronts)))

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
            for fronts in self._fronts:
                num_moving = self._count_moving(stage, num_full, full, fronts)
                if num_moving is None:
                    continue
                left = rest - m * _keep_full(stage, num_full, full)
                staging = _count_staging(fronts, _list_full_layers(stage, num_full, full), num_moving)
                limit = fronts.replay_bytes if num_full < stage.num_layers else 0
                kept = (left - max(limit + staging, stage.head_bytes)) // m
                if full and m > 1:
                    kept = min(kept, (left - full.replay_bytes - staging) // (m - 1))
                elif full and left < full.replay_bytes + staging:
                    continue
                indices = _find_pair(fronts, num_moving, stage.num_layers - num_full, kept)
                if indices is not None:
                    found.append(self._make_point(stage, num_full, full, fronts, num_moving, indices))
        return min(found, key=lambda point: (point.cost, point.peak_bytes), default=None)

    def find_smallest(self, stage: BareStage, num_full: int) -> _Point:
        """The choice that needs least."""
        num_full = min(num_full, stage.num_layers)
        found = (
            self._make_point(stage, num_full, full, fronts, num_moving, (0, 0))
            for full in self._list_full(num_full)
            for fronts in self._fronts
            if (num_moving := self._count_moving(stage, num_full, full, fronts)) is not None
        )
        return min(found, key=lambda point: (point.peak_bytes, point.cost))

    def describe(self, stage: BareStage, num_full: int, point: _Point) -> StageChoice[Name]:
        """The options of a point, and its exact peak."""
        num_full = min(num_full, stage.num_layers)
        others = [option for front, number, index in point.parts for option in front.read(number, index)]
        options = _list_full_layers(stage, num_full, point.full) + others
        peak = count_peak(stage, options, num_full)
        moved = stage.in_flight * sum(option.moved_bytes for option in options)
        return StageChoice(tuple(option.name for option in options), peak, point.cost, moved)

    def _list_full(self, num_full: int) -> Sequence[LayerOption[Name] | None]:
        return self._full_options if num_full else (None,)

    def _count_moving(
        self, stage: BareStage, num_full: int, full: LayerOption[Name] | None, fronts: _Fronts
    ) -> int | None:
        """How many layers behind the full ones may send something to the host; None where the host has no room."""
        moved_by_full = sum(option.moved_bytes for option in _list_full_layers(stage, num_full, full))
        room = stage.host_bytes // stage.in_flight - moved_by_full
        if room < 0:
            return None
        if not fronts.moved_bytes:
            return 0
        return max(0, min(stage.num_layers - num_full - 1, room // fronts.moved_bytes))

    def _make_point(
        self,
        stage: BareStage,
        num_full: int,
        full: LayerOption[Name] | None,
        fronts: _Fronts,
        num_moving: int,
        indices: tuple[int, int],
    ) -> _Point:
        num_others = stage.num_layers - num_full
        m = stage.in_flight
        parts = (
            (fronts.moving, num_moving, indices[0]),
            (fronts.staying, num_others - num_moving, indices[1]),
        )
        kept = sum(int(front.kept[number][index]) for front, number, index in parts)
        cost = stage.base_cost + sum(int(front.costs[number][index]) for front, number, index in parts)
        staging = _count_staging(fronts, _list_full_layers(stage, num_full, full), num_moving)
        peak = m * kept + max(fronts.replay_bytes + staging if num_others else 0, stage.head_bytes)
        if full:
            of_full = _keep_full(stage, num_full, full)
            cost += sum(option.cost for option in _list_full_layers(stage, num_full, full))
            peak = max(peak + m * of_full, (m - 1) * kept + m * of_full + full.replay_bytes + staging)
        return _Point(cost, stage.fixed_bytes + peak, full, parts)


def _list_full_layers(stage: BareStage, num_full: int, full: LayerOption[Name] | None) -> list[LayerOption[Name]]:
    """The options of the layers with a full one; the last layer of a stage sends nothing to the host."""
    if full is None:
        return []
    last = full.resident if full.resident is not None and num_full == stage.num_layers else full
    return [full] * (num_full - 1) + [last]


def _keep_full(stage: BareStage, num_full: int, full: LayerOption[Name] | None) -> int:
    return sum(option.kept_bytes for option in _list_full_layers(stage, num_full, full))


def _count_staging(fronts: _Fronts, full_layers: Sequence[LayerOption[Any]], num_moving: int) -> int:
    """What two layers send to the host, which is on the device at a time."""
    return 2 * max(fronts.moved_bytes if num_moving else 0, *(option.moved_bytes for option in full_layers), 0)


def _find_pair(fronts: _Fronts, num_moving: int, num_layers: int, kept_bytes: int) -> tuple[int, int] | None:
    """The cheapest points of layers that may send something to the host, and of the rest, that keep at most
    `kept_bytes` together; None where there are none."""
    if not num_moving:
        index = fronts.staying.find(num_layers, kept_bytes)
        return None if index is None else (0, index)
    kept, costs = fronts.moving.kept[num_moving], fronts.moving.costs[num_moving]
    others = num_layers - num_moving
    indices = np.searchsorted(fronts.staying.kept[others], kept_bytes - kept, side="right") - 1
    if (indices < 0).all():
        return None
    # Where nothing fits, the sum is beyond all others.
    sums = np.where(indices < 0, np.iinfo(np.int64).max, costs + fronts.staying.costs[others][indices])
    place = int(np.argmin(sums))
    return place, int(indices[place])


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
    again and what two layers send to the host. The third is the begin of the backward of the last layer that is
    recomputed as a whole; by then the layers behind it have freed what they kept of this micro batch.
    """
    m, kept = stage.in_flight, sum(option.kept_bytes for option in options)
    staging = 2 * max(option.moved_bytes for option in options)
    replay = max((option.replay_bytes for option in options[num_full:]), default=0)
    peak = m * kept + max(replay + staging if num_full < len(options) else 0, stage.head_bytes)
    if num_full:
        of_full = sum(option.kept_bytes for option in options[:num_full])
        peak = max(peak, (m - 1) * kept + of_full + options[0].replay_bytes + staging)
    return stage.fixed_bytes + peak

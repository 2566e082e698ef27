"""Finds the order of a step's operations with the least memory at its peak, and a lower bound beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from tempo_megatron.roam.graph import Problem, StepGraph, check_order, cut, make_problem, restrict, scale_progress
from tempo_megatron.roam.search import LeastState, Search, find_least_state
from tempo_megatron.roam.shift import advance_frees, delay_makes, list_by_memory, list_depth_first

WORK_LIMIT = 100_000


@dataclasses.dataclass(frozen=True)
class OrderPlan:
    """An order, and what is known of it. All bytes are those of `count_bytes`."""

    order: tuple[int, ...]
    """Places in the graph's operations."""
    peak_bytes: int
    given_peak_bytes: int
    """Of the order in which the graph was given."""
    lower_bound: int
    """No order needs less."""
    num_cuts: int
    """Of how many ranges the problem was made that have no influence on each other."""
    work: int
    """Operations that the exact search looked at."""

    @property
    def is_optimal(self) -> bool:
        """Whether no order needs less than this one."""
        return self.peak_bytes == self.lower_bound


def find_order(
    graph: StepGraph, *, work_limit: int = WORK_LIMIT, note_progress: Callable[[int, int], None] | None = None
) -> OrderPlan:
    """The order of least peak that is found, never of a higher peak than the given one.

    The graph is cut where every order has to pass. In each range that reaches above the others, a minimum cut says what
    at least is alive at the step of the peak, and in which state; orders that pass through it are tried until none is
    better. What is left to gain is left to a search that finds the least peak, if its work suffices.

    Args:
        graph: the step.
        work_limit: of the exact search of each range, in operations; the answer depends on it and on no clock.
        note_progress: called with the operations that are in order, and all, also during a long search.
    """
    problem = make_problem(graph)
    ranges = cut(problem)
    given = problem.count_steps(range(len(problem)))
    order = list(range(len(problem)))
    fixed = [given[inside.start] for inside in ranges if len(inside) == 1]
    solved, lower_bound, work = 0, max(fixed, default=problem.start_bytes), 0
    peaks = [lower_bound]
    # The range that needs most first: where another one needs less, there is nothing to gain.
    for inside in sorted((each for each in ranges if len(each) > 1), key=lambda r: -max(given[r.start : r.stop])):
        note_share = scale_progress(note_progress, solved, len(inside), len(problem))
        part = solve_range(restrict(problem, inside), max(lower_bound, 0), work_limit, note_share)
        order[inside.start : inside.stop] = [inside.start + place for place in part.order]
        lower_bound = max(lower_bound, part.lower_bound)
        peaks.append(part.peak)
        work += part.work
        solved += len(inside)
        if note_progress:
            note_progress(solved, len(problem))
    check_order(graph, order)
    peak = max(peaks)
    assert peak == problem.count_peak(order) and lower_bound <= peak <= max(given, default=peak)
    return OrderPlan(tuple(order), peak, max(given, default=peak), lower_bound, num_cuts=len(ranges), work=work)


@dataclasses.dataclass(frozen=True)
class RangeOrder:
    """An order of one range, its peak, and what bounds it."""

    order: Sequence[int]
    peak: int
    lower_bound: int
    work: int


def solve_range(
    problem: Problem, enough: int, work_limit: int, note_share: Callable[[float], None] | None = None
) -> RangeOrder:
    """The best order found of a range; one whose peak is at most `enough` needs no improvement."""
    order = _tighten(problem, range(len(problem)))
    peak = problem.count_peak(order)
    if peak > enough:
        others = (_tighten(problem, listed) for listed in (list_by_memory(problem), list_depth_first(problem)))
        order = min((order, *others), key=problem.count_peak)
        peak = problem.count_peak(order)
    bound, work = min(enough, peak), 0
    if peak > enough:
        order, bound = _Repair(problem, order, enough).run()
        peak = problem.count_peak(order)
    if peak > max(bound, enough):
        result = Search(problem).run(peak, work_limit, note_share)
        bound, work = max(bound, result.lower_bound), result.work
        if result.order is not None:
            order, peak = result.order, problem.count_peak(result.order)
    return RangeOrder(order, peak, bound, work)


def _tighten(problem: Problem, order: Sequence[int]) -> list[int]:
    return delay_makes(problem, advance_frees(problem, order))


_MOST_CUTS = 200


class _Repair:
    """Leads an order through the states in which least is alive at its peak."""

    def __init__(self, problem: Problem, order: Sequence[int], enough: int) -> None:
        self._problem, self._order, self._enough = problem, list(order), enough
        self._found = dict[int, LeastState]()

    def run(self) -> tuple[list[int], int]:
        """The best order, and a lower bound of every order's peak."""
        problem = self._problem
        while self._bound() < problem.count_peak(self._order) and len(self._found) < _MOST_CUTS:
            steps = problem.count_steps(self._order)
            peak = max(steps)
            places = [place for place, step in zip(self._order, steps, strict=True) if step == peak]
            if not any(self._lead_through(place) for place in places[:4]):
                break
        self._raise_bound()
        return self._order, min(max(self._bound(), self._enough), problem.count_peak(self._order))

    def _bound(self) -> int:
        """The least that the steps need whose states are known."""
        transient = self._problem.transient_bytes
        return max((least.bytes_before + transient[place] for place, least in self._found.items()), default=0)

    def _find(self, place: int) -> LeastState:
        if place not in self._found:
            self._found[place] = find_least_state(self._problem, place)
        return self._found[place]

    def _lead_through(self, place: int) -> bool:
        """Take the order through the state of least memory before an operation, if that is better."""
        problem, least = self._problem, self._find(place)
        for state in (least.smallest, least.largest):
            ahead = [each for each in self._order if state >> each & 1]
            behind = [each for each in self._order if not state >> each & 1 and each != place]
            order = _tighten(problem, [*ahead, place, *behind])
            if _weigh(problem, order) < _weigh(problem, self._order):
                self._order = order
                return True
        return False

    def _raise_bound(self) -> None:
        """Look at the other steps that may prove the order best."""
        steps = zip(self._problem.count_steps(self._order), self._order, strict=True)
        for step, place in sorted(steps, reverse=True):
            if step <= max(self._bound(), self._enough) or len(self._found) >= _MOST_CUTS:
                return
            self._find(place)


def _weigh(problem: Problem, order: Sequence[int]) -> tuple[int, int]:
    steps = problem.count_steps(order)
    peak = max(steps)
    return peak, steps.count(peak)

"""Finds the order of a step's operations with the least memory at its peak, and a lower bound of every order's peak.

This is the first of the two problems of ROAM (arXiv 2310.19295), which solves it by integer programs over parts of the
graph. Here it takes no solver:

1. `cut` splits the step at operations that are comparable with every other one, as ROAM does. Every order runs the
   parts one after the other. The part with the highest peak goes first; the others need not get below its bound.
2. `advance_frees` improves an order of a part without ever raising its peak: operations that only free memory move
   forward. It starts from the given order and, if that is not enough, from two list schedules (`list_by_memory`,
   `list_depth_first`).
3. `repair` takes the operation at the peak. A minimum cut (search.py) gives the state of least memory in which it can
   run: a lower bound of every order's peak, and a state through which the order is led, until none is better.
4. Where bound and peak still differ, `search_order` looks for the least peak, within its work limit.

Lemma: moving operations so never raises a peak. The bytes alive, M, are submodular over states: M(S & T) + M(S | T) <=
M(S) + M(T). Let S become X, with M(X) <= M(S), by one operation that fits below the limit. Any order that goes on from
S over states T may go on from X over T | X instead, and M(T | X) <= M(T) + M(X) - M(T & X) <= M(T), because T & X is S
or X.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

from tempo_megatron.roam.graph import Problem, StepGraph, check_order, cut, make_problem, renumber, restrict
from tempo_megatron.roam.search import LeastState, find_least_state, search_order

WORK_LIMIT = 100_000


@dataclasses.dataclass(frozen=True)
class OperationOrder:
    """An order of a graph's operations, and what is known of it. Bytes are counted as by `count_bytes`."""

    order: tuple[int, ...]
    """Indices of the graph's operations."""
    peak_bytes: int
    given_peak_bytes: int
    """The peak of the order in which the graph was given."""
    lower_bound: int
    """No order needs less."""
    num_cuts: int
    """The number of independent ranges into which the problem was cut."""
    work: int
    """Operations that the exact search examined."""

    @property
    def is_optimal(self) -> bool:
        """Whether no order needs less than this one."""
        return self.peak_bytes == self.lower_bound


def find_order(graph: StepGraph, *, work_limit: int = WORK_LIMIT) -> OperationOrder:
    """Finds an order whose peak is as low as the steps above get it, and never higher than that of the given order.

    Args:
        graph: the step.
        work_limit: the operations that the exact search of each range may examine. The result depends on it and on no
            clock.
    """
    problem = make_problem(graph)
    ranges = cut(problem)
    given = problem.count_steps(range(len(problem)))
    order = list(range(len(problem)))
    fixed = [given[inside.start] for inside in ranges if len(inside) == 1]
    lower_bound, work = max(fixed, default=problem.start_bytes), 0
    peaks = [lower_bound]
    # The range with the highest peak first: the others have nothing to gain below its bound.
    for inside in sorted((each for each in ranges if len(each) > 1), key=lambda r: -max(given[r.start : r.stop])):
        part = restrict(problem, inside)
        found, bound, work_of_part = solve_range(part, max(lower_bound, 0), work_limit)
        order[inside.start : inside.stop] = [inside.start + place for place in found]
        lower_bound = max(lower_bound, bound)
        peaks.append(part.count_peak(found))
        work += work_of_part
    check_order(graph, order)
    peak = max(peaks)
    assert peak == problem.count_peak(order) and lower_bound <= peak <= max(given, default=peak)
    return OperationOrder(tuple(order), peak, max(given, default=peak), lower_bound, num_cuts=len(ranges), work=work)


def solve_range(problem: Problem, enough: int, work_limit: int) -> tuple[Sequence[int], int, int]:
    """Finds the best order of a range; it stops improving at a peak of `enough`.

    Returns the order, a lower bound of every order's peak, and the operations that the exact search examined.
    """
    order = improve_range(problem, enough)
    peak = problem.count_peak(order)
    bound, work = min(enough, peak), 0
    if peak > enough:
        order, bound = repair(problem, order, enough)
        peak = problem.count_peak(order)
    if peak > max(bound, enough):
        result = search_order(problem, peak, work_limit)
        bound, work = max(bound, result.lower_bound), result.work
        if result.order is not None:
            order = result.order
    return order, bound, work


def improve_range(problem: Problem, enough: int) -> list[int]:
    """Returns the given order of a range, or one of the list schedules, with its frees moved forward."""
    order = advance_frees(problem, range(len(problem)))
    if problem.count_peak(order) <= enough:
        return order
    others = (advance_frees(problem, listed) for listed in (list_by_memory(problem), list_depth_first(problem)))
    return min((order, *others), key=problem.count_peak)


_MOST_CUTS = 200


def repair(problem: Problem, order: list[int], enough: int) -> tuple[list[int], int]:
    """Leads an order through the states of least memory for the operations at its peak.

    Returns the best order and a lower bound of every order's peak.
    """
    found = dict[int, LeastState]()

    def find(place: int) -> LeastState:
        if place not in found:
            found[place] = find_least_state(problem, place)
        return found[place]

    def get_bound() -> int:
        """The greatest among the operations whose least states are known."""
        transient = problem.transient_bytes
        return max((least.bytes_before + transient[place] for place, least in found.items()), default=0)

    def lead_through(place: int) -> list[int] | None:
        """The order through a state of least memory before an operation, if that is better."""
        for state in (find(place).smallest, find(place).largest):
            ahead = [each for each in order if state >> each & 1]
            behind = [each for each in order if not state >> each & 1 and each != place]
            other = advance_frees(problem, [*ahead, place, *behind])
            if _weigh(problem, other) < _weigh(problem, order):
                return other
        return None

    while len(found) < _MOST_CUTS:
        steps = problem.count_steps(order)
        peak = max(steps)
        places = [place for place, step in zip(order, steps, strict=True) if step == peak]
        if get_bound() >= peak or (better := next(filter(None, map(lead_through, places[:4])), None)) is None:
            break
        order = better
    # The least states of further operations may prove the order optimal.
    steps = problem.count_steps(order)
    for step, place in sorted(zip(steps, order, strict=True), reverse=True):
        if step <= max(get_bound(), enough) or len(found) >= _MOST_CUTS:
            break
        find(place)
    return order, min(max(get_bound(), enough), max(steps))


def _weigh(problem: Problem, order: Sequence[int]) -> tuple[int, int]:
    steps = problem.count_steps(order)
    peak = max(steps)
    return peak, steps.count(peak)


class State:
    """Which operations of a problem have run, what is alive, and which can run next."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.alive = problem.start_bytes
        self.order = list[int]()
        self._left = [len(users) + (s in problem.kept) for s, users in enumerate(problem.users)]
        self._waiting = [len(before) for before in problem.predecessors]
        self.ready = {place for place, number in enumerate(self._waiting) if not number}

    def find_change(self, place: int) -> int:
        """Returns by how many bytes this operation changes what is alive."""
        problem, left = self.problem, self._left
        freed = sum(problem.sizes[s] for s in problem.uses[place] if left[s] == 1)
        return problem.made_bytes[place] - freed

    def run(self, place: int) -> list[int]:
        """Runs a ready operation. Returns those that it makes ready."""
        self.alive += self.find_change(place)
        self.order.append(place)
        self.ready.remove(place)
        for storage in self.problem.uses[place]:
            self._left[storage] -= 1
        enabled = []
        for other in self.problem.successors[place]:
            self._waiting[other] -= 1
            if not self._waiting[other]:
                enabled.append(other)
        self.ready.update(enabled)
        return enabled

    def list_last_users(self, place: int) -> list[int]:
        """Lists ready operations that became the last user of a storage when this one ran, so that they free it now."""
        problem = self.problem
        alone = (s for s in problem.uses[place] if self._left[s] == 1)
        return [other for s in alone for other in problem.users[s] if other in self.ready]


def advance_frees(problem: Problem, order: Sequence[int]) -> list[int]:
    """Moves each operation forward to where it is ready, fits below the peak and leaves no more alive than before."""
    limit = problem.count_peak(order)
    state, waits = State(problem), dict[int, None]()
    for place in order:
        while place in state.ready:
            room = limit - state.alive
            fitting = (each for each in waits if each in state.ready and problem.transient_bytes[each] <= room)
            free = next(fitting, place)
            waits.pop(free, None)
            changed = [*state.run(free), *state.list_last_users(free)]
            waits.update((each, None) for each in changed if state.find_change(each) <= 0)
    return state.order


def list_by_memory(problem: Problem) -> list[int]:
    """Makes LESCEA's list schedule, with which the paper compares.

    Of the ready operations that do not exceed the peak so far, it takes the one that leaves least alive, or, if all
    exceed it, the one with the smallest new peak.
    """
    state, peak, transient = State(problem), problem.start_bytes, problem.transient_bytes
    changes = {place: state.find_change(place) for place in state.ready}
    while changes:
        room = peak - state.alive
        fitting = ((change, place) for place, change in changes.items() if transient[place] <= room)
        _, place = min(fitting, default=(0, None))
        if place is None:
            place = min(changes, key=lambda each: (transient[each], changes[each], each))
        peak = max(peak, state.alive + transient[place])
        del changes[place]
        for other in [*state.run(place), *state.list_last_users(place)]:
            changes[other] = state.find_change(other)
    return state.order


def list_depth_first(problem: Problem) -> list[int]:
    """Makes a depth-first schedule: each operation right behind those that it needs, the fewest bytes touched first."""
    touched = [sum(problem.sizes[storage] for storage in used) for used in problem.uses]
    by_bytes = sorted(range(len(problem)), key=lambda place: (touched[place], place))
    ranks = {place: rank for rank, place in enumerate(by_bytes)}
    order = dict[int, None]()
    for last in by_bytes:
        waiting = [last]
        while waiting:
            missing = [each for each in problem.predecessors[waiting[-1]] if each not in order]
            if missing:
                waiting += sorted(missing, key=ranks.__getitem__, reverse=True)
            else:
                order[waiting.pop()] = None
    return list(order)


def flatten_order(graph: StepGraph, order: Sequence[int], depth: int, work_limit: int) -> list[int]:
    """Finds an order whose peak is no higher, but in which fewer steps need almost as much.

    The operation at the peak stays where it is. The operations before it and those behind it are two problems of their
    own, each of which gets the lowest peak of step 2. The same is repeated for the highest of the remaining problems,
    until all are `depth` bytes below the first peak, or more than `work_limit` operations were reordered.
    """
    problem = renumber(make_problem(graph), order)
    steps = problem.count_steps(range(len(problem)))
    enough = max(steps, default=0) - depth
    found, work = list(order), 0
    waiting = [(-max(steps, default=0), 0, problem)]
    while waiting and work <= work_limit:
        _, start, part = heapq.heappop(waiting)
        steps = part.count_steps(range(len(part)))
        place = steps.index(max(steps))
        for inside in (range(place), range(place + 1, len(part))):
            if len(inside) < 2 or max(steps[inside.start : inside.stop]) <= enough:
                continue
            side = restrict(part, inside)
            solved = improve_range(side, enough)
            work += len(side)
            first = start + inside.start
            found[first : first + len(side)] = [found[first + each] for each in solved]
            side = renumber(side, solved)
            heapq.heappush(waiting, (-side.count_peak(range(len(side))), first, side))
    return found

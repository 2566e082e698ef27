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
import functools
import heapq
from collections.abc import Sequence

from tempo_megatron.roam.graph import StepGraph, check_order, cut, renumber, restrict
from tempo_megatron.roam.search import find_least_state, search_order

WORK_LIMIT = 100_000


@dataclasses.dataclass(frozen=True)
class OperationOrder:
    """An order of a graph's operations, and what is known of it. Bytes are counted as by its `count_bytes`."""

    order: tuple[int, ...]
    """Indices of the graph's operations."""
    peak_bytes: int
    given_peak_bytes: int
    """The peak of the order in which the graph was given."""
    lower_bound: int
    """No order needs less."""
    num_cuts: int
    """The number of independent ranges into which the graph was cut."""
    work: int
    """Operations that the exact search examined."""

    @property
    def is_optimal(self) -> bool:
        """Whether no order needs less than this one."""
        return self.peak_bytes == self.lower_bound


def find_order(graph: StepGraph, *, work_limit: int = WORK_LIMIT) -> OperationOrder:
    """Finds an order whose peak is as low as the steps above get it, and never higher than that of the given order.

    The exact search of each range may examine `work_limit` operations. The result depends on it and on no clock.
    """
    ranges = cut(graph)
    order = list(range(len(graph)))
    given = graph.count_bytes(order)
    fixed = [given[inside.start] for inside in ranges if len(inside) == 1]
    lower_bound, work = max(fixed, default=graph.start_bytes), 0
    # The range with the highest peak first: the others have nothing to gain below its bound.
    for inside in sorted((each for each in ranges if len(each) > 1), key=lambda r: -max(given[r.start : r.stop])):
        solved, bound, work_of_range = solve_range(restrict(graph, inside), lower_bound, work_limit)
        order[inside.start : inside.stop] = [inside.start + place for place in solved]
        lower_bound, work = max(lower_bound, bound), work + work_of_range
    check_order(graph, order)
    peak, given_peak = graph.count_peak(order), max(given, default=graph.start_bytes)
    assert lower_bound <= peak <= given_peak
    return OperationOrder(tuple(order), peak, given_peak, lower_bound, num_cuts=len(ranges), work=work)


def solve_range(graph: StepGraph, enough: int, work_limit: int) -> tuple[Sequence[int], int, int]:
    """Finds the best order of a range; it stops improving at a peak of `enough`.

    Returns the order, a lower bound of every order's peak, and the operations that the exact search examined.
    """
    order: Sequence[int] = improve_range(graph, enough)
    bound, work = graph.count_peak(order), 0
    if bound > enough:
        order, bound = repair(graph, order, enough)
    if (peak := graph.count_peak(order)) > max(bound, enough):
        result = search_order(graph, peak, work_limit)
        order, bound, work = result.order or order, max(bound, result.lower_bound), result.work
    return order, bound, work


def improve_range(graph: StepGraph, enough: int) -> list[int]:
    """Returns the given order of a range, or one of the list schedules, with its frees moved forward."""
    order = advance_frees(graph, range(len(graph)))
    if graph.count_peak(order) <= enough:
        return order
    others = (advance_frees(graph, listed) for listed in (list_by_memory(graph), list_depth_first(graph)))
    return min((order, *others), key=graph.count_peak)


_MOST_CUTS = 200


def repair(graph: StepGraph, order: Sequence[int], enough: int) -> tuple[Sequence[int], int]:
    """Leads an order through the states of least memory for the operations at its peak.

    Returns the best order and a lower bound of every order's peak.
    """
    bounds = [0]

    @functools.cache
    def find_states(place: int) -> tuple[int, int]:
        least = find_least_state(graph, place)
        bounds.append(least.bytes_before + graph.transient_bytes[place])
        return least.smallest, least.largest

    def lead_through(place: int) -> list[int] | None:
        """The order through a state of least memory before an operation, if that is better."""
        for state in find_states(place):
            ahead = [each for each in order if state >> each & 1]
            behind = [each for each in order if not state >> each & 1 and each != place]
            other = advance_frees(graph, [*ahead, place, *behind])
            if _weigh(graph, other) < _weigh(graph, order):
                return other
        return None

    while len(bounds) <= _MOST_CUTS:
        steps = graph.count_bytes(order)
        peak = max(steps)
        places = [place for place, step in zip(order, steps, strict=True) if step == peak]
        if max(bounds) >= peak or (better := next(filter(None, map(lead_through, places[:4])), None)) is None:
            break
        order = better
    # The least states of further operations may prove the order optimal.
    steps = graph.count_bytes(order)
    for step, place in sorted(zip(steps, order, strict=True), reverse=True):
        if step <= max(*bounds, enough) or len(bounds) > _MOST_CUTS:
            break
        find_states(place)
    return order, min(max(*bounds, enough), max(steps))


def _weigh(graph: StepGraph, order: Sequence[int]) -> tuple[int, int]:
    steps = graph.count_bytes(order)
    peak = max(steps)
    return peak, steps.count(peak)


class State:
    """Which operations of a graph have run, what is alive, and which can run next."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.alive = graph.start_bytes
        self.order = list[int]()
        self._left = [len(users) + (s in graph.kept) for s, users in enumerate(graph.users)]
        self._waiting = [len(before) for before in graph.predecessors]
        self.ready = {place for place, number in enumerate(self._waiting) if not number}

    def find_change(self, place: int) -> int:
        """Returns by how many bytes this operation changes what is alive."""
        graph, left = self.graph, self._left
        freed = sum(graph.sizes[s] for s in graph.uses[place] if left[s] == 1)
        return graph.made_bytes[place] - freed

    def run(self, place: int) -> list[int]:
        """Runs a ready operation. Returns those that it makes ready, and ready ones that it makes the last user of a
        storage, so that they free it now."""
        graph = self.graph
        self.alive += self.find_change(place)
        self.order.append(place)
        self.ready.remove(place)
        for storage in graph.uses[place]:
            self._left[storage] -= 1
        for other in graph.successors[place]:
            self._waiting[other] -= 1
        enabled = [other for other in graph.successors[place] if not self._waiting[other]]
        self.ready.update(enabled)
        alone = (s for s in graph.uses[place] if self._left[s] == 1)
        return enabled + [other for s in alone for other in graph.users[s] if other in self.ready]


def advance_frees(graph: StepGraph, order: Sequence[int]) -> list[int]:
    """Moves each operation forward to where it is ready, fits below the peak and leaves no more alive than before."""
    limit = graph.count_peak(order)
    state, waits = State(graph), dict[int, None]()
    for place in order:
        while place in state.ready:
            room = limit - state.alive
            fitting = (each for each in waits if each in state.ready and graph.transient_bytes[each] <= room)
            free = next(fitting, place)
            waits.pop(free, None)
            waits.update((each, None) for each in state.run(free) if state.find_change(each) <= 0)
    return state.order


def list_by_memory(graph: StepGraph) -> list[int]:
    """Makes LESCEA's list schedule, with which the paper compares.

    Of the ready operations that do not exceed the peak so far, it takes the one that leaves least alive, or, if all
    exceed it, the one with the smallest new peak.
    """
    state, peak, transient = State(graph), graph.start_bytes, graph.transient_bytes
    changes = {place: state.find_change(place) for place in state.ready}
    while changes:
        room = peak - state.alive
        fitting = ((change, place) for place, change in changes.items() if transient[place] <= room)
        _, place = min(fitting, default=(0, None))
        if place is None:
            place = min(changes, key=lambda each: (transient[each], changes[each], each))
        peak = max(peak, state.alive + transient[place])
        del changes[place]
        for other in state.run(place):
            changes[other] = state.find_change(other)
    return state.order


def list_depth_first(graph: StepGraph) -> list[int]:
    """Makes a depth-first schedule: each operation right behind those that it needs, the fewest bytes touched first."""
    touched = [sum(graph.sizes[storage] for storage in used) for used in graph.uses]
    by_bytes = sorted(range(len(graph)), key=lambda place: (touched[place], place))
    ranks = {place: rank for rank, place in enumerate(by_bytes)}
    order = dict[int, None]()
    for last in by_bytes:
        waiting = [last]
        while waiting:
            missing = [each for each in graph.predecessors[waiting[-1]] if each not in order]
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
    graph = renumber(graph, order)
    peak = graph.count_peak(range(len(graph)))
    enough, work = peak - depth, 0
    found, waiting = list(order), [(-peak, 0, graph)]
    while waiting and work <= work_limit:
        _, start, part = heapq.heappop(waiting)
        steps = part.count_bytes(range(len(part)))
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

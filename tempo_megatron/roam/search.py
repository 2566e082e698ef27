"""Finds the order of least peak exactly, for problems with few states, and lower bounds of the peak for any problem.

`search_order` is a best-first search over states. `find_least_state` computes by a minimum cut the least memory that
can be alive when an operation runs, and the state in which this is so.
"""

from __future__ import annotations

import dataclasses
import heapq
from functools import reduce
from operator import or_
from typing import Any

import networkx
from networkx.algorithms.flow import dinitz

from tempo_megatron.roam.graph import Problem


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The result of a search that ended or spent its work."""

    order: list[int] | None
    """An order whose peak is below the limit; None if none was found."""
    lower_bound: int
    """No order's peak is below it. It is the limit itself if no order's peak is below the limit."""
    work: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Front:
    """A state, its bytes alive, the operations ready to run, the peak so far, and the path since the last branch."""

    state: int
    alive: int
    ready: tuple[int, ...]
    peak: int
    path: list[int] = dataclasses.field(default_factory=list)


def search_order(problem: Problem, limit: int, work_limit: int) -> SearchResult:
    """Searches an order whose peak is below a limit, until one is found, no state is left, or `work_limit` operations
    have been examined.

    It always expands the state that was reached with the lowest peak, and of equals the one in which most operations
    have run. A successor's peak is never lower, so the first complete order has the least peak of all. An operation
    that fits below the peak so far, and leaves no more alive than before, runs at once without a branch, because no
    order is better without it (the lemma in order.py).
    """
    masks = [reduce(or_, (1 << each for each in users), 0) for users in problem.users]
    # For each operation (others, size): it frees `size` bytes if all operations of the mask `others` have run.
    frees = [
        [(masks[s] & ~(1 << place), problem.sizes[s]) for s in used if s not in problem.kept and problem.sizes[s]]
        for place, used in enumerate(problem.uses)
    ]
    predecessors = [reduce(or_, (1 << each for each in before), 0) for before in problem.predecessors]

    def run(front: _Front, place: int) -> _Front:
        state = front.state | 1 << place
        freed = sum(size for others, size in frees[place] if not others & ~front.state)
        enabled = (each for each in problem.successors[place] if not predecessors[each] & ~state)
        return _Front(
            state,
            front.alive + problem.made_bytes[place] - freed,
            (*(each for each in front.ready if each != place), *enabled),
            max(front.peak, front.alive + problem.transient_bytes[place]),
            [*front.path, place],
        )

    def run_free(front: _Front) -> _Front:
        """Runs all operations that fit below the peak so far and leave no more alive than before."""
        is_changed = True
        while is_changed:
            is_changed = False
            for place in front.ready:
                if front.alive + problem.transient_bytes[place] > front.peak:
                    continue
                following = run(front, place)
                if following.alive <= front.alive:
                    front, is_changed = following, True
        return front

    roots = tuple(place for place, before in enumerate(problem.predecessors) if not before)
    first = run_free(_Front(0, problem.start_bytes, roots, problem.start_bytes))
    trail: dict[int, tuple[int, list[int]]] = {first.state: (-1, first.path)}
    lowest = {first.state: first.peak}
    work, heap = len(first.path), [(first.peak, -first.state.bit_count(), first.state, first)]
    while heap:
        level, _, state, front = heapq.heappop(heap)
        if level > lowest[state]:
            continue
        if level >= limit:
            break
        if not front.ready:
            return SearchResult(_read_trail(trail, state), level, work)
        if work > work_limit:
            return SearchResult(None, level, work)
        for place in front.ready:
            work += 1
            if front.alive + problem.transient_bytes[place] >= limit:
                continue
            following = run_free(run(dataclasses.replace(front, path=[]), place))
            work += len(following.path)
            if following.peak < lowest.get(following.state, limit):
                lowest[following.state] = following.peak
                trail[following.state] = state, following.path
                key = following.peak, -following.state.bit_count(), following.state
                heapq.heappush(heap, (*key, following))
    return SearchResult(None, limit, work)


def _read_trail(trail: dict[int, tuple[int, list[int]]], state: int) -> list[int]:
    parts = list[list[int]]()
    while state >= 0:
        state, path = trail[state]
        parts.append(path)
    return [place for part in reversed(parts) for place in part]


_SOURCE, _SINK = "source", "sink"


@dataclasses.dataclass(frozen=True)
class LeastState:
    """The states of least memory right before an operation: the smallest and the largest of them."""

    bytes_before: int
    smallest: int
    largest: int


def find_least_state(problem: Problem, place: int) -> LeastState:
    """Finds the states of least memory right before operation `place`, by a minimum cut.

    Every order passes through a state that contains all ancestors of the operation, but neither itself nor any of its
    descendants; the other operations are free. A storage costs its bytes if its maker has run and a user has not. That
    is the cost of a cut in a network with an edge from each storage's maker to its users, where the source side has
    run; edges of infinite capacity keep an operation from running before its predecessors. The minimum cut is a lower
    bound of the memory in which the operation can run, and so of every order's peak.
    """
    before, behind = problem.ancestors[place], problem.descendants[place] | 1 << place
    free = [each for each in range(len(problem)) if not (before | behind) >> each & 1]
    nodes, constant, network = frozenset(free), problem.base_bytes, networkx.DiGraph()
    network.add_nodes_from((_SOURCE, _SINK))
    # Edges without a capacity have an infinite one.
    network.add_edges_from((each, other) for each in free for other in problem.predecessors[each] if other in nodes)
    for storage, users in enumerate(problem.users):
        maker, size = problem.makers.get(storage), problem.sizes[storage]
        if not users or not size or (maker is not None and behind >> maker & 1):
            continue
        origin = maker if maker in nodes else _SOURCE
        if storage in problem.kept or any(behind >> user & 1 for user in users):
            readers: list[Any] = [_SINK]
        else:
            readers = [user for user in users if user in nodes and user != maker]
        if origin == _SOURCE and readers == [_SINK]:
            constant += size
        elif readers:
            held = "storage", storage
            network.add_edge(origin, held, capacity=size)
            network.add_edges_from((held, reader) for reader in readers)
    residual = dinitz(network, _SOURCE, _SINK)

    def has_room(tail: Any, head: Any) -> bool:
        return bool(residual[tail][head]["flow"] < residual[tail][head]["capacity"])

    with_room = networkx.subgraph_view(residual, filter_edge=has_room)
    from_source: set[Any] = networkx.descendants(with_room, _SOURCE)
    to_sink: set[Any] = networkx.ancestors(with_room, _SINK)
    smallest = sum(1 << each for each in free if each in from_source)
    largest = sum(1 << each for each in free if each not in to_sink)
    return LeastState(constant + residual.graph["flow_value"], before | smallest, before | largest)

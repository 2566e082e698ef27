"""Finds the order of least peak exactly, for problems with few states, and lower bounds of the peak for any problem.

`search_order` is a best-first search over states. `find_least_state` computes by a minimum cut the least memory that
can be alive when an operation runs, and the state in which this is so.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import networkx
from networkx.algorithms.flow import dinitz

from tempo_megatron.roam.graph import StepGraph


class Search(NamedTuple):
    """The result of a search that ended or spent its work."""

    order: list[int] | None
    """An order whose peak is below the limit; None if none was found."""
    lower_bound: int
    """No order's peak is below it. It is the limit itself if no order's peak is below the limit."""
    work: int


class _Front(NamedTuple):
    """A state, its bytes alive, the operations ready to run, the peak so far, and the path: the last operation that
    ran and the path before it."""

    state: int
    alive: int
    ready: tuple[int, ...]
    peak: int
    path: Any = None


def search_order(graph: StepGraph, limit: int, work_limit: int) -> Search:
    """Searches an order whose peak is below a limit, until one is found, no state is left, or `work_limit` operations
    have been examined.

    It always expands the state that was reached with the lowest peak, and of equals the one in which most operations
    have run. A successor's peak is never lower, so the first complete order has the least peak of all. An operation
    that fits below the peak so far, and leaves no more alive than before, runs at once without a branch, because no
    order is better without it (the lemma in order.py).
    """
    masks = [sum(1 << each for each in users) for users in graph.users]
    # For each operation (others, size): it frees `size` bytes if all operations of the mask `others` have run.
    frees = [
        [(masks[s] & ~(1 << place), graph.sizes[s]) for s in used if s not in graph.kept and graph.sizes[s]]
        for place, used in enumerate(graph.uses)
    ]

    def run(front: _Front, place: int) -> _Front:
        state = front.state | 1 << place
        freed = sum(size for others, size in frees[place] if not others & ~front.state)
        enabled = (each for each in graph.successors[place] if not graph.ancestors[each] & ~state)
        return _Front(
            state,
            front.alive + graph.made_bytes[place] - freed,
            (*(each for each in front.ready if each != place), *enabled),
            max(front.peak, front.alive + graph.transient_bytes[place]),
            (place, front.path),
        )

    def run_free(front: _Front) -> _Front:
        """Runs all operations that fit below the peak so far and leave no more alive than before."""
        before = None
        while before is not front:
            before = front
            for place in before.ready:
                if front.alive + graph.transient_bytes[place] <= front.peak:
                    following = run(front, place)
                    front = following if following.alive <= front.alive else front
        return front

    roots = tuple(place for place, before in enumerate(graph.predecessors) if not before)
    first = run_free(_Front(0, graph.start_bytes, roots, graph.start_bytes))
    lowest = {first.state: first.peak}
    work, heap = first.state.bit_count(), [(first.peak, -first.state.bit_count(), first)]
    while heap:
        level, _, front = heapq.heappop(heap)
        if level > lowest[front.state]:
            continue
        if level >= limit:
            break
        if not front.ready:
            order, path = list[int](), front.path
            while path:
                place, path = path
                order.append(place)
            return Search(order[::-1], level, work)
        if work > work_limit:
            return Search(None, level, work)
        for place in front.ready:
            work += 1
            if front.alive + graph.transient_bytes[place] >= limit:
                continue
            following = run_free(run(front, place))
            num_run = following.state.bit_count()
            work += num_run - front.state.bit_count()
            if following.peak < lowest.get(following.state, limit):
                lowest[following.state] = following.peak
                heapq.heappush(heap, (following.peak, -num_run, following))
    return Search(None, limit, work)


_SOURCE, _SINK = "source", "sink"


class LeastState(NamedTuple):
    """The states of least memory right before an operation: the smallest and the largest of them."""

    bytes_before: int
    smallest: int
    largest: int


def find_least_state(graph: StepGraph, place: int) -> LeastState:
    """Finds the states of least memory right before operation `place`, by a minimum cut.

    Every order passes through a state that contains all ancestors of the operation, but neither itself nor any of its
    descendants; the other operations are free. A storage costs its bytes if its maker has run and a user has not. That
    is the cost of a cut in a network with an edge from each storage's maker to its users, where the source side has
    run; edges of infinite capacity keep an operation from running before its predecessors. The minimum cut is a lower
    bound of the memory in which the operation can run, and so of every order's peak.
    """
    before, behind = graph.ancestors[place], graph.descendants[place] | 1 << place
    free = [each for each in range(len(graph)) if not (before | behind) >> each & 1]
    nodes, constant, network = frozenset(free), graph.standing_bytes, networkx.DiGraph()
    network.add_nodes_from((_SOURCE, _SINK))
    # Edges without a capacity have an infinite one.
    network.add_edges_from((each, other) for each in free for other in graph.predecessors[each] if other in nodes)
    for storage, users in enumerate(graph.users):
        maker, size = graph.makers.get(storage), graph.sizes[storage]
        if not users or not size or (maker is not None and behind >> maker & 1):
            continue
        origin = maker if maker in nodes else _SOURCE
        if storage in graph.kept or any(behind >> user & 1 for user in users):
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

"""The least that can be alive when an operation runs, by a minimum cut, and the state in which that is so."""

from __future__ import annotations

import dataclasses
from collections import deque

from tempo_megatron.roam.problem import Problem

_INFINITE = 1 << 62
_SOURCE, _SINK = 0, 1


@dataclasses.dataclass(frozen=True)
class LeastState:
    """What has run right before an operation, where least is alive: the smallest and the largest such state."""

    bytes_before: int
    smallest: int
    largest: int


def find_least_state(problem: Problem, place: int) -> LeastState:
    """The state of least memory right before operation `place`.

    Every order passes through a state that has all of the operation's ancestors, and neither itself nor a descendant.
    For the other operations both are allowed. A storage costs its bytes where its maker has run and a user has not: a
    cut of a graph whose source side has run. No order's step is below the least of them, which bounds every peak.
    """
    before, behind = problem.ancestors[place], problem.descendants[place] | 1 << place
    free = [each for each in range(len(problem)) if not (before | behind) >> each & 1]
    network = _Network(2 + len(free))
    nodes = {each: 2 + number for number, each in enumerate(free)}
    constant = problem.base_bytes
    for each in free:
        for other in problem.predecessors[each]:
            if other in nodes:
                network.connect(nodes[each], nodes[other], _INFINITE)
    for storage, users in enumerate(problem.users):
        maker, size = problem.makers.get(storage), problem.sizes[storage]
        if not users or not size or (maker is not None and behind >> maker & 1):
            continue
        origin = nodes.get(maker, _SOURCE) if maker is not None else _SOURCE
        if storage in problem.kept or behind >> users[-1] & 1 or any(behind >> user & 1 for user in users):
            if origin == _SOURCE:
                constant += size
            else:
                network.connect(origin, _SINK, size)
            continue
        readers = [nodes[user] for user in users if user in nodes and user != maker]
        if len(readers) == 1:
            network.connect(origin, readers[0], size)
        elif readers:
            shared = network.add_node()
            network.connect(origin, shared, size)
            for reader in readers:
                network.connect(shared, reader, _INFINITE)
    cost = network.push_flow()
    from_source, to_sink = network.reach_from_source(), network.reach_to_sink()
    smallest = sum(1 << each for each in free if from_source[nodes[each]])
    largest = sum(1 << each for each in free if not to_sink[nodes[each]])
    return LeastState(constant + cost, before | smallest, before | largest)


class _Network:
    """A flow network; Dinic's algorithm."""

    def __init__(self, num_nodes: int) -> None:
        self._arcs: list[list[int]] = [[] for _ in range(num_nodes)]
        self._heads = list[int]()
        self._room = list[int]()

    def add_node(self) -> int:
        self._arcs.append([])
        return len(self._arcs) - 1

    def connect(self, tail: int, head: int, capacity: int) -> None:
        # Arc i ^ 1 goes back along arc i.
        self._arcs[tail].append(len(self._heads))
        self._arcs[head].append(len(self._heads) + 1)
        self._heads += [head, tail]
        self._room += [capacity, 0]

    def push_flow(self) -> int:
        """Push all that goes from source to sink; return how much that is."""
        total = 0
        while (levels := self._measure_levels())[_SINK] >= 0:
            positions = [0] * len(self._arcs)
            while pushed := self._push_path(levels, positions):
                total += pushed
        return total

    def _measure_levels(self) -> list[int]:
        levels = [-1] * len(self._arcs)
        levels[_SOURCE] = 0
        queue = deque([_SOURCE])
        while queue:
            node = queue.popleft()
            for arc in self._arcs[node]:
                head = self._heads[arc]
                if self._room[arc] and levels[head] < 0:
                    levels[head] = levels[node] + 1
                    queue.append(head)
        return levels

    def _push_path(self, levels: list[int], positions: list[int]) -> int:
        node, path = _SOURCE, list[int]()
        while node != _SINK:
            arcs = self._arcs[node]
            while positions[node] < len(arcs):
                arc = arcs[positions[node]]
                if self._room[arc] and levels[self._heads[arc]] == levels[node] + 1:
                    break
                positions[node] += 1
            if positions[node] < len(arcs):
                path.append(arcs[positions[node]])
                node = self._heads[path[-1]]
            elif path:
                node = self._heads[path.pop() ^ 1]
                positions[node] += 1
            else:
                return 0
        pushed = min(self._room[arc] for arc in path)
        for arc in path:
            self._room[arc] -= pushed
            self._room[arc ^ 1] += pushed
        return pushed

    def reach_from_source(self) -> list[bool]:
        return [level >= 0 for level in self._measure_levels()]

    def reach_to_sink(self) -> list[bool]:
        found = [False] * len(self._arcs)
        found[_SINK] = True
        stack = [_SINK]
        while stack:
            for arc in self._arcs[stack.pop()]:
                tail = self._heads[arc]
                if self._room[arc ^ 1] and not found[tail]:
                    found[tail] = True
                    stack.append(tail)
        return found

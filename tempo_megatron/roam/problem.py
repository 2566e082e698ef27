"""The ordering problem in the form in which it is solved: numbers only, and cut where every order has to pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

from tempo_megatron.roam.graph import StepGraph


@dataclasses.dataclass(frozen=True)
class Problem:
    """Operations 0 to n - 1, of which that order is allowed, and the storages that they share.

    What is alive follows from which operations have run, whatever their order was. A set of operations that may have
    run, each with all that comes before it, is called a state here and is written as an integer: bit i is operation i.
    """

    predecessors: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    uses: tuple[tuple[int, ...], ...]
    """Storages that an operation makes, reads or writes."""
    scratch_bytes: tuple[int, ...]
    sizes: tuple[int, ...]
    """Of storages that change: those that are alive throughout are in `base_bytes`."""
    kept: frozenset[int]
    """Storages that are alive from the operation that makes them until the end."""
    base_bytes: int = 0

    def __len__(self) -> int:
        return len(self.predecessors)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.predecessors]
        for place, before in enumerate(self.predecessors):
            for other in before:
                found[other].append(place)
        return tuple(map(tuple, found))

    @cached_property
    def made_bytes(self) -> tuple[int, ...]:
        return tuple(sum(self.sizes[storage] for storage in made) for made in self.makes)

    @cached_property
    def transient_bytes(self) -> tuple[int, ...]:
        """What is added to the memory while an operation runs."""
        return tuple(made + scratch for made, scratch in zip(self.made_bytes, self.scratch_bytes, strict=True))

    @cached_property
    def makers(self) -> dict[int, int]:
        return {storage: place for place, made in enumerate(self.makes) for storage in made}

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """The operations that use each storage, in order."""
        found: list[list[int]] = [[] for _ in self.sizes]
        for place, used in enumerate(self.uses):
            for storage in used:
                found[storage].append(place)
        return tuple(map(tuple, found))

    @cached_property
    def start_bytes(self) -> int:
        """What is alive before anything has run."""
        inputs = (s for s, users in enumerate(self.users) if users and s not in self.makers)
        return self.base_bytes + sum(self.sizes[storage] for storage in inputs)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Of each operation the state right before the earliest step at which it may run."""
        found = list[int]()
        for before in self.predecessors:
            state = 0
            for other in before:
                state |= found[other] | 1 << other
            found.append(state)
        return tuple(found)

    @cached_property
    def descendants(self) -> tuple[int, ...]:
        found = [0] * len(self)
        for place in reversed(range(len(self))):
            for after in self.successors[place]:
                found[place] |= found[after] | 1 << after
        return tuple(found)

    def count_steps(self, order: Sequence[int]) -> list[int]:
        """The bytes that are alive while each step runs."""
        left = [len(users) + (s in self.kept) for s, users in enumerate(self.users)]
        alive, found = self.start_bytes, []
        for place in order:
            found.append(alive + self.transient_bytes[place])
            alive += self.made_bytes[place]
            for storage in self.uses[place]:
                left[storage] -= 1
                if not left[storage]:
                    alive -= self.sizes[storage]
        return found

    def count_peak(self, order: Sequence[int]) -> int:
        """The most bytes that are alive at once."""
        return max(self.count_steps(order), default=self.start_bytes)


def make_problem(graph: StepGraph) -> Problem:
    """The whole of a graph."""
    made = {storage for operation in graph.operations for storage in operation.makes}
    constant = graph.kept - made
    return Problem(
        predecessors=tuple(map(tuple, graph.find_predecessors())),
        makes=tuple(operation.makes for operation in graph.operations),
        uses=tuple(tuple(sorted(used - constant)) for used in graph.list_uses()),
        scratch_bytes=tuple(operation.scratch_bytes for operation in graph.operations),
        sizes=graph.sizes,
        kept=graph.kept - constant,
        base_bytes=sum(graph.sizes[storage] for storage in constant),
    )


def renumber(problem: Problem, order: Sequence[int]) -> Problem:
    """The same problem with the operations numbered as they stand in an order that is allowed."""
    numbers = {place: number for number, place in enumerate(order)}
    return dataclasses.replace(
        problem,
        predecessors=tuple(tuple(sorted(numbers[other] for other in problem.predecessors[place])) for place in order),
        makes=tuple(problem.makes[place] for place in order),
        uses=tuple(problem.uses[place] for place in order),
        scratch_bytes=tuple(problem.scratch_bytes[place] for place in order),
    )


def cut(problem: Problem) -> list[range]:
    """Ranges of operations that every order runs one after the other.

    A range ends in front of an operation that every other one comes before or after, and behind it. At its ends what
    has run is the same in every order, so that each range is a problem of its own, and the peak is their greatest.
    """
    n = len(problem)
    ends = {0, n}
    for place in range(n):
        num_before = problem.ancestors[place].bit_count()
        if num_before + problem.descendants[place].bit_count() == n - 1:
            assert num_before == place, "the given order has it elsewhere than every order"
            ends |= {place, place + 1}
    sorted_ends = sorted(ends)
    return [range(first, end) for first, end in zip(sorted_ends[:-1], sorted_ends[1:], strict=True)]


def restrict(problem: Problem, inside: range) -> Problem:
    """The problem of the operations of a range alone: what is alive from before to behind the range is in its base."""
    before = {s for s, users in enumerate(problem.users) if users and problem.makers.get(s, -1) < inside.start}
    entering = {s for s in before if s in problem.kept or problem.users[s][-1] >= inside.start}
    used = sorted({storage for place in inside for storage in problem.uses[place]})
    lasting = {s for s in used if s in problem.kept or problem.users[s][-1] >= inside.stop}
    throughout = entering & lasting
    numbers = {storage: number for number, storage in enumerate(used)}
    passing = (problem.sizes[s] for s in entering if s not in numbers or s in throughout)
    return Problem(
        predecessors=tuple(
            tuple(other - inside.start for other in problem.predecessors[place] if other >= inside.start)
            for place in inside
        ),
        makes=tuple(tuple(numbers[s] for s in problem.makes[place]) for place in inside),
        uses=tuple(tuple(numbers[s] for s in problem.uses[place] if s not in throughout) for place in inside),
        scratch_bytes=problem.scratch_bytes[inside.start : inside.stop],
        sizes=tuple(problem.sizes[s] for s in used),
        kept=frozenset(numbers[s] for s in lasting - throughout),
        base_bytes=problem.base_bytes + sum(passing),
    )

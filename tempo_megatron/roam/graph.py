"""Describes a training step as a graph: operations, and the storages that they make, read, write and free.

`StepGraph` has names, for captured steps. `Problem` is the same in numbers only, for the search of an order; `cut` and
`restrict` take it apart where every order passes.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from functools import cached_property


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One call. Storages and operations are given by their indices in the StepGraph."""

    name: str

    makes: tuple[int, ...] = ()
    """Storages that it allocates. They are alive from the start of the call."""

    reads: tuple[int, ...] = ()
    """Storages that it reads. A view reads its base's storage and makes none."""

    writes: tuple[int, ...] = ()
    """Storages of others that it changes in place. Their other users have to stay before or after it, as they were."""

    after: tuple[int, ...] = ()
    """Operations that it has to come after although they share no storage, as draws of random numbers."""

    scratch_bytes: int = 0
    """Bytes that it holds while it runs, beside these storages."""


@dataclasses.dataclass(frozen=True)
class StepGraph:
    """A step, with its operations in an order that is allowed.

    A storage is alive from the operation that makes it, or from the start if none does, until after the last operation
    that uses it; storages in `kept` stay until the end. A storage that is neither used nor kept has no bytes.
    """

    operations: tuple[Operation, ...]
    sizes: tuple[int, ...]
    """Bytes of each storage."""
    kept: frozenset[int] = frozenset()

    def find_predecessors(self) -> list[list[int]]:
        """Lists for each operation those that have to come before it; most that follow from others are left out."""
        found = []
        last_writer = dict[int, int]()
        readers = collections.defaultdict[int, list[int]](list)
        for place, operation in enumerate(self.operations):
            used = (*operation.reads, *operation.writes)
            before = {*operation.after, *(last_writer[storage] for storage in used if storage in last_writer)}
            for storage in operation.writes:
                before.update(readers[storage])
            for storage in (*operation.makes, *operation.writes):
                last_writer[storage], readers[storage] = place, []
            for storage in operation.reads:
                readers[storage].append(place)
            found.append(sorted(before - {place}))
        return found

    def list_uses(self) -> list[frozenset[int]]:
        """Lists the storages that each operation makes, reads or writes."""
        return [frozenset((*each.makes, *each.reads, *each.writes)) for each in self.operations]


def find_lifetimes(graph: StepGraph, order: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Finds the first and the last step of an order in which each storage that is used or kept is alive."""
    first, last = dict[int, int](), dict[int, int]()
    made = {storage for operation in graph.operations for storage in operation.makes}
    uses = graph.list_uses()
    for step, place in enumerate(order):
        for storage in uses[place]:
            first.setdefault(storage, step if storage in made else 0)
            last[storage] = step
    for storage in graph.kept:
        first.setdefault(storage, 0)
        last[storage] = len(order) - 1
    return {storage: (first[storage], last[storage]) for storage in sorted(first)}


def count_bytes(graph: StepGraph, order: Sequence[int]) -> list[int]:
    """Counts the bytes that are alive while each step of the order runs, its scratch included."""
    return make_problem(graph).count_steps(order)


def check_order(graph: StepGraph, order: Sequence[int]) -> None:
    """Asserts that the order has every operation once, behind all its predecessors."""
    steps = {place: step for step, place in enumerate(order)}
    assert len(order) == len(graph.operations) == len(steps), "an operation is missing, or is there twice"
    for place, before in enumerate(graph.find_predecessors()):
        for other in before:
            assert steps[other] < steps[place], f"{graph.operations[place].name} runs too early"


@dataclasses.dataclass(frozen=True)
class Problem:
    """Operations 0 to n - 1, for which this order is allowed, and the storages that they share.

    Which storages are alive depends on which operations have run, but not on their order. A set of operations that
    contains all predecessors of its members is called a state, and written as an integer: bit i is operation i.
    """

    predecessors: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    uses: tuple[tuple[int, ...], ...]
    """Storages that an operation makes, reads or writes."""
    scratch_bytes: tuple[int, ...]
    sizes: tuple[int, ...]
    """Bytes of each storage that comes or goes; those that are alive throughout are in `base_bytes`."""
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
        """The bytes that each operation adds while it runs."""
        return tuple(made + scratch for made, scratch in zip(self.made_bytes, self.scratch_bytes, strict=True))

    @cached_property
    def makers(self) -> dict[int, int]:
        return {storage: place for place, made in enumerate(self.makes) for storage in made}

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """The operations that use each storage, in ascending order."""
        found: list[list[int]] = [[] for _ in self.sizes]
        for place, used in enumerate(self.uses):
            for storage in used:
                found[storage].append(place)
        return tuple(map(tuple, found))

    @cached_property
    def start_bytes(self) -> int:
        """The bytes that are alive before any operation has run."""
        inputs = (s for s, users in enumerate(self.users) if users and s not in self.makers)
        return self.base_bytes + sum(self.sizes[storage] for storage in inputs)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """For each operation the smallest state in which it may run."""
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
        """Counts the bytes that are alive while each step runs."""
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
        """Returns the most bytes that are alive at once."""
        return max(self.count_steps(order), default=self.start_bytes)


def make_problem(graph: StepGraph) -> Problem:
    """Makes the problem of a whole graph."""
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
    """Renumbers a problem's operations by their place in an order that is allowed."""
    numbers = {place: number for number, place in enumerate(order)}
    return dataclasses.replace(
        problem,
        predecessors=tuple(tuple(sorted(numbers[other] for other in problem.predecessors[place])) for place in order),
        makes=tuple(problem.makes[place] for place in order),
        uses=tuple(problem.uses[place] for place in order),
        scratch_bytes=tuple(problem.scratch_bytes[place] for place in order),
    )


def cut(problem: Problem) -> list[range]:
    """Cuts the operations into ranges that every order runs one after the other.

    A cut lies before and behind each operation that is comparable with every other one: all others come either before
    or after it (ROAM's segmentation). At a cut the same operations have run in every order. So each range is a problem
    of its own, and the peak of the whole is the greatest of theirs.
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
    """Makes the problem of a range alone; storages that are alive before and behind it count as its base bytes."""
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

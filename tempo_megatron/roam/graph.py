"""Describes a training step as a graph: operations, and the storages that they make, read, write and free.

`cut` and `restrict` take a graph apart where every order passes.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
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

    Which storages are alive depends on which operations have run, but not on their order. A set of operations that
    contains all predecessors of its members is called a state, and written as an integer: bit i is operation i.
    """

    operations: tuple[Operation, ...]
    sizes: tuple[int, ...]
    """Bytes of each storage."""
    kept: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.operations)

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each operation those that have to come before it; most that follow from others are left out."""
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
            found.append(tuple(sorted(before - {place})))
        return tuple(found)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        return _invert(self.predecessors, len(self))

    @cached_property
    def makers(self) -> dict[int, int]:
        return {storage: place for place, operation in enumerate(self.operations) for storage in operation.makes}

    @cached_property
    def standing(self) -> frozenset[int]:
        """Storages that exist both before and after the step."""
        return self.kept.difference(self.makers)

    @cached_property
    def standing_bytes(self) -> int:
        return sum(self.sizes[storage] for storage in self.standing)

    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """The storages that each operation makes, reads or writes, but for standing ones."""
        used = ({*operation.makes, *operation.reads, *operation.writes} for operation in self.operations)
        return tuple(tuple(sorted(each - self.standing)) for each in used)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """The operations that use each storage, in ascending order; none of a standing one."""
        return _invert(self.uses, len(self.sizes))

    @cached_property
    def made_bytes(self) -> tuple[int, ...]:
        return tuple(sum(self.sizes[storage] for storage in operation.makes) for operation in self.operations)

    @cached_property
    def transient_bytes(self) -> tuple[int, ...]:
        """The bytes that each operation adds while it runs."""
        return tuple(made + each.scratch_bytes for made, each in zip(self.made_bytes, self.operations, strict=True))

    @cached_property
    def start_bytes(self) -> int:
        """The bytes that are alive before any operation has run."""
        inputs = (s for s, users in enumerate(self.users) if users and s not in self.makers)
        return self.standing_bytes + sum(self.sizes[storage] for storage in inputs)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """For each operation the smallest state in which it may run."""
        return _reach(self.predecessors, range(len(self)))

    @cached_property
    def descendants(self) -> tuple[int, ...]:
        return _reach(self.successors, reversed(range(len(self))))

    def count_bytes(self, order: Sequence[int]) -> list[int]:
        """Counts the bytes that are alive while each step of the order runs, its scratch included."""
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
        return max(self.count_bytes(order), default=self.start_bytes)


def _invert(lists: Sequence[Sequence[int]], length: int) -> tuple[tuple[int, ...], ...]:
    """For each number below `length` the places of the lists that have it."""
    found: list[list[int]] = [[] for _ in range(length)]
    for place, numbers in enumerate(lists):
        for number in numbers:
            found[number].append(place)
    return tuple(map(tuple, found))


def _reach(neighbours: Sequence[Sequence[int]], places: Iterable[int]) -> tuple[int, ...]:
    """For each operation the mask of those that its neighbours lead to; these come before it in `places`."""
    found = [0] * len(neighbours)
    for place in places:
        for other in neighbours[place]:
            found[place] |= found[other] | 1 << other
    return tuple(found)


def check_order(graph: StepGraph, order: Sequence[int]) -> None:
    """Asserts that the order has every operation once, behind all its predecessors."""
    steps = {place: step for step, place in enumerate(order)}
    assert len(order) == len(graph) == len(steps), "an operation is missing, or is there twice"
    for place, before in enumerate(graph.predecessors):
        for other in before:
            assert steps[other] < steps[place], f"{graph.operations[place].name} runs too early"


def renumber(graph: StepGraph, order: Sequence[int]) -> StepGraph:
    """Renumbers a graph's operations by their place in an order that is allowed."""
    numbers = {place: number for number, place in enumerate(order)}
    operations = (
        dataclasses.replace(graph.operations[place], after=tuple(numbers[each] for each in graph.predecessors[place]))
        for place in order
    )
    return dataclasses.replace(graph, operations=tuple(operations))


def cut(graph: StepGraph) -> list[range]:
    """Cuts the operations into ranges that every order runs one after the other.

    A cut lies before and behind each operation that is comparable with every other one: all others come either before
    or after it (ROAM's segmentation). At a cut the same operations have run in every order. So each range is a problem
    of its own, and the peak of the whole is the greatest of theirs.
    """
    n = len(graph)
    ends = {0, n}
    for place in range(n):
        num_before = graph.ancestors[place].bit_count()
        if num_before + graph.descendants[place].bit_count() == n - 1:
            assert num_before == place, "the given order has it elsewhere than every order"
            ends |= {place, place + 1}
    return [range(first, end) for first, end in itertools.pairwise(sorted(ends))]


def restrict(graph: StepGraph, inside: range) -> StepGraph:
    """Makes the graph of a range alone; its last storage stands for those that are alive throughout and not used."""
    used = sorted({storage for place in inside for storage in graph.uses[place]})
    numbers = {storage: number for number, storage in enumerate(used)}
    kept = {number for s, number in numbers.items() if s in graph.kept or graph.users[s][-1] >= inside.stop}
    before = (s for s, users in enumerate(graph.users) if users and graph.makers.get(s, -1) < inside.start)
    passing = {s for s in before if s in graph.kept or graph.users[s][-1] >= inside.start}.difference(used)

    operations = list[Operation]()
    for place in inside:
        whole = graph.operations[place]
        makes, reads, writes = (
            tuple(numbers[storage] for storage in storages if storage in numbers)
            for storages in (whole.makes, whole.reads, whole.writes)
        )
        after = tuple(each - inside.start for each in graph.predecessors[place] if each >= inside.start)
        operations.append(dataclasses.replace(whole, makes=makes, reads=reads, writes=writes, after=after))
    sizes = *(graph.sizes[s] for s in used), graph.standing_bytes + sum(graph.sizes[s] for s in passing)
    return StepGraph(tuple(operations), sizes, frozenset({*kept, len(used)}))

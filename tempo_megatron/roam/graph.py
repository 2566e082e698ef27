"""A training step as a graph: operations, and the storages that they make, read, write and free."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One call. Storages and operations are numbers: their places in the StepGraph."""

    name: str

    makes: tuple[int, ...] = ()
    """Storages that it allocates. They are alive while it runs."""

    reads: tuple[int, ...] = ()
    """Storages that it reads. A view reads the storage of what it is a view of, and makes none."""

    writes: tuple[int, ...] = ()
    """Storages of others that it changes in place. Whoever used one before still has to, and whoever did after, too."""

    after: tuple[int, ...] = ()
    """Operations that it has to come after, whatever they share: random numbers are drawn in their order."""

    scratch_bytes: int = 0
    """What it holds beside all of this while it runs."""


@dataclasses.dataclass(frozen=True)
class StepGraph:
    """A step in the order in which it was given, which is one of those that are allowed.

    A storage is alive from the operation that makes it, or from the start where none does, until after the last
    operation that uses it; those in `kept` until the end. A storage that nothing uses and nobody keeps has no bytes.

    Raises ValueError where the given order is none: an operation uses what a later one makes, or two make one storage.
    """

    operations: tuple[Operation, ...]
    sizes: tuple[int, ...]
    """Bytes of each storage."""
    kept: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        makers = dict[int, Operation]()
        is_made_later = {storage for operation in self.operations for storage in operation.makes}
        for place, operation in enumerate(self.operations):
            for storage in operation.makes:
                if storage in makers:
                    raise ValueError(
                        f"{operation.name} makes storage {storage}, which {makers[storage].name} has made; "
                        "let one operation make each storage"
                    )
                makers[storage] = operation
                is_made_later.discard(storage)
            for storage in (*operation.reads, *operation.writes):
                if storage in is_made_later:
                    raise ValueError(
                        f"{operation.name} uses storage {storage} before an operation makes it; "
                        "give the operations in an order that runs"
                    )
            if any(other >= place for other in operation.after):
                raise ValueError(
                    f"{operation.name} comes after an operation that is given behind it; "
                    "give the operations in an order that runs"
                )
        if min(self.sizes, default=0) < 0 or min((each.scratch_bytes for each in self.operations), default=0) < 0:
            raise ValueError("a storage or an operation has fewer than 0 bytes; give sizes of 0 or more")

    def find_predecessors(self) -> list[list[int]]:
        """For each operation those that have to come before it, without most of those that follow from others."""
        found = []
        last_writer = dict[int, int]()
        readers = dict[int, list[int]]()
        for place, operation in enumerate(self.operations):
            before = set(operation.after)
            for storage in operation.reads:
                if storage in last_writer:
                    before.add(last_writer[storage])
            for storage in operation.writes:
                before.update(readers.get(storage, ()))
                if storage in last_writer:
                    before.add(last_writer[storage])
            for storage in (*operation.makes, *operation.writes):
                last_writer[storage] = place
                readers[storage] = []
            for storage in operation.reads:
                readers.setdefault(storage, []).append(place)
            before.discard(place)
            found.append(sorted(before))
        return found

    def list_uses(self) -> list[frozenset[int]]:
        """The storages that each operation makes, reads or writes."""
        return [frozenset((*each.makes, *each.reads, *each.writes)) for each in self.operations]


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """Of a storage in an order: the first and the last step in which it is alive."""

    storage: int
    first: int
    last: int


def find_lifetimes(graph: StepGraph, order: Sequence[int]) -> list[Lifetime]:
    """When each storage that is used or kept is alive."""
    first, last = dict[int, int](), dict[int, int]()
    made = {storage for operation in graph.operations for storage in operation.makes}
    uses, end = graph.list_uses(), len(order) - 1
    for step, place in enumerate(order):
        for storage in uses[place]:
            first.setdefault(storage, step if storage in made else 0)
            last[storage] = step
    for storage in graph.kept:
        first.setdefault(storage, 0)
        last[storage] = end
    return [Lifetime(storage, first[storage], last[storage]) for storage in sorted(first)]


def count_bytes(graph: StepGraph, order: Sequence[int]) -> list[int]:
    """The bytes that are alive while each step of the order runs, its scratch included."""
    changes = [0] * (len(order) + 1)
    for each in find_lifetimes(graph, order):
        changes[each.first] += graph.sizes[each.storage]
        changes[each.last + 1] -= graph.sizes[each.storage]
    alive, found = 0, []
    for step, place in enumerate(order):
        alive += changes[step]
        found.append(alive + graph.operations[place].scratch_bytes)
    return found


def check_order(graph: StepGraph, order: Sequence[int]) -> None:
    """Assert that the order has every operation once, and each after all that it has to come after."""
    steps = {place: step for step, place in enumerate(order)}
    assert len(order) == len(graph.operations) == len(steps), "an operation is missing, or is there twice"
    for place, before in enumerate(graph.find_predecessors()):
        for other in before:
            assert steps[other] < steps[place], f"{graph.operations[place].name} runs too early"

"""Traces the allocations and frees of one micro batch, and gives them to the rules of the caching allocator."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from tempo_megatron.memory.estimate.allocator import Block, CachingAllocator
from tempo_megatron.memory.estimate.model_states import ModelStates
from tempo_megatron.memory.storages import PeakBytes

STEPS = 2


@dataclasses.dataclass(frozen=True)
class Allocations:
    """Of one rank: what stays, and what a micro batch does."""

    parameter_bytes: tuple[int, ...]
    """Of each parameter."""

    batch_bytes: tuple[int, ...]
    """Of each tensor of the micro batch."""

    global_buffer_bytes: int
    """Megatron's global memory buffer."""

    events: tuple[tuple[int, int], ...]
    """(number, bytes) where a storage is made, (number, -1) where it is freed."""


class TracedBytes(PeakBytes):
    """PeakBytes that notes when each storage is made and freed, as seen at the next operation."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__(*known)
        self.events: list[tuple[int, int]] = []
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note_freed()
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        for t in tensors:
            storage = t.untyped_storage()
            key = storage._cdata
            if t.is_meta or self._looks_away or key in self._known or key in self._made:
                continue
            self._made[key] = StorageWeakRef(storage), len(self.events)
            self.events.append((len(self.events), storage.nbytes()))
        self._note(tensors)
        return out

    def note_freed(self) -> None:
        """Note what nobody holds any more."""
        for key, (reference, number) in list(self._made.items()):
            if reference.expired():
                self.events.append((number, -1))
                del self._made[key]


def simulate_allocator(
    allocations: Allocations, states: ModelStates, *, has_flat_gradients: bool, num_micro_batches: int
) -> CachingAllocator:
    """The caching allocator after STEPS steps.

    Args:
        allocations: of the rank's chunk.
        states: gradients, optimizer states and buffers; weights are those of `allocations`.
        has_flat_gradients: whether gradients lie in one buffer, else each is allocated.
        num_micro_batches: of a step.
    """
    allocator = CachingAllocator()
    for num_bytes in _list_lasting(allocations, states, has_flat_gradients):
        allocator.allocate(num_bytes)
    for _ in range(STEPS):
        for _ in range(min(num_micro_batches, STEPS)):
            _play(allocator, allocations)
        at_step = [allocator.allocate(max(0, states.gradients - states.standing_gradients))]
        at_step.append(allocator.allocate(states.step_transient))
        for block in at_step:
            allocator.free(block)
    return allocator


def _list_lasting(allocations: Allocations, states: ModelStates, has_flat_gradients: bool) -> Iterator[int]:
    yield from allocations.parameter_bytes
    total = sum(allocations.parameter_bytes)
    if has_flat_gradients:
        yield states.standing_gradients
    else:
        yield from (states.standing_gradients * size // total for size in allocations.parameter_bytes)
    # Two moments and the weights' copy.
    yield from [states.optimizer_states // 3] * 3
    yield states.communication_buffers
    yield allocations.global_buffer_bytes
    yield states.bucket
    yield states.reduced_gradients


def _play(allocator: CachingAllocator, allocations: Allocations) -> None:
    blocks: dict[int, Block | None] = {}
    batch = [allocator.allocate(size) for size in allocations.batch_bytes]
    for number, size in allocations.events:
        if size < 0:
            allocator.free(blocks.pop(number))
        else:
            blocks[number] = allocator.allocate(size)
    # What the next micro batch begins without: the loss, and gradients that the step frees.
    for block in [*blocks.values(), *batch]:
        allocator.free(block)

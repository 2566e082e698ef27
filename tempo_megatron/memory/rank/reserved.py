"""Says what torch's caching allocator takes from a device for a rank: all that stays, and two steps in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from tempo_megatron.memory.rank.allocator import CachingAllocator, ExpandableAllocator
from tempo_megatron.memory.rank.model_states import ModelStates
from tempo_megatron.memory.rank.play import Step
from tempo_megatron.memory.simulated.chunk_memory import ChunkMemory

_STEPS = 2
"""The first leaves the free blocks that the second finds."""


def make_allocator(*, is_expandable: bool) -> CachingAllocator:
    """One that places every block."""
    return ExpandableAllocator() if is_expandable else CachingAllocator()


def play_steps(
    allocator: CachingAllocator, step: Step, states: ModelStates, place: Callable[[], object]
) -> tuple[int, int]:
    """(Bytes that it counts as allocated at most in a step, bytes that it has reserved then), of all streams.

    Args:
        allocator: of `make_allocator`.
        step: of the rank, on it.
        states: of the rank.
        place: allocates what stays, and may play steps in between.
    """
    place()
    allocator.peak_allocated = allocator.allocated
    for _ in range(_STEPS):
        for block in step.gradients:
            allocator.free(block)
        step.play()
        sizes = [each.size for each in step.gradients if each is not None]
        step.gradients = [allocator.allocate(size) for size in sizes]
        allocator.free(allocator.allocate(max(0, states.reduction - states.standing_gradients)))
        at_step = [allocator.allocate(max(0, states.gradients - states.standing_gradients - sum(sizes)))]
        at_step.append(allocator.allocate(states.step_transient))
        for block in at_step:
            allocator.free(block)
    others = allocator.streams
    return (
        allocator.peak_allocated + sum(each.allocated for each in others),
        allocator.reserved + sum(each.reserved for each in others),
    )


def list_lasting(chunks: Sequence[ChunkMemory], dtype: torch.dtype, states: ModelStates) -> Iterator[int]:
    """Bytes of each tensor that stays from step to step where the optimizer is not Megatron's.

    Args:
        chunks: of the rank.
        dtype: of the weights.
        states: of the rank.
    """
    parameters = [each.size * dtype.itemsize for chunk in chunks for each in chunk.parameters]
    total = sum(parameters)
    # ZeRO 3 has its part of each.
    yield from (states.weights * size // total for size in parameters)
    yield from (states.standing_gradients * size // total for size in parameters)
    # Two moments and the weights' copy.
    yield from [states.optimizer_states // 3] * 3
    yield states.communication_buffers
    yield max(chunk.global_buffer_bytes for chunk in chunks)

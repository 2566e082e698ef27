"""Counts what torch's caching allocator adds to the tensors of a rank of Megatron-LM, between two steps and in a step.

A block of more than 1 MiB is not split where less than 1 MiB would be left, and counts as allocated whole. Weights, the
float32 copies of 16-bit ones and Adam's moments are a tensor for each parameter, or of the distributed optimizer for
each part of one that is this rank's; gradients are one buffer for each chunk, and with the distributed optimizer
weights too (core/distributed/param_and_grad_buffer.py, core/optimizer/distrib_optimizer.py:391-399 and optimizer.py:674
of megatron-core 0.16.1). Experts have buffers of their own, and an optimizer of their own behind that of all else
(core/optimizer/__init__.py:604-689). Adam makes its moments in the first optimizer's step, in what the first forwards
and backwards have freed, so these are played before it in the order of the real modules; float32 copies of gradients
are made anew in each step, so they are placed behind a second one. A later step's tensors are allocated behind all
this: where attention's queries, keys and values of 3 MiB, say, take a block of 4, each layer adds 1 MiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from tempo_megatron.memory.estimate.allocator import Allocations, Block, CachingAllocator
from tempo_megatron.memory.estimate.model_states import find_gradient_bytes
from tempo_megatron.memory.run import OptimizerSettings
from tempo_megatron.memory.simulated.phases import Parameter

_FLOAT32 = 4
_MOMENTS = 2
_FREED = -1


def count_rounding(
    chunks: Sequence[Sequence[Parameter]],
    dtype: torch.dtype,
    others: Iterable[int],
    optimizer: OptimizerSettings,
    *,
    parts: tuple[int, int],
    pieces: Sequence[tuple[int, int]] | None = None,
    traces: Sequence[Allocations] = (),
    events: Iterable[tuple[bool, int, int]] = (),
) -> tuple[CachingAllocator, int]:
    """The allocator with the tensors that stay from step to step, and the bytes that it counts beyond theirs.

    Args:
        chunks: the parameters of each chunk of the rank, in the order of the modules.
        dtype: of the parameters.
        others: bytes of each other tensor that stays: workspaces, inputs.
        optimizer: Megatron's.
        parts: ranks that divide the states of what is no expert, and those of experts.
        pieces: elements and moments of each piece of a parameter whose states the rank has; None are Adam's.
        traces: as of `count_rounding_of_step`.
        events: of the first step; without them the moments find no free blocks.
    """
    allocator, total = CachingAllocator(), 0
    is_distributed = optimizer.distributed or optimizer.muon == "laid out"
    bytes_of_gradient = find_gradient_bytes(optimizer, dtype)
    # Each chunk has a buffer of what is no expert, and one of experts.
    buffers = [[[each.size for each in chunk if each.is_expert == of] for of in (False, True)] for chunk in chunks]
    for chunk, in_buffers in zip(chunks, buffers, strict=True):
        weights = [allocator.allocate(each.size * dtype.itemsize) for each in chunk]
        for sizes_of_buffer in in_buffers:
            total += sum(sizes_of_buffer) * (dtype.itemsize + bytes_of_gradient)
            if is_distributed:
                allocator.allocate(sum(sizes_of_buffer) * dtype.itemsize)
            allocator.allocate(sum(sizes_of_buffer) * bytes_of_gradient)
        if is_distributed:
            for weight in weights:
                allocator.free(weight)
    if pieces is None:
        # Experts have an optimizer of their own.
        pieces = [
            (size, _MOMENTS)
            for place, number in enumerate(parts)
            for in_buffers in buffers
            for size in _list_own(in_buffers[place], number)
        ]
    of_copy, *of_moments = optimizer.state_bytes or (_FLOAT32 if dtype.itemsize < _FLOAT32 else 0, _FLOAT32, _FLOAT32)
    events = list(events)
    before = [*(size * of_copy for size, _ in pieces if of_copy), *others]
    converted = []
    if bytes_of_gradient < _FLOAT32 and optimizer.state_bytes is None:
        converted = [size * _FLOAT32 for size, _ in pieces]
    moments = [size * each for size, number in pieces for each in of_moments[:number]]
    for size in before:
        allocator.allocate(size)
    _play(allocator, traces, events)
    blocks = [allocator.allocate(size) for size in converted]
    for size in moments:
        allocator.allocate(size)
    if blocks:
        for block in blocks:
            allocator.free(block)
        _play(allocator, traces, events)
        for size in converted:
            allocator.allocate(size)
    return allocator, allocator.allocated - total - sum(before) - sum(converted) - sum(moments)


def count_rounding_of_step(
    allocator: CachingAllocator, traces: Sequence[Allocations], events: Iterable[tuple[bool, int, int]]
) -> int:
    """Bytes that the allocator counts at a step's peak beyond those of the step's tensors.

    Args:
        allocator: with what stays.
        traces: of each chunk of the rank.
        events: (whether it is a forward, micro batch, chunk) in their order.
    """
    at_rest = allocator.peak_allocated = allocator.allocated
    highest = _play(allocator, traces, events)
    return allocator.peak_allocated - at_rest - highest


def _play(allocator: CachingAllocator, traces: Sequence[Allocations], events: Iterable[tuple[bool, int, int]]) -> int:
    """The highest sum of the step's tensors. What is in flight behind the last event is freed."""
    exact = highest = 0
    in_flight: dict[tuple[int, int], dict[int, tuple[Block | None, int]]] = {}
    for is_forward, micro_batch, chunk in events:
        trace = traces[chunk]
        alive = in_flight.setdefault((micro_batch, chunk), {})
        if is_forward:
            made = [(-place, size) for place, size in enumerate(trace.batch_bytes, start=1)]
            made += trace.events[: trace.num_forward_events]
        else:
            made = [*trace.events[trace.num_forward_events :]]
        for number, size in made:
            if size == _FREED:
                block, of_block = alive.pop(number)
                allocator.free(block)
                exact -= of_block
            else:
                alive[number] = (allocator.allocate(size), size)
                exact += size
                highest = max(highest, exact)
        if not is_forward:
            # The loss and the micro batch.
            for block, size in in_flight.pop((micro_batch, chunk)).values():
                allocator.free(block)
                exact -= size
    for alive in in_flight.values():
        for block, _ in alive.values():
            allocator.free(block)
    return highest


def _list_own(parameters: Sequence[int], parts: int) -> Iterator[int]:
    """Elements of the pieces of parameters in the last of equal parts of a buffer, which has them in reverse; of one
    part the parameters themselves."""
    if parts == 1:
        yield from parameters
        return
    begin, end = sum(parameters) - sum(parameters) // parts, 0
    for size in reversed(parameters):
        first, end = max(end, begin), end + size
        if first < end:
            yield end - first

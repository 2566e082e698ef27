"""Counts what torch's caching allocator adds to the tensors that a rank of Megatron-LM has for the life of a process.

A block of more than 1 MiB is not split where less than 1 MiB would be left, and counts as allocated whole. Weights, the
float32 copies of 16-bit ones and Adam's moments are a tensor for each parameter, or of the distributed optimizer for
each part of one that is this rank's; gradients are one buffer for each chunk, and with the distributed optimizer
weights too (core/distributed/param_and_grad_buffer.py, core/optimizer/distrib_optimizer.py:391-399 and optimizer.py:674
of megatron-core 0.16.1). Experts have buffers of their own, and an optimizer of their own behind that of all else
(core/optimizer/__init__.py:604-689). Which free blocks the moments find depends on all that the first step did. Here it
left none, as if they were allocated before it: on published runs this is within 10 MiB of what is measured, and mostly
within 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from tempo_megatron.memory.estimate.allocator import CachingAllocator
from tempo_megatron.memory.estimate.model_states import find_gradient_bytes
from tempo_megatron.memory.run import OptimizerSettings
from tempo_megatron.memory.simulated.phases import Parameter

_FLOAT32 = 4
_MOMENTS = 2


def count_rounding(
    chunks: Sequence[Sequence[Parameter]],
    dtype: torch.dtype,
    others: Iterable[int],
    optimizer: OptimizerSettings,
    *,
    parts: tuple[int, int],
    pieces: Sequence[tuple[int, int]] | None = None,
) -> int:
    """Bytes that the allocator counts beyond those of the tensors.

    Args:
        chunks: the parameters of each chunk of the rank, in the order of the modules.
        dtype: of the parameters.
        others: bytes of each other tensor that stays: workspaces, inputs.
        optimizer: Megatron's.
        parts: ranks that divide the states of what is no expert, and those of experts.
        pieces: elements and moments of each piece of a parameter whose states the rank has; None are Adam's.
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
    sizes = [*(size * of_copy for size, _ in pieces if of_copy), *others]
    sizes += [size * each for size, moments in pieces for each in of_moments[:moments]]
    if bytes_of_gradient < _FLOAT32 and optimizer.state_bytes is None:
        sizes += [size * _FLOAT32 for size, _ in pieces]
    for size in sizes:
        allocator.allocate(size)
    return allocator.allocated - total - sum(sizes)


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

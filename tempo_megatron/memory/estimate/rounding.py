"""Counts what torch's caching allocator adds to the tensors that a rank of Megatron-LM has for the life of a process.

A block of more than 1 MiB is not split where less than 1 MiB would be left, and counts as allocated whole. Weights, the
float32 copies of 16-bit ones and Adam's moments are a tensor for each parameter, or of the distributed optimizer for
each part of one that is this rank's; gradients are one buffer for each chunk, and with the distributed optimizer
weights too (core/distributed/param_and_grad_buffer.py, core/optimizer/distrib_optimizer.py:391-399 and optimizer.py:674
of megatron-core 0.16.1). Which free blocks the moments find depends on all that the first step did. Here it left none,
as if they were allocated before it: on published runs this is within 4 MiB of what is measured, and mostly within 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from tempo_megatron.memory.estimate.allocator import CachingAllocator
from tempo_megatron.memory.estimate.model_states import find_gradient_bytes
from tempo_megatron.memory.run import OptimizerSettings

_FLOAT32 = 4
_MOMENTS = 2


def count_rounding(
    chunks: Sequence[Sequence[int]],
    dtype: torch.dtype,
    others: Iterable[int],
    optimizer: OptimizerSettings,
    *,
    parts: int,
    pieces: Sequence[tuple[int, int]] | None = None,
) -> int:
    """Bytes that the allocator counts beyond those of the tensors.

    Args:
        chunks: elements of each parameter, in the order of the modules, of each chunk of the rank.
        dtype: of the parameters.
        others: bytes of each other tensor that stays: workspaces, inputs.
        optimizer: Megatron's.
        parts: ranks that divide its states.
        pieces: elements and moments of each piece of a parameter whose states the rank has; None are Adam's.
    """
    allocator, total = CachingAllocator(), 0
    is_distributed = optimizer.distributed or optimizer.muon == "laid out"
    bytes_of_gradient = find_gradient_bytes(optimizer, dtype)
    for parameters in chunks:
        weights = [allocator.allocate(size * dtype.itemsize) for size in parameters]
        buffers = [sum(parameters) * bytes_of_gradient]
        total += sum(parameters) * (dtype.itemsize + bytes_of_gradient)
        if is_distributed:
            buffers.insert(0, sum(parameters) * dtype.itemsize)
        for size in buffers:
            allocator.allocate(size)
        if is_distributed:
            for weight in weights:
                allocator.free(weight)
    if pieces is None:
        pieces = [(size, _MOMENTS) for parameters in chunks for size in _list_own(parameters, parts)]
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

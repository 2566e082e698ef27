"""Counts what torch's caching allocator adds to the tensors of a rank of Megatron-LM, between two steps and in a step.

A block of more than 1 MiB is not split where less than 1 MiB would be left, and counts as allocated whole, but for
expandable segments, whose blocks are all split. Weights, the float32 copies of 16-bit ones and Adam's moments are a
tensor for each parameter, or of the distributed optimizer for each part of one that is this rank's; gradients are one
buffer for each chunk, and with the distributed optimizer weights too (core/distributed/param_and_grad_buffer.py,
core/optimizer/distrib_optimizer.py:391-399 and optimizer.py:674 of megatron-core 0.16.1, both of which clone what they
convert). Experts have buffers of their own, and an optimizer of their own behind that of all else
(core/optimizer/__init__.py:604-689). Buffers are made on a stream of their own, whose free blocks no other tensor takes
(training/training.py:2523 of Megatron-LM at d98e8a64dd; since e7c55de99e of August 2025).

Everything else is made in the first step, in the order of the real modules: a workspace of cuBLAS where its library
first multiplies, a stage's inputs as they are received, and Adam's moments behind the first optimizer's forwards and
backwards, in what these have freed. float32 copies of gradients are made anew in each step, so they are placed behind a
second one. A later step's tensors are allocated behind all this: where attention's queries, keys and values of 3 MiB,
say, take a block of 4, each layer adds 1 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from tempo_megatron.memory.rank.allocator import CachingAllocator, round_up
from tempo_megatron.memory.rank.model_states import find_gradient_bytes
from tempo_megatron.memory.rank.play import Step
from tempo_megatron.memory.run import OptimizerSettings
from tempo_megatron.memory.simulated.chunk_memory import Parameter

_FLOAT32 = 4
_MOMENTS = 2
_ALIGNMENT, _BUCKET_ALIGNMENT = 64, 128
"""Elements to which the distributed optimizer rounds up a parameter's begin and a bucket's end
(core/optimizer/param_layout.py)."""


def count_rounding(
    allocator: CachingAllocator,
    chunks: Sequence[Sequence[Parameter]],
    dtype: torch.dtype,
    others: Iterable[int],
    optimizer: OptimizerSettings,
    *,
    parts: tuple[int, int],
    pieces: Sequence[tuple[int, int]] | None = None,
    shares_embedding: bool = False,
    bucket_elements: int | None = None,
    step: Step | None = None,
) -> int:
    """Bytes that the allocator counts beyond those of the tensors that stay from step to step.

    Args:
        allocator: an empty one, which has them then but for buffers, which that of another stream has.
        chunks: the parameters of each chunk of the rank, in the order of the modules.
        dtype: of the parameters.
        others: bytes of each other tensor that stays and that the step does not make.
        optimizer: Megatron's.
        parts: ranks that divide the states of what is no expert, and those of experts.
        pieces: elements and moments of each piece of a parameter whose states the rank has; None are Adam's.
        shares_embedding: whether a stage has the word embedding of another one, and its optimizer is distributed.
        bucket_elements: after which a bucket of the first chunk ends; None has one.
        step: the first, on the same allocator, before the moments are made; without it they find no free blocks.
    """
    total = 0
    of_buffers = allocator.add_stream()
    is_distributed = optimizer.distributed or optimizer.muon == "laid out"
    bytes_of_gradient = find_gradient_bytes(optimizer, dtype)
    # Each chunk has a buffer of what is no expert, and one of experts.
    buffers = [[[each for each in chunk if each.is_expert == of] for of in (False, True)] for chunk in chunks]
    weights_of_chunks = [[allocator.allocate(each.size * dtype.itemsize) for each in chunk] for chunk in chunks]
    for weights, in_buffers in zip(weights_of_chunks, buffers, strict=True):
        for in_buffer in in_buffers:
            size_of_buffer = sum(each.size for each in in_buffer)
            total += size_of_buffer * (dtype.itemsize + bytes_of_gradient)
            if is_distributed:
                of_buffers.allocate(size_of_buffer * dtype.itemsize)
            of_buffers.allocate(size_of_buffer * bytes_of_gradient)
        if is_distributed:
            for weight in weights:
                allocator.free(weight)
    if pieces is None:
        # Experts have an optimizer of their own.
        pieces = [
            (size, _MOMENTS)
            for place, number in enumerate(parts)
            for chunk, in_buffers in enumerate(buffers)
            for size in list_own_pieces(
                in_buffers[place], number, optimizer, shares_embedding, None if chunk else bucket_elements
            )
        ]
    of_copy, *of_moments = optimizer.state_bytes or (_FLOAT32 if dtype.itemsize < _FLOAT32 else 0, _FLOAT32, _FLOAT32)
    copies = [size * of_copy for size, _ in pieces if of_copy]
    converted = []
    if bytes_of_gradient < _FLOAT32 and optimizer.state_bytes is None:
        converted = [size * _FLOAT32 for size, _ in pieces]
    moments = [size * each for size, number in pieces for each in of_moments[:number]]
    for (size, _), of_one in zip(pieces, copies, strict=False):
        # Cloned before it is converted.
        clone = allocator.allocate(size * dtype.itemsize)
        allocator.allocate(of_one)
        allocator.free(clone)
    others = [*others]
    for size in others:
        allocator.allocate(size)
    if step is not None:
        step.play()
    blocks = [allocator.allocate(size) for size in converted]
    for size in moments:
        allocator.allocate(size)
    if blocks:
        for block in blocks:
            allocator.free(block)
        if step is not None:
            step.play()
        blocks = [allocator.allocate(size) for size in converted]
        if step is not None:
            step.gradients = blocks
    left = 0 if step is None else step.count_left()
    allocated = allocator.allocated + of_buffers.allocated
    return allocated - total - sum(copies) - sum(others) - sum(converted) - sum(moments) - left


def list_own_pieces(
    parameters: Sequence[Parameter],
    parts: int,
    optimizer: OptimizerSettings,
    shares_embedding: bool,
    bucket_elements: int | None = None,
) -> Iterator[int]:
    """Elements of each piece of a buffer's parameters whose states a rank has: of the distributed optimizer the last of
    equal parts of each bucket, else all.
    """
    if not optimizer.distributed:
        yield from (each.size for each in parameters)
        return
    for bucket in _list_buckets(parameters, shares_embedding, bucket_elements):
        size = round_up(bucket[-1][1], math.lcm(parts, _BUCKET_ALIGNMENT))
        own = size - size // parts
        yield from (last - max(first, own) for first, last in bucket if last > own)


def _list_buckets(
    parameters: Sequence[Parameter], shares_embedding: bool, bucket_elements: int | None
) -> Iterator[list[tuple[int, int]]]:
    """Where each parameter of a bucket begins and ends in it.

    A buffer has its parameters in reverse order, and a word embedding that another stage has too in a bucket of its own
    (core/optimizer/distrib_optimizer.py: _compute_per_buffer_param_layout).
    """
    bucket: list[tuple[int, int]] = []
    for each in reversed(parameters):
        is_alone = shares_embedding and len(each.shape) == 2 and not each.is_matrix and not each.is_expert
        if is_alone and bucket:
            yield bucket
            bucket = []
        first = round_up(bucket[-1][1] if bucket else 0, _ALIGNMENT)
        bucket.append((first, first + each.size))
        if is_alone or (bucket_elements is not None and bucket[-1][1] >= bucket_elements):
            yield bucket
            bucket = []
    if bucket:
        yield bucket

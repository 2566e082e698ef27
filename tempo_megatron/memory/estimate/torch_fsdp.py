"""Counts what a rank holds from step to step where torch's FSDP shards weights, gradients and optimizer states.

A rank has its part of each parameter, whose rows are padded so that the ranks divide them, and Megatron's optimizer,
which is not its distributed one, has a float32 copy of each part of 16 bits, Adam's moments, and the part's gradient.
Gradients of 16 bits are converted to float32 by the step, and the copies go in the next one's `zero_grad`. A unit's
parts of gradients are one buffer, which is free when all of them are converted: matrices are before vectors, which have
a parameter group of their own (core/optimizer/optimizer.py:759-782, core/optimizer/__init__.py:364-376 of Megatron-LM
at d98e8a64dd), so that all buffers but the word embedding's, which has no vectors, wait for these.

Memory's other part, what is gathered and reduced in a micro batch, is in `memory.simulated.torch_fsdp`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from tempo_megatron.memory.estimate.allocator import CachingAllocator
from tempo_megatron.memory.estimate.model_states import ModelStates
from tempo_megatron.memory.simulated.phases import Parameter
from tempo_megatron.memory.simulated.torch_fsdp import count_padded

_FLOAT32 = 4
_MOMENTS = 2


def count_sharded_states(
    parameters: Sequence[Parameter], dtype: torch.dtype, ranks: int, *, accumulates: bool
) -> ModelStates:
    """The states of a rank.

    Args:
        parameters: of the model, in the order of the modules.
        dtype: of the parameters.
        ranks: that share each of them.
        accumulates: whether a step has more than one micro batch.
    """
    sizes = _list_sizes(parameters, ranks)
    own, is_16_bit = sum(sizes), dtype.itemsize < _FLOAT32
    converted = _FLOAT32 * own
    step = 0
    if is_16_bit:
        words = next(iter(sizes), 0)
        vectors = sum(size for size, each in zip(sizes, parameters, strict=True) if len(each.shape) == 1)
        # When the last matrix is converted.
        step = max(0, dtype.itemsize * (own - words) - _FLOAT32 * vectors)
    return ModelStates(
        weights=dtype.itemsize * own,
        optimizer_states=_FLOAT32 * (_MOMENTS + is_16_bit) * own,
        standing_gradients=dtype.itemsize * own if accumulates else 0,
        gradients=converted,
        gradients_at_rest=converted,
        step_transient=step,
    )


def count_initial_bytes(parameters: Sequence[Parameter], dtype: torch.dtype, ranks: int) -> int:
    """Of all weights and the first unit's part of them, the embedding's, when that one is sharded; what is sharded is
    freed unit by unit (torch/distributed/fsdp/_fully_shard/_fsdp_param.py of 2.13: _init_sharded_param)."""
    whole = sum(each.size for each in parameters)
    return dtype.itemsize * (whole + next(iter(_list_sizes(parameters, ranks)), 0))


def count_sharded_rounding(
    allocator: CachingAllocator, parameters: Sequence[Parameter], dtype: torch.dtype, ranks: int, others: Sequence[int]
) -> int:
    """Bytes that the allocator counts beyond those of the tensors between two steps; see `estimate.rounding`.

    Args:
        allocator: an empty one.
        parameters, dtype, ranks: as of `count_sharded_states`.
        others: bytes of each other tensor that stays.
    """
    sizes = _list_sizes(parameters, ranks)
    widths = [[dtype.itemsize], [_FLOAT32] if dtype.itemsize < _FLOAT32 else [], [_FLOAT32], [_FLOAT32] * _MOMENTS]
    tensors = [size * width for each in widths for size, width in itertools.product(sizes, each)] + [*others]
    for size in tensors:
        allocator.allocate(size)
    return allocator.allocated - sum(tensors)


def _list_sizes(parameters: Sequence[Parameter], ranks: int) -> list[int]:
    return [count_padded(each.shape, ranks) // ranks for each in parameters]

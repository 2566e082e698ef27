"""The chunked loss head as operators: what torch.compile, fake tensors and autocast do not look into.

The numbers of a Settings travel one by one, and a group by its name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from tempo_kernels.backend import choose_backend
from tempo_kernels.linear_cross_entropy import chunks, cpu
from tempo_kernels.linear_cross_entropy.chunks import Head, Settings
from tempo_kernels.linear_cross_entropy.shards import Shards
from tempo_kernels.opaque import opaque

_HEAD = "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels"
_NEEDS = "bool needs_hidden, bool needs_weight, bool needs_bias"
_SETTINGS = (
    "str group, bool sequence_parallel, SymInt vocab_size, SymInt vocab_start, SymInt ignore_index, "
    "float label_smoothing, float z_loss, SymInt chunk_rows"
)


def settings_operands(settings: Settings) -> tuple[Any, ...]:
    """What an operator takes in their place, by the schema _SETTINGS."""
    shards = settings.shards
    return (
        "" if shards.group is None else shards.group.group_name,
        shards.sequence_parallel,
        settings.vocab_size,
        settings.vocab_start,
        settings.ignore_index,
        settings.label_smoothing,
        settings.z_loss,
        settings.chunk_rows,
    )


def _settings_of(group: Any, sequence_parallel: bool, *numbers: Any) -> Settings:
    """The settings that `settings_operands` gave."""
    found = distributed_c10d._resolve_process_group(group) if group else None
    return Settings(Shards(found, sequence_parallel), *numbers)


def _head(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, settings: Settings) -> Head:
    rows = hidden.reshape(hidden.size(0) * hidden.size(1), hidden.size(2))
    return Head(rows, weight, bias, order_rows(labels, settings))


def order_rows(t: Tensor, settings: Settings) -> Tensor:
    """[t, s/t * b] of t [b, s]: the order of hidden's rows."""
    segments = settings.shards.num_segments
    return t.t().reshape(segments, t.numel() // segments)


def _loss_shapes(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *operands: Any) -> list[Tensor]:
    segments = _settings_of(*operands).shards.num_segments
    shape, dtype = (segments, labels.numel() // segments), torch.promote_types(hidden.dtype, torch.float32)
    return [hidden.new_empty(shape, dtype=dtype), hidden.new_empty((2, *shape), dtype=dtype)]


@opaque(f"linear_cross_entropy({_HEAD}, {_SETTINGS}) -> Tensor[]", _loss_shapes)
def find_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *operands: Any
) -> tuple[Tensor, Tensor]:
    """losses [t, m], and what backward needs of each token [2, t, m]."""
    settings = _settings_of(*operands)
    return chunks.forward(_head(hidden, weight, bias, labels, settings), settings, choose_backend(hidden, cpu))


def _gradient_shapes(
    grad: Tensor, kept: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *others: Any
) -> list[Tensor]:
    rows = hidden.size(0) * hidden.size(1), hidden.size(2)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    needed = [
        hidden.new_empty(rows),
        weight.new_empty(weight.shape, dtype=dtype),
        weight.new_empty(weight.shape[:1], dtype=dtype),
    ]
    return [t for t, is_needed in zip(needed, others[:3], strict=True) if is_needed]


@opaque(
    f"linear_cross_entropy_backward(Tensor grad, Tensor kept, {_HEAD}, {_NEEDS}, {_SETTINGS}) -> Tensor[]",
    _gradient_shapes,
)
def find_gradients(
    grad: Tensor,
    kept: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
    *operands: Any,
    total: Tensor | None = None,
) -> list[Tensor]:
    """Those needed of the gradients of hidden [m, h], and of weight and bias in float32, from grad [t, m].

    The weight's is added to `total`, where given, which is no operand: only `find_gradients.call` takes it.
    """
    settings, needs = _settings_of(*operands), (needs_hidden, needs_weight, needs_bias)
    head = _head(hidden, weight, bias, labels, settings)
    found = chunks.backward(grad, kept, head, needs, total, settings, choose_backend(hidden, cpu))
    return [t for t in (found.hidden, found.weight, found.bias) if t is not None]


def _weighted_shapes(token_weights: Tensor, *others: Any) -> list[Tensor]:
    return [torch.empty_like(token_weights), *_gradient_shapes(token_weights, token_weights, *others)]


@opaque(
    f"weighted_linear_cross_entropy(Tensor token_weights, {_HEAD}, {_NEEDS}, {_SETTINGS}) -> Tensor[]",
    _weighted_shapes,
)
def find_losses_and_gradients(
    token_weights: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
    *operands: Any,
) -> list[Tensor]:
    """losses [t, m], and the gradients of sum(token_weights * losses) as in `find_gradients`."""
    settings, needs = _settings_of(*operands), (needs_hidden, needs_weight, needs_bias)
    head = _head(hidden, weight, bias, labels, settings)
    losses, found = chunks.forward_with_gradients(token_weights, head, needs, settings, choose_backend(hidden, cpu))
    return [losses, *(t for t in (found.hidden, found.weight, found.bias) if t is not None)]

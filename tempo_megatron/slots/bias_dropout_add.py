"""Bias-dropout-add in Megatron's bda slots: masks by position, nothing kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state
from torch import Tensor

from tempo_kernels.dropout_add import bias_dropout_add
from tempo_megatron.slots.dropout_rng import Site, Stack, find_key_and_sample
from tempo_megatron.slots.megatron_versions import DIFFERENCES

XWithBias = tuple[Tensor, Tensor | None]

_RESIDUAL_DECIDES = DIFFERENCES["residual decides"].is_there


def tempo_bias_dropout_add(config: Any, layer_number: int, site: Site, stack: Stack) -> Callable[..., Any]:
    """The function that stands in a bda slot of global layer `layer_number` (1-based), with Megatron's signature.

    `f(training, fused)((x, bias), residual, prob) -> out` with x, residual [s, b, h] and bias [h] or None. It is a
    plain function, as the slot expects, and writes to none of its inputs.
    """

    def get_tempo_bias_dropout_add(training: bool, fused: bool) -> Callable[[XWithBias, Tensor, float], Tensor]:
        def add(x_with_bias: XWithBias, residual: Tensor, prob: float) -> Tensor:
            x, bias = x_with_bias
            if residual.dtype != x.dtype:
                x, residual = (x.to(residual.dtype), residual) if _RESIDUAL_DECIDES else (x, residual.to(x.dtype))
            return apply_dropout(x, bias, residual, prob if training else 0.0, config, layer_number, site, stack)

        return add

    return get_tempo_bias_dropout_add


def apply_dropout(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    prob: float,
    config: Any,
    layer_number: int,
    site: Site,
    stack: Stack,
) -> Tensor:
    """residual + dropout(x + bias) of hidden states [s or s/t, b, h]; nothing is drawn where prob is 0."""
    if prob == 0.0:
        x = x if bias is None else x + bias
        return x if residual is None else residual + x
    key, first_sample = find_key_and_sample(layer_number, site, stack)
    # Under sequence parallelism this rank holds the rows that start here.
    rank = parallel_state.get_tensor_model_parallel_rank() if config.sequence_parallel else 0
    first_row = rank * x.size(0)
    return bias_dropout_add(x, bias, residual, p=prob, key=key, first_sample=first_sample, first_row=first_row)

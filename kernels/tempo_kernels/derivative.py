"""Makes a backward raise an error when it is differentiated itself.

torch's `once_differentiable` checks the incoming gradients only. Where they are constants, as in a gradient penalty, it
returns the first derivative as a constant, whose gradient is then silently 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tempo_kernels.transforms import refuse_batched

Backward = Callable[..., Any]


def first_derivative_only(
    operation: str | Callable[[Any], str], switch: str | None = None
) -> Callable[[Backward], Backward]:
    """Decorates the backward of an autograd.Function whose derivative must not be differentiated again.

    Args:
        operation: the name in the error, or a function that returns it for a ctx.
        switch: the name in TempoConfig of the switch that leaves the operation to stock Megatron, if there is one.

    The derivative stays connected to the incoming gradients and to the tensors that `save_for_backward` got. These must
    include an input or the output, or a second derivative goes unnoticed. It costs nothing under create_graph=False.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def differentiate(ctx: Any, *grads: Tensor | None) -> Any:
            if not torch.is_grad_enabled():
                try:
                    return backward(ctx, *grads)
                except RuntimeError as error:
                    refuse_batched(operation if isinstance(operation, str) else operation(ctx), grads, error)
                    raise
            name = operation if isinstance(operation, str) else operation(ctx)
            return _FirstDerivative.apply((name, switch), backward, ctx, len(grads), *grads, *ctx.saved_tensors)

        return differentiate

    return decorate


class _FirstDerivative(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, names: tuple[str, str | None], backward: Backward, outer: Any, num_grads: int, *tensors: Tensor | None
    ) -> Any:
        ctx.names = names
        return backward(outer, *tensors[:num_grads])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        operation, switch = ctx.names
        in_megatron = f', in Megatron by setting tempo.{switch} to "off"' if switch else ""
        raise RuntimeError(
            f"{operation} is not twice differentiable, and a second derivative was asked for; use torch's operation "
            f"instead{in_megatron}"
        )

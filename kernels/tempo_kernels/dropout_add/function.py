"""bias_dropout_add: checks and the autograd.Function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tempo_kernels.dropout_add import eager
from tempo_kernels.philox import effective_probability


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    p: float,
    key: int,
    first_sample: int = 0,
    first_row: int = 0,
) -> Tensor:
    """residual + dropout(x + bias), with a mask that depends on positions only and is redrawn in backward.

    Args:
        x: [s, b, h], floating point, any strides.
        bias: [h] or None.
        residual: [s, b, h] of x's dtype, or None for dropout alone.
        p: dropout probability in [0, 1); realised within 2**-16, and the survivors' scale uses the realised value.
        key: 64 bits, one per seed, layer and site (`tempo_kernels.philox.derive_key`).
        first_sample: global index of x[:, 0]; the batch holds consecutive samples.
        first_row: global index of x[0] in the sequence (not 0 on a sequence-parallel rank).

    Returns:
        [s, b, h] of x's dtype, new memory. x and residual stay as they are.

    Keeps for backward: nothing but five numbers.
    Error: one rounding of the float32 result (stock rounds after each of three steps).
    Raises: ValueError for shapes, dtypes or a probability that do not fit; RuntimeError on a second derivative.
    """
    if x.dim() != 3 or not x.is_floating_point():
        raise ValueError(f"x is {x.dtype} of shape {list(x.shape)}; a floating-point [s, b, h] tensor is wanted")
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ValueError(f"bias has shape {list(bias.shape)}; [{x.size(-1)}] is wanted, as x's last dimension")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"residual is {residual.dtype} of shape {list(residual.shape)}; "
            f"{x.dtype} of shape {list(x.shape)} is wanted, as x; cast it first"
        )
    effective_probability(p)
    return _BiasDropoutAdd.apply(x, bias, residual, p, key, first_sample, first_row)


def _backend(x: Tensor) -> Any:
    if x.is_cuda:
        from tempo_kernels.dropout_add import kernel  # needs triton

        return kernel
    return eager


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        p: float,
        key: int,
        first_sample: int,
        first_row: int,
    ) -> Tensor:
        ctx.draw = (p, key, first_sample, first_row)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _backend(x).forward(x, bias, residual, p, key, first_sample, first_row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        needs_grad_x, needs_grad_bias, needs_grad_residual = ctx.needs_input_grad[:3]
        grad_x = grad_bias = None
        if needs_grad_x or needs_grad_bias:
            p, key, first_sample, first_row = ctx.draw
            grad_x, grad_bias = _backend(grad_out).backward(grad_out, p, key, first_sample, first_row, needs_grad_bias)
        return (
            grad_x if needs_grad_x else None,
            None if grad_bias is None else grad_bias.to(ctx.bias_dtype),
            grad_out if needs_grad_residual else None,
            *[None] * 4,
        )

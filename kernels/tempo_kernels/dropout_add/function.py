"""bias_dropout_add: the backend and the autograd.Function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tempo_kernels.derivative import first_derivative_only
from tempo_kernels.dropout_add import eager
from tempo_kernels.dropout_add.draw import Draw


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    p: float,
    key: int | Tensor,
    first_sample: int | Tensor = 0,
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

    key and first_sample may each be a 0-dim int64 tensor on x's device (the key's 64 bits as a signed number). On a GPU
    only the kernels read it, in forward and again in backward: a CUDA graph draws anew at each replay from what the
    memory then holds, which must not change between a forward and its backward.

    Returns:
        [s, b, h] of x's dtype, new memory. x and residual stay as they are.

    Keeps for backward: nothing but four numbers, of which those that are tensors stay tensors (8 bytes each).
    Error: one rounding of the float32 result (stock rounds after each of three steps).
    Raises: ValueError for shapes, dtypes, devices or a probability that do not fit; RuntimeError on a second
        derivative, and where key or first_sample was written to between forward and backward.
    """
    draw = Draw(p, key, first_sample, first_row)
    draw.check(x, bias, residual)
    return _BiasDropoutAdd.apply(x, bias, residual, draw)


def _backend(x: Tensor) -> Any:
    if x.is_cuda:
        from tempo_kernels.dropout_add import kernel  # needs triton

        return kernel
    return eager


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor | None, draw: Draw) -> Tensor:
        ctx.draw, tensors = draw.split()
        ctx.save_for_backward(*tensors)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _backend(x).forward(x, bias, residual, *draw)

    @staticmethod
    @first_derivative_only("bias_dropout_add", "dropout")
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        needs_grad_x, needs_grad_bias, needs_grad_residual, _ = ctx.needs_input_grad
        grad_x = grad_bias = None
        if needs_grad_x or needs_grad_bias:
            draw = ctx.draw.joined(*ctx.saved_tensors)
            grad_x, grad_bias = _backend(grad_out).backward(grad_out, *draw, needs_grad_bias)
        return (
            grad_x if needs_grad_x else None,
            None if grad_bias is None else grad_bias.to(ctx.bias_dtype),
            grad_out if needs_grad_residual else None,
            None,
        )

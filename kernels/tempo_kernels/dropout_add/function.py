"""Defines `bias_dropout_add`: chooses the backend and holds the autograd.Function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tempo_kernels.backend import choose_backend
from tempo_kernels.derivative import first_derivative_only, takes_plain_tensors
from tempo_kernels.dropout_add import eager
from tempo_kernels.dropout_add.settings import OPERANDS, Draw
from tempo_kernels.opaque import opaque, separate


@takes_plain_tensors
def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    p: float,
    key: int | Tensor,
    first_sample: int | Tensor = 0,
    first_row: int = 0,
    first_column: int = 0,
    rows: Tensor | None = None,
    samples: Tensor | None = None,
) -> Tensor:
    """Computes residual + dropout(x + bias), with a mask that depends on positions only and is redrawn in backward.

    Args:
        x: [s, b, h], floating point, any strides.
        bias: [h], floating point, or None.
        residual: [s, b, h] of x's dtype, or None for dropout alone.
        p: dropout probability in [0, 1); realised within 2**-16, and the survivors' scale uses the realised value.
        key: 64 bits, one per seed, layer and site (`tempo_kernels.philox.derive_key`).
        first_sample: global index of x[:, 0]; the batch holds consecutive samples.
        first_row: global index of x[0] in the sequence (not 0 on a sequence-parallel rank).
        first_column: global index of x[:, :, 0], a multiple of 8 (not 0 where x holds a part of each row).
        rows, samples: int64 [s] or [s, b] on x's device, in place of first_row and first_sample: the global index of
            each token's row, in [0, 2**32), and of its sample, in [0, 2**48), where tokens are not consecutive, as on a
            context-parallel rank or in a packed row. Their ranges are checked on a CPU only.

    key and first_sample may each be a 0-dim int64 tensor on x's device (the key's 64 bits as a signed number). On a GPU
    only the kernels read it, in forward and again in backward. So a replayed CUDA graph draws a new mask from whatever
    the tensor holds at that time; it must not change between a forward and its backward.

    Returns:
        [s, b, h] of x's dtype, new memory. x and residual stay as they are.

    Keeps for backward: four numbers; key and first_sample stay tensors if they are (8 bytes each); rows and samples,
        where given, are kept as the caller's tensors.
    Error: one rounding of the float32 result (stock rounds after each of three steps).
    Raises: ValueError for shapes, dtypes, devices or a probability that do not fit; RuntimeError on a second
        derivative, and where key, first_sample, rows or samples was written to between forward and backward.
    """
    draw = Draw(p, key, first_sample, first_row, first_column, rows, samples)
    draw.check(x, bias, residual)
    out: Tensor = _BiasDropoutAdd.apply(x, bias, *separate(residual), draw)
    return out


def _allocate(x: Tensor, *_: Any) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device)]


@opaque(f"bias_dropout_add(Tensor x, Tensor? bias, Tensor? residual, {OPERANDS}) -> Tensor[]", _allocate)
def _forward(x: Tensor, bias: Tensor | None, residual: Tensor | None, *operands: Any) -> list[Tensor]:
    return [choose_backend(x, eager).forward(x, bias, residual, Draw.from_operands(*operands))]


def _allocate_gradients(grad_out: Tensor, bias_dtype: torch.dtype | None, *_: Any) -> list[Tensor]:
    grad_x = torch.empty(grad_out.shape, dtype=grad_out.dtype, device=grad_out.device)
    return [grad_x] if bias_dtype is None else [grad_x, grad_x.new_empty(grad_out.shape[-1:], dtype=bias_dtype)]


@opaque(
    f"bias_dropout_add_backward(Tensor grad_out, ScalarType? bias_dtype, {OPERANDS}) -> Tensor[]", _allocate_gradients
)
def _backward(grad_out: Tensor, bias_dtype: torch.dtype | None, *operands: Any) -> list[Tensor]:
    """Returns grad_x and, if bias_dtype is given, grad_bias in that dtype."""
    backend, draw = choose_backend(grad_out, eager), Draw.from_operands(*operands)
    grads = backend.backward(grad_out, draw, bias_dtype is not None, bias_dtype)
    return [grad for grad in grads if grad is not None]


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor | None, draw: Draw) -> Tensor:
        ctx.numbers, tensors = draw.split()
        ctx.save_for_backward(*tensors)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _forward(x, bias, residual, *ctx.numbers, *tensors)[0]

    @staticmethod
    @first_derivative_only("bias_dropout_add", "dropout")
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        has_grad_x, has_grad_bias, has_grad_residual, _ = ctx.needs_input_grad
        grads: list[Tensor | None] = []
        if has_grad_x or has_grad_bias:
            bias_dtype = ctx.bias_dtype if has_grad_bias else None
            grads = [*_backward(grad_out, bias_dtype, *ctx.numbers, *ctx.saved_tensors)]
        grad_x, grad_bias = [*grads, None, None][:2]
        return grad_x if has_grad_x else None, grad_bias, grad_out if has_grad_residual else None, None

"""Defines `squared_relu`: checks its arguments and holds the autograd.Function that keeps the output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tempo_kernels.activation import ACTIVATE, check_tensors, list_gradients, shape_gradients
from tempo_kernels.backend import choose_backend
from tempo_kernels.derivative import first_derivative_only, takes_plain_tensors
from tempo_kernels.opaque import opaque
from tempo_kernels.squared_relu import cpu


@takes_plain_tensors
def squared_relu(x: Tensor, bias: Tensor | None = None, *, keep: str = "output") -> Tensor:
    """Computes relu(x + bias)**2 (So et al., "Primer", 2021).

    Args:
        x: [..., f], float32, bfloat16, float16 or float64 (on a GPU not float64), any strides.
        bias: [f] of x's dtype, or None.
        keep: "output" to differentiate from y, "input" to differentiate from x + bias.

    Returns:
        y [..., f] of x's dtype, contiguous: torch's, bit for bit.

    Keeps for backward: with keep="output" nothing but y (one storage with what the next linear keeps, hence free); with
        keep="input" x and bias.
    Error: grad_x is torch's, bit for bit. With keep="output" this holds while y stays in the range of its dtype: a
        float16 y overflows from x + bias = 256 on, and below 0.008 2 sqrt(y) is off by up to 3.5e-4.
    Raises: ValueError for a dtype, shape or keep that does not fit; RuntimeError on a second derivative.
    """
    if keep not in ("output", "input"):
        raise ValueError(f'squared_relu: keep is {keep!r}; expected "output" or "input"')
    check_tensors("squared_relu", x, bias)
    if keep == "input":
        return ACTIVATE.apply("squared_relu", x, bias, "squared_relu")
    y: Tensor = _SquaredReLU.apply(x, bias)
    return y


@opaque("squared_relu_backward(Tensor grad_y, Tensor y, bool has_grad_bias) -> Tensor[]", shape_gradients)
def _backward(grad_y: Tensor, y: Tensor, has_grad_bias: bool) -> list[Tensor]:
    """Returns grad_x and, with has_grad_bias, grad_bias."""
    return list_gradients(*choose_backend(y, cpu).backward(grad_y, y, has_grad_bias))


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        y = ACTIVATE.compute(x, bias, "squared_relu")
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @first_derivative_only("squared_relu", "activation")
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor | None]:
        (y,) = ctx.saved_tensors
        grad_x, *grad_bias = _backward(grad_y, y, ctx.needs_input_grad[1])
        return grad_x, grad_bias[0] if grad_bias else None

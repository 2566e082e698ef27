"""squared_relu: checks, the backend, and the autograd.Functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tempo_kernels.derivative import first_derivative_only
from tempo_kernels.squared_relu import eager


def squared_relu(x: Tensor, bias: Tensor | None = None, *, keep: str = "output") -> Tensor:
    """relu(x + bias)**2 (So et al., "Primer", 2021).

    Args:
        x: [..., f], floating point, any strides; on a GPU float32, bfloat16 or float16.
        bias: [f] of x's dtype, or None.
        keep: "output" to differentiate from y, "input" to differentiate from x + bias.

    Returns:
        y [..., f] of x's dtype, contiguous: torch's, bit for bit.

    Keeps for backward: with keep="output" nothing but y (one storage with what the next linear keeps, hence free); with
        keep="input" x and bias.
    Error: grad_x is torch's, bit for bit, with either; with keep="output" only where y has not left the range of its
        dtype. In float16 it has from x + bias = 256, and below 0.008, where 2 sqrt(y) is off by up to 3.5e-4.
    Raises: ValueError for a dtype, shape or keep that does not fit; RuntimeError on a second derivative.
    """
    if not x.is_floating_point():
        raise ValueError(f"squared_relu: x is {x.dtype}; a floating-point tensor is wanted; cast it")
    if keep not in ("output", "input"):
        raise ValueError(f'squared_relu: keep is {keep!r}; "output" or "input" is wanted')
    if bias is not None and (bias.dim() != 1 or bias.shape != x.shape[-1:] or bias.dtype != x.dtype):
        raise ValueError(
            f"squared_relu: bias is {bias.dtype} of shape {list(bias.shape)} and x {x.dtype} of shape {list(x.shape)}; "
            "a bias of x's dtype, as long as x's last dimension, is wanted; cast or shard it as x"
        )
    return (_SquaredReLU if keep == "output" else _SquaredReLUOfInput).apply(x, bias)


def _backend(x: Tensor) -> Any:
    if x.is_cuda:
        from tempo_kernels.squared_relu import kernel  # needs triton

        return kernel
    return eager


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        y = _backend(x).forward(x, bias)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @first_derivative_only("squared_relu", "gelu")
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor | None]:
        (y,) = ctx.saved_tensors
        grad_x, grad_bias = _backend(y).backward(grad_y, y, ctx.needs_input_grad[1])
        return grad_x, None if grad_bias is None else grad_bias.to(y.dtype)


class _SquaredReLUOfInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.refill = _refill
        return _backend(x).forward(x, bias)

    @staticmethod
    @first_derivative_only("squared_relu", "gelu")
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor | None]:
        x, bias = ctx.saved_tensors
        grad_x, grad_bias = _backend(x).backward_from_input(grad_y, x, bias, ctx.needs_input_grad[1])
        return grad_x, None if grad_bias is None else grad_bias.to(x.dtype)


@torch.no_grad()
def _refill(ctx: Any, out: Tensor) -> None:
    """Writes y, bit for bit as it was, to out."""
    x, bias = ctx.saved_tensors
    _backend(x).forward(x, bias, out)

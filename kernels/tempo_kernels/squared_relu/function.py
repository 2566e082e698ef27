"""squared_relu: checks, the backend, and the autograd.Functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tempo_kernels.backend import choose_backend
from tempo_kernels.derivative import first_derivative_only
from tempo_kernels.opaque import opaque
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
        raise ValueError(f"squared_relu: x is {x.dtype}; expected a floating-point tensor; cast it")
    if keep not in ("output", "input"):
        raise ValueError(f'squared_relu: keep is {keep!r}; expected "output" or "input"')
    if bias is not None and (bias.dim() != 1 or bias.shape != x.shape[-1:] or bias.dtype != x.dtype):
        raise ValueError(
            f"squared_relu: bias is {bias.dtype} of shape {list(bias.shape)} and x {x.dtype} of shape {list(x.shape)}; "
            "expected a bias of x's dtype, as long as x's last dimension; cast or shard it as x"
        )
    return (_SquaredReLU if keep == "output" else _SquaredReLUOfInput).apply(x, bias)


def _shapes(x: Tensor, bias: Tensor | None) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device)]


@opaque("squared_relu(Tensor x, Tensor? bias) -> Tensor[]", _shapes)
def _forward(x: Tensor, bias: Tensor | None) -> list[Tensor]:
    return [choose_backend(x, eager).forward(x, bias)]


def _gradient_shapes(grad_y: Tensor, kept: Tensor, *others: Any) -> list[Tensor]:
    grad_x, has_grad_bias = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device), others[-1]
    return [grad_x, grad_x.new_empty(kept.shape[-1:])] if has_grad_bias else [grad_x]


def _cast(grad_x: Tensor, grad_bias: Tensor | None) -> list[Tensor]:
    return [grad_x] if grad_bias is None else [grad_x, grad_bias.to(grad_x.dtype)]


@opaque("squared_relu_backward(Tensor grad_y, Tensor y, bool has_grad_bias) -> Tensor[]", _gradient_shapes)
def _backward(grad_y: Tensor, y: Tensor, has_grad_bias: bool) -> list[Tensor]:
    """grad_x and, where asked for, grad_bias."""
    return _cast(*choose_backend(y, eager).backward(grad_y, y, has_grad_bias))


@opaque(
    "squared_relu_backward_from_input(Tensor grad_y, Tensor x, Tensor? bias, bool has_grad_bias) -> Tensor[]",
    _gradient_shapes,
)
def _backward_from_input(grad_y: Tensor, x: Tensor, bias: Tensor | None, has_grad_bias: bool) -> list[Tensor]:
    return _cast(*choose_backend(x, eager).backward_from_input(grad_y, x, bias, has_grad_bias))


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        (y,) = _forward(x, bias)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @first_derivative_only("squared_relu", "activation")
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor | None]:
        (y,) = ctx.saved_tensors
        grad_x, *grad_bias = _backward(grad_y, y, ctx.needs_input_grad[1])
        return grad_x, grad_bias[0] if grad_bias else None


class _SquaredReLUOfInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.refill = _refill
        return _forward(x, bias)[0]

    @staticmethod
    @first_derivative_only("squared_relu", "activation")
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor | None]:
        x, bias = ctx.saved_tensors
        grad_x, *grad_bias = _backward_from_input(grad_y, x, bias, ctx.needs_input_grad[1])
        return grad_x, grad_bias[0] if grad_bias else None


@torch.no_grad()
def _refill(ctx: Any, out: Tensor) -> None:
    """Writes y, bit for bit as it was, to out."""
    x, bias = ctx.saved_tensors
    choose_backend(x, eager).forward(x, bias, out)

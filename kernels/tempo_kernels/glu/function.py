"""swiglu, geglu and reglu: checks, the backend, and the autograd.Function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tempo_kernels.backend import choose_backend
from tempo_kernels.derivative import first_derivative_only
from tempo_kernels.glu import cpu
from tempo_kernels.opaque import opaque


def swiglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up, gate and up being the halves of x + bias (Shazeer, "GLU Variants Improve Transformer", 2020).

    Args:
        x: [..., 2f], gate then up, floating point, any strides; on a GPU float32, bfloat16 or float16.
        bias: [2f] of x's dtype, or None.

    Returns:
        y [..., f] of x's dtype, contiguous.

    Keeps for backward: x and bias, not y.
    Error: one rounding of the float32 result (stock rounds after each of up to three steps); grad_x likewise.
    Raises: ValueError for a dtype or shape that does not fit; RuntimeError on a second derivative.
    """
    return _glu("swiglu", x, bias, "silu")


def geglu(x: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """gelu(gate) * up, erf ("none") or "tanh" form. See `swiglu` for all else."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f'geglu: approximate is {approximate!r}; expected "none" (erf) or "tanh"')
    return _glu("geglu", x, bias, "gelu" if approximate == "none" else "gelu_tanh")


def reglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """relu(gate) * up. See `swiglu` for all else."""
    return _glu("reglu", x, bias, "relu")


def _glu(name: str, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    if x.dim() < 1 or not x.is_floating_point() or x.size(-1) % 2:
        raise ValueError(
            f"{name}: x is {x.dtype} of shape {list(x.shape)}; expected floating-point [..., 2f], gate then up"
        )
    if bias is not None and (bias.shape != x.shape[-1:] or bias.dtype != x.dtype):
        raise ValueError(
            f"{name}: bias is {bias.dtype} of shape {list(bias.shape)}; expected {x.dtype} of shape [{x.size(-1)}], "
            "as x's last dimension; cast or shard it as x"
        )
    return _GLU.apply(x, bias, activation)


def _shapes(x: Tensor, bias: Tensor | None, activation: str) -> list[Tensor]:
    return [torch.empty(*x.shape[:-1], x.size(-1) // 2, dtype=x.dtype, device=x.device)]


@opaque("glu(Tensor x, Tensor? bias, str activation) -> Tensor[]", _shapes)
def _forward(x: Tensor, bias: Tensor | None, activation: str) -> list[Tensor]:
    return [choose_backend(x, cpu).forward(x, bias, activation)]


def _gradient_shapes(
    grad_y: Tensor, x: Tensor, bias: Tensor | None, activation: str, has_grad_bias: bool
) -> list[Tensor]:
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return [grad_x, grad_x.new_empty(x.shape[-1:])] if has_grad_bias else [grad_x]


@opaque(
    "glu_backward(Tensor grad_y, Tensor x, Tensor? bias, str activation, bool has_grad_bias) -> Tensor[]",
    _gradient_shapes,
)
def _backward(grad_y: Tensor, x: Tensor, bias: Tensor | None, activation: str, has_grad_bias: bool) -> list[Tensor]:
    """grad_x and, where asked for, grad_bias."""
    grad_x, grad_bias = choose_backend(x, cpu).backward(grad_y, x, bias, activation, has_grad_bias)
    return [grad_x] if grad_bias is None else [grad_x, grad_bias.to(x.dtype)]


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.activation = activation
        ctx.refill = _refill
        return _forward(x, bias, activation)[0]

    @staticmethod
    @first_derivative_only("a gated linear unit", "activation")
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        grad_x, *grad_bias = _backward(grad_y, x, bias, ctx.activation, ctx.needs_input_grad[1])
        return grad_x, grad_bias[0] if grad_bias else None, None


@torch.no_grad()
def _refill(ctx: Any, out: Tensor) -> None:
    """Writes y, bit for bit as it was, to out."""
    x, bias = ctx.saved_tensors
    choose_backend(x, cpu).forward(x, bias, ctx.activation, out)

"""Defines `activate`, of which gelu, glu, silu and squared_relu are faces, and its autograd.Function, which keeps the
input or the output and differentiates from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tempo_kernels.activation import cpu
from tempo_kernels.activation.activations import ACTIVATIONS
from tempo_kernels.activation.eager import allocate_output
from tempo_kernels.backend import choose_backend
from tempo_kernels.derivative import first_derivative_only, takes_plain_tensors
from tempo_kernels.opaque import opaque, run_or_simulate
from tempo_kernels.saved import allow_refill

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@takes_plain_tensors
def activate(
    x: Tensor, bias: Tensor | None, activation: str, *, keep: str = "recompute", is_gated: bool = False,
    operation: str | None = None,
) -> Tensor:  # fmt: skip
    """Computes f(x + bias), or gated f(gate) up of the halves of x + bias, for an activation f of ACTIVATIONS.

    Args:
        x: [..., f], gated [..., 2f], gate then up; float32, bfloat16, float16 or float64 (on a GPU not float64), any
            strides.
        bias: as long as x's last dimension and of x's dtype, or None.
        activation: a name in ACTIVATIONS; "gelu" is the erf form.
        keep: "recompute" to differentiate from x + bias; "inplace" to differentiate from y, for an activation that has
            a slope_of_output and is not gated.
        is_gated: whether f takes the first half of x + bias and multiplies the second.
        operation: the name in errors; the activation's by default.

    Returns:
        y [..., f] of x's dtype, contiguous. On a CPU it is torch's activation of x + bias, bit for bit, except that
        "gelu_tanh" and gated units add x and bias in float32 and round once.

    Keeps for backward: with keep="recompute" x and bias, not y; `recompute.drop` can recompute y. With keep="inplace" y
        and, for an activation that has an x_min, one bit per element.
    Error: grad_x's is at most twice torch's own plus one ulp of the largest gradient; in place see `gelu` and
        `squared_relu`.
    Raises: ValueError for an activation, keep, dtype or shape that does not fit; RuntimeError on a second derivative.
    """
    if activation not in ACTIVATIONS:
        names = ", ".join(ACTIVATIONS)
        raise ValueError(f"{operation or 'activate'}: activation is {activation!r}; expected one of {names}")
    operation = operation or activation
    if keep not in ("inplace", "recompute"):
        raise ValueError(f'{operation}: keep is {keep!r}; expected "inplace" or "recompute"')
    if keep == "inplace" and (is_gated or ACTIVATIONS[activation].slope_of_output is None):
        unit = f"gated {activation}" if is_gated else activation
        raise ValueError(f'{operation}: keep is "inplace", and the output of {unit} gives no slope; use "recompute"')
    if x.dtype not in _DTYPES:
        raise ValueError(f"{operation}: x is {x.dtype}; expected float32, bfloat16, float16 or float64; cast it")
    if bias is not None and (bias.dim() != 1 or bias.shape != x.shape[-1:] or bias.dtype != x.dtype):
        raise ValueError(
            f"{operation}: bias is {bias.dtype} of shape {list(bias.shape)} and x {x.dtype} of shape {list(x.shape)}; "
            "expected a bias of x's dtype, as long as x's last dimension; cast or shard it as x"
        )
    if is_gated and (x.dim() < 1 or x.size(-1) % 2):
        raise ValueError(f"{operation}: x has shape {list(x.shape)}; expected [..., 2f], gate then up")
    y: Tensor = _Activation.apply(x, bias, activation, "gated" if is_gated else keep, operation)
    return y


def get_gelu(operation: str, approximate: str) -> str:
    """Returns the activation that torch calls "none" (erf) or "tanh"; raises ValueError for another word."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f'{operation}: approximate is {approximate!r}; expected "none" (erf) or "tanh"')
    return "gelu" if approximate == "none" else "gelu_tanh"


@opaque("activation(Tensor x, Tensor? bias, str activation, str form) -> Tensor[]", allocate_output)
def _forward(x: Tensor, *others: Any) -> list[Tensor]:
    return [t for t in choose_backend(x, cpu).forward(x, *others) if t is not None]


def _allocate_gradients(grad_y: Tensor, kept: Tensor, *others: Any) -> list[Tensor]:
    grad_x, has_grad_bias = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device), others[-1]
    return [grad_x, grad_x.new_empty(kept.shape[-1:])] if has_grad_bias else [grad_x]


@opaque(
    "activation_backward(Tensor grad_y, Tensor kept, Tensor? bias, Tensor? bits, str activation, str form, "
    "bool has_grad_bias) -> Tensor[]",
    _allocate_gradients,
)
def _backward(grad_y: Tensor, kept: Tensor, *others: Any) -> list[Tensor]:
    """Returns grad_x and, if there is a bias, its gradient in the same dtype."""
    grad_x, grad_bias = choose_backend(kept, cpu).backward(grad_y, kept, *others)
    return [grad_x] if grad_bias is None else [grad_x, grad_bias.to(grad_x.dtype)]


@torch.no_grad()
def _refill(ctx: Any, out: Tensor) -> None:
    """Writes the same y, bit for bit, to out."""
    x, bias = ctx.saved_tensors
    run_or_simulate(choose_backend(x, cpu).forward, x, bias, ctx.activation, ctx.form, out)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, activation: str, form: str, operation: str) -> Tensor:
        y, *bits = _forward(x, bias, activation, form)
        if form == "inplace":
            ctx.save_for_backward(y, None, *bits)
        else:
            ctx.save_for_backward(x, bias)
            allow_refill(ctx, y, _refill)
        ctx.activation, ctx.form, ctx.operation = activation, form, operation
        return y

    @staticmethod
    @first_derivative_only(lambda ctx: ctx.operation, "activation")
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        kept, bias, *bits = ctx.saved_tensors
        has_grad_bias = ctx.needs_input_grad[1]
        grad_x, *grad_bias = _backward(
            grad_y, kept, bias, bits[0] if bits else None, ctx.activation, ctx.form, has_grad_bias
        )
        return grad_x, grad_bias[0] if grad_bias else None, None, None, None

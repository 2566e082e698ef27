"""gelu: checks, the backend, and the autograd.Functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tempo_kernels.backend import choose_backend
from tempo_kernels.derivative import first_derivative_only
from tempo_kernels.gelu import cpu
from tempo_kernels.opaque import opaque

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "none", *, keep: str = "output") -> Tensor:
    """GELU of x + bias.

    Args:
        x: [..., f], float32, bfloat16, float16 or float64 (on a GPU not float64), any strides.
        bias: [f] of x's dtype, or None.
        approximate: "none" for the erf form, "tanh" for the tanh form.
        keep: "output" to differentiate from y, "input" to differentiate from x + bias.

    Returns:
        y [..., f] of x's dtype, contiguous. The erf form is F.gelu(x + bias): torch's, bit for bit, on a CPU; to one
        rounding on a GPU. The tanh form is F.gelu of the float32 sum, rounded once: within 5e-7 of Megatron's fused
        bias_gelu in float32.

    Keeps for backward: with keep="output" y itself (one storage with what the next linear keeps, hence free) and one
        bit per element; with keep="input" x and bias.
    Error: with keep="output", next to the minimum that of an exact inverse, which misses GELU' by up to 5.1e-5
        (float32), 7.1e-3 (float16) and 1.6e-2 (bfloat16) if y is correctly rounded, and by 1.5e-4 in float32 as torch
        rounds it; elsewhere 2.8e-5. With keep="input", at most twice torch's own plus one ulp of the largest gradient.
    Raises: ValueError for a dtype, shape, form or keep that does not fit; RuntimeError on a second derivative.
    """
    if x.dtype not in _DTYPES:
        raise ValueError(f"gelu: x is {x.dtype}; expected float32, bfloat16, float16 or float64; cast it")
    if approximate not in ("none", "tanh"):
        raise ValueError(f'gelu: approximate is {approximate!r}; expected "none" (erf) or "tanh"')
    if keep not in ("output", "input"):
        raise ValueError(f'gelu: keep is {keep!r}; expected "output" or "input"')
    if bias is not None:
        if bias.dim() != 1 or bias.shape != x.shape[-1:]:
            raise ValueError(
                f"gelu: bias has shape {list(bias.shape)} and x {list(x.shape)}; expected "
                "a bias as long as x's last dimension; reshape or shard it as x"
            )
        if bias.dtype != x.dtype:
            raise ValueError(f"gelu: bias is {bias.dtype} and x {x.dtype}; cast bias to {x.dtype}")
    return (_GELU if keep == "output" else _GELUOfInput).apply(x, bias, approximate)


def _shapes(x: Tensor, bias: Tensor | None, approximate: str, has_bits: bool) -> list[Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return [y, torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device)] if has_bits else [y]


@opaque("gelu(Tensor x, Tensor? bias, str approximate, bool has_bits) -> Tensor[]", _shapes)
def _forward(x: Tensor, bias: Tensor | None, approximate: str, has_bits: bool) -> list[Tensor]:
    """y and, where asked for, the bits."""
    y, bits = choose_backend(x, cpu).forward(x, bias, approximate, has_bits)
    return [y] if bits is None else [y, bits]


def _gradient_shapes(
    grad_y: Tensor, kept: Tensor, other: Tensor, approximate: str, has_grad_bias: bool
) -> list[Tensor]:
    grad_x = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)
    return [grad_x, grad_x.new_empty(kept.shape[-1:])] if has_grad_bias else [grad_x]


def _cast(grad_x: Tensor, grad_bias: Tensor | None) -> list[Tensor]:
    return [grad_x] if grad_bias is None else [grad_x, grad_bias.to(grad_x.dtype)]


@opaque(
    "gelu_backward(Tensor grad_y, Tensor y, Tensor bits, str approximate, bool has_grad_bias) -> Tensor[]",
    _gradient_shapes,
)
def _backward(grad_y: Tensor, y: Tensor, bits: Tensor, approximate: str, has_grad_bias: bool) -> list[Tensor]:
    """grad_x and, where asked for, grad_bias."""
    return _cast(*choose_backend(y, cpu).backward(grad_y, y, bits, approximate, has_grad_bias))


@opaque(
    "gelu_backward_from_input(Tensor grad_y, Tensor x, Tensor? bias, str approximate, bool has_grad_bias) -> Tensor[]",
    _gradient_shapes,
)
def _backward_from_input(
    grad_y: Tensor, x: Tensor, bias: Tensor | None, approximate: str, has_grad_bias: bool
) -> list[Tensor]:
    return _cast(*choose_backend(x, cpu).backward_from_input(grad_y, x, bias, approximate, has_grad_bias))


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
        y, bits = _forward(x, bias, approximate, True)
        ctx.save_for_backward(y, bits)
        ctx.approximate = approximate
        return y

    @staticmethod
    @first_derivative_only("gelu", "activation")
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        y, bits = ctx.saved_tensors
        grad_x, *grad_bias = _backward(grad_y, y, bits, ctx.approximate, ctx.needs_input_grad[1])
        return grad_x, grad_bias[0] if grad_bias else None, None


class _GELUOfInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
        (y,) = _forward(x, bias, approximate, False)
        ctx.save_for_backward(x, bias)
        ctx.approximate = approximate
        ctx.refill = _refill
        return y

    @staticmethod
    @first_derivative_only("gelu", "activation")
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        grad_x, *grad_bias = _backward_from_input(grad_y, x, bias, ctx.approximate, ctx.needs_input_grad[1])
        return grad_x, grad_bias[0] if grad_bias else None, None


@torch.no_grad()
def _refill(ctx: Any, out: Tensor) -> None:
    """Writes y, bit for bit as it was, to out."""
    x, bias = ctx.saved_tensors
    choose_backend(x, cpu).forward(x, bias, ctx.approximate, has_bits=False, out=out)

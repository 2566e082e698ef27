"""Defines `gelu`: checks its arguments, chooses the backend and holds the autograd.Function that keeps the output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tempo_kernels.activation import ACTIVATE, check_tensors, forward_with_bits, list_gradients, shape_gradients
from tempo_kernels.backend import choose_backend
from tempo_kernels.derivative import first_derivative_only, takes_plain_tensors
from tempo_kernels.gelu import cpu
from tempo_kernels.gelu.inverse import INVERSES
from tempo_kernels.opaque import opaque

_ACTIVATIONS = {"none": "gelu", "tanh": "gelu_tanh"}


@takes_plain_tensors
def gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "none", *, keep: str = "output") -> Tensor:
    """Computes GELU of x + bias.

    Args:
        x: [..., f], float32, bfloat16, float16 or float64 (on a GPU not float64), any strides.
        bias: [f] of x's dtype, or None.
        approximate: "none" for the erf form, "tanh" for the tanh form.
        keep: "output" to differentiate from y, "input" to differentiate from x + bias.

    Returns:
        y [..., f] of x's dtype, contiguous. The erf form is F.gelu(x + bias): torch's, bit for bit, on a CPU; on a GPU
        to one rounding, of 16 bits to 0.76 units in the last place, and 0 for a 16-bit -inf, where torch gives NaN. The
        tanh form is F.gelu of the float32 sum, rounded once: within 5e-7 of Megatron's fused bias_gelu in float32.

    Keeps for backward: with keep="output" y itself (one storage with what the next linear keeps, hence free) and one
        bit per element; with keep="input" x and bias.
    Error: with keep="output", near the minimum of GELU, where y hardly determines x, GELU' has the error of an exact
        inverse of a correctly rounded y: up to 5.1e-5 (float32), 7.1e-3 (float16) and 1.6e-2 (bfloat16). Elsewhere it
        is 2.8e-5, on a GPU 4.0e-4 (float16) and 1.4e-3 (bfloat16). On a CPU a float32 y has torch's bits, off by some
        units in the last place; near the minimum an error d of y adds up to sqrt(0.87 d), at most 3.0e-4 on the CPUs
        tried. With keep="input" the error is at most twice torch's own plus one ulp of the largest gradient.
    Raises: ValueError for a dtype, shape, form or keep that does not fit; RuntimeError on a second derivative.
    """
    if approximate not in _ACTIVATIONS:
        raise ValueError(f'gelu: approximate is {approximate!r}; expected "none" (erf) or "tanh"')
    if keep not in ("output", "input"):
        raise ValueError(f'gelu: keep is {keep!r}; expected "output" or "input"')
    check_tensors("gelu", x, bias)
    if keep == "input":
        return ACTIVATE.apply("gelu", x, bias, _ACTIVATIONS[approximate])
    y: Tensor = _GELU.apply(x, bias, approximate)
    return y


def _shape_output_and_bits(x: Tensor, bias: Tensor | None, approximate: str) -> list[Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return [y, torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device)]


@opaque("gelu(Tensor x, Tensor? bias, str approximate) -> Tensor[]", _shape_output_and_bits)
def _forward(x: Tensor, bias: Tensor | None, approximate: str) -> list[Tensor]:
    """Returns y and the bits x + bias >= x_min."""
    return forward_with_bits(x, bias, _ACTIVATIONS[approximate], INVERSES[approximate].x_min)


@opaque(
    "gelu_backward(Tensor grad_y, Tensor y, Tensor bits, str approximate, bool has_grad_bias) -> Tensor[]",
    shape_gradients,
)
def _backward(grad_y: Tensor, y: Tensor, bits: Tensor, approximate: str, has_grad_bias: bool) -> list[Tensor]:
    """Returns grad_x and, with has_grad_bias, grad_bias."""
    return list_gradients(*choose_backend(y, cpu).backward(grad_y, y, bits, approximate, has_grad_bias))


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
        y, bits = _forward(x, bias, approximate)
        ctx.save_for_backward(y, bits)
        ctx.approximate = approximate
        return y

    @staticmethod
    @first_derivative_only("gelu", "activation")
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        y, bits = ctx.saved_tensors
        grad_x, *grad_bias = _backward(grad_y, y, bits, ctx.approximate, ctx.needs_input_grad[1])
        return grad_x, grad_bias[0] if grad_bias else None, None

"""Gated linear units: one half of x times an activation of the other half, differentiated from x."""

from __future__ import annotations

from torch import Tensor

from tempo_kernels.activation import activate, get_gelu
from tempo_kernels.derivative import takes_plain_tensors

__all__ = ["geglu", "glu", "reglu", "swiglu"]


@takes_plain_tensors
def glu(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Computes activation(gate) * up of the halves of x + bias (Shazeer, "GLU Variants Improve Transformer", 2020).

    Args:
        x: [..., 2f], gate then up, float32, bfloat16, float16 or float64 (on a GPU not float64), any strides.
        bias: [2f] of x's dtype, or None.
        activation: a name in `tempo_kernels.activation.ACTIVATIONS`.

    Returns:
        y [..., f] of x's dtype, contiguous.

    Keeps for backward: x and bias, not y.
    Error: one rounding of the float32 result (stock rounds after each of up to three steps); grad_x likewise.
    Raises: ValueError for an activation, dtype or shape that does not fit; RuntimeError on a second derivative.
    """
    return activate(x, bias, activation, is_gated=True, operation="glu")


@takes_plain_tensors
def swiglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up. See `glu` for all else."""
    return activate(x, bias, "silu", is_gated=True, operation="swiglu")


@takes_plain_tensors
def geglu(x: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Computes gelu(gate) * up, in the erf ("none") or "tanh" form. See `glu` for all else."""
    return activate(x, bias, get_gelu("geglu", approximate), is_gated=True, operation="geglu")


@takes_plain_tensors
def reglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes relu(gate) * up. See `glu` for all else."""
    return activate(x, bias, "relu", is_gated=True, operation="reglu")

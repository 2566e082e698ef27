"""Squared ReLU that keeps its output, which the next linear keeps anyway, instead of its input."""

from __future__ import annotations

from torch import Tensor

from tempo_kernels.activation import activate
from tempo_kernels.derivative import takes_plain_tensors

__all__ = ["squared_relu"]


@takes_plain_tensors
def squared_relu(x: Tensor, bias: Tensor | None = None, *, keep: str = "inplace") -> Tensor:
    """Computes relu(x + bias)**2 (So et al., "Primer", 2021).

    Args:
        x: [..., f], float32, bfloat16, float16 or float64 (on a GPU not float64), any strides.
        bias: [f] of x's dtype, or None.
        keep: "inplace" to differentiate from y, "recompute" to differentiate from x + bias.

    Returns:
        y [..., f] of x's dtype, contiguous: torch's, bit for bit.

    Keeps for backward: with keep="inplace" nothing but y (one storage with what the next linear keeps, hence free);
        with keep="recompute" x and bias.
    Error: grad_x is torch's, bit for bit (to 2 ulps for float64 in place). With keep="inplace" this holds while y stays
        in the range of its dtype: a float16 y overflows from x + bias = 256 on, and below 0.008 2 sqrt(y) is off by up
        to 3.5e-4.
    Raises: ValueError for a dtype, shape or keep that does not fit; RuntimeError on a second derivative.
    """
    return activate(x, bias, "squared_relu", keep=keep, operation="squared_relu")

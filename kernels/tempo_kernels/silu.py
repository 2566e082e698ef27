"""SiLU (swish) that keeps its input, from which its output can be made again."""

from __future__ import annotations

from torch import Tensor

from tempo_kernels.activation import activate
from tempo_kernels.derivative import takes_plain_tensors

__all__ = ["silu"]


@takes_plain_tensors
def silu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes (x + bias) sigmoid(x + bias) (Elfwing et al., "Sigmoid-weighted linear units", 2017).

    Args:
        x: [..., f], float32, bfloat16, float16 or float64 (on a GPU not float64), any strides.
        bias: [f] of x's dtype, or None.

    Returns:
        y [..., f] of x's dtype, contiguous: on a CPU F.silu(x + bias), bit for bit, on a GPU within one rounding.

    Keeps for backward: x and bias, not y.
    Error: grad_x's is at most twice torch's own plus one ulp of the largest gradient.
    Raises: ValueError for a dtype or shape that does not fit; RuntimeError on a second derivative.
    """
    return activate(x, bias, "silu", operation="silu")

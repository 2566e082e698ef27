"""GELU that keeps its output, which the next linear keeps anyway, and one bit per element, instead of its input."""

from __future__ import annotations

from torch import Tensor

from tempo_kernels.activation import activate, get_gelu, make_tables
from tempo_kernels.derivative import takes_plain_tensors

__all__ = ["gelu", "make_tables"]


@takes_plain_tensors
def gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "none", *, keep: str = "inplace") -> Tensor:
    """Computes GELU of x + bias.

    Args:
        x: [..., f], float32, bfloat16, float16 or float64 (on a GPU not float64), any strides.
        bias: [f] of x's dtype, or None.
        approximate: "none" for the erf form, "tanh" for the tanh form.
        keep: "inplace" to differentiate from y, "recompute" to differentiate from x + bias.

    Returns:
        y [..., f] of x's dtype, contiguous. The erf form is F.gelu(x + bias): torch's, bit for bit, on a CPU; on a GPU
        to one rounding, of 16 bits to 0.76 units in the last place, and 0 for a 16-bit -inf, where torch gives NaN. The
        tanh form is F.gelu of the float32 sum, rounded once: within 5e-7 of Megatron's fused bias_gelu in float32.

    Keeps for backward: with keep="inplace" y itself (one storage with what the next linear keeps, hence free) and one
        bit per element; with keep="recompute" x and bias.
    Error: with keep="inplace", near the minimum of GELU, where y hardly determines x, GELU' has the error of an exact
        inverse of a correctly rounded y: up to 5.1e-5 (float32), 7.1e-3 (float16) and 1.6e-2 (bfloat16). Elsewhere it
        is 2.8e-5, on a GPU 4.0e-4 (float16) and 1.4e-3 (bfloat16). On a CPU a float32 y has torch's bits, off by some
        units in the last place; near the minimum an error d of y adds up to sqrt(0.87 d), at most 3.0e-4 on the CPUs
        tried. With keep="recompute" the error is at most twice torch's own plus one ulp of the largest gradient.
    Raises: ValueError for a dtype, shape, form or keep that does not fit; RuntimeError on a second derivative.
    """
    return activate(x, bias, get_gelu("gelu", approximate), keep=keep, operation="gelu")

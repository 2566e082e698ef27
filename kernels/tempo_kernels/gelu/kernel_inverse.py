"""GELU's derivative from its output and one bit, inside the kernels: the formula of inverse.py."""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl

from tempo_kernels.gelu.inverse import INVERSES, Y_MAX


@cache
def list_coefficients(approximate: str, is_narrow: bool) -> dict[str, float]:
    """The meta-parameters of find_slope."""
    inverse = INVERSES[approximate]
    return {
        "Y_MIN": inverse.y_min,
        # No 16-bit y is so near to the minimum that its digits beyond float32 mattered.
        "Y_MIN_LOW": 0.0 if is_narrow else inverse.y_min_low,
        "ROOT_ZERO": inverse.root_zero,
        "TOP": Y_MAX - inverse.y_min,
        **{f"P{7 - index}": coefficient for index, coefficient in enumerate(inverse.numerator)},
        **{f"Q{9 - index}": coefficient for index, coefficient in enumerate(inverse.denominator[:-1])},
    }


@triton.jit
def find_slope(
    y, is_left,
    Y_MIN, Y_MIN_LOW, ROOT_ZERO, TOP, P7, P6, P5, P4, P3, P2, P1, P0, Q9, Q8, Q7, Q6, Q5, Q4, Q3, Q2, Q1,
):  # fmt: skip
    """GELU'(x(y)) by the formula of inverse.py; the sign bit of is_left, an int32, is set left of the minimum."""
    # NaN stays NaN.
    square = tl.maximum(y - Y_MIN, Y_MIN_LOW, propagate_nan=tl.PropagateNan.ALL)
    square = tl.minimum(square, TOP, propagate_nan=tl.PropagateNan.ALL) - Y_MIN_LOW
    s = (tl.sqrt(square).to(tl.int32, bitcast=True) | (is_left & -0x80000000)).to(tl.float32, bitcast=True)
    p = ((((((P7 * s + P6) * s + P5) * s + P4) * s + P3) * s + P2) * s + P1) * s + P0
    q = ((((((((Q9 * s + Q8) * s + Q7) * s + Q6) * s + Q5) * s + Q4) * s + Q3) * s + Q2) * s + Q1) * s + 1.0
    root = tl.rsqrt(q)
    return (p * root) * (root * (square + ROOT_ZERO * s))

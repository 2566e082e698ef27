"""Evaluates GELU's derivative from its output and one bit inside kernels, by the formula of inverse.py."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from tempo_kernels.gelu.inverse import INVERSES, SHORT_INVERSES, Y_MAX
from tempo_kernels.kernel_numbers import invert


@cache
def list_coefficients(approximate: str, dtype: torch.dtype) -> dict[str, Any]:
    """Lists the meta-parameters of find_slope for a y of `dtype`."""
    inverse = INVERSES[approximate] if dtype == torch.float32 else SHORT_INVERSES[approximate, dtype]
    return {
        "Y_MIN": inverse.y_min,
        # No 16-bit y is so close to the minimum that digits of y_min beyond float32 would matter.
        "Y_MIN_LOW": inverse.y_min_low if dtype == torch.float32 else 0.0,
        "ROOT_ZERO": inverse.root_zero,
        "TOP": Y_MAX - inverse.y_min,
        "NUMERATOR": inverse.numerator,
        "DENOMINATOR": inverse.denominator,
    }


@triton.jit
def _evaluate(s, COEFFICIENTS: tl.constexpr):
    """Evaluates the polynomial with these coefficients, highest power first, by Horner's scheme."""
    value = COEFFICIENTS[0] * s + COEFFICIENTS[1]
    for index in tl.static_range(2, len(COEFFICIENTS)):
        value = value * s + COEFFICIENTS[index]
    return value


@triton.jit
def find_slope(
    y, is_left,
    Y_MIN: tl.constexpr, Y_MIN_LOW: tl.constexpr, ROOT_ZERO: tl.constexpr, TOP: tl.constexpr,
    NUMERATOR: tl.constexpr, DENOMINATOR: tl.constexpr,
):  # fmt: skip
    """Evaluates GELU'(x(y)) by the formula of inverse.py; the sign bit of is_left, an int32, is set left of x_min."""
    # y - Y_MIN is exact near the minimum, and Y_MIN_LOW holds the digits that Y_MIN lacks in float32: GELU' is a square
    # root of the difference there, which amplifies any error. NaN stays NaN.
    square = tl.maximum(y - Y_MIN, Y_MIN_LOW, propagate_nan=tl.PropagateNan.ALL)
    square = tl.minimum(square, TOP, propagate_nan=tl.PropagateNan.ALL) - Y_MIN_LOW
    # The root gets the branch's sign bit without a comparison. Below, s (s + ROOT_ZERO) = square + ROOT_ZERO s.
    s = (tl.sqrt(square).to(tl.int32, bitcast=True) | (is_left & -0x80000000)).to(tl.float32, bitcast=True)
    return _evaluate(s, NUMERATOR) * invert(_evaluate(s, DENOMINATOR)) * (square + ROOT_ZERO * s)

"""Activations and their derivatives in float32, inside the kernels of pointwise operations.

What counts is instructions: an H200 has about 30 for each element of 16 bits in forward and 45 in backward before they
take longer than its memory does. Hence 16-bit types, which do not show an error of 3e-7, get 1 / v as rsqrt(v)**2, two
instructions instead of nine, and an erf of half as many instructions as tl.erf.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def clamp(x, LIMIT: tl.constexpr):
    """x in [-LIMIT, LIMIT]; NaN stays NaN."""
    x = tl.maximum(x, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def invert(v, IS_NARROW: tl.constexpr):
    """1 / v, for 16-bit types as rsqrt(v)**2; that is off by up to 3e-7 of itself, which float32 would show."""
    if IS_NARROW:
        root = tl.rsqrt(v)
        return root * root
    return 1.0 / v


@triton.jit
def normal_cdf(x, IS_NARROW: tl.constexpr):
    """The probability that a standard normal variable is below x; in 16-bit types by Abramowitz and Stegun 7.1.26,
    off by 8e-8, in half the instructions of tl.erf."""
    if IS_NARROW:
        t = invert(1.0 + 0.231641888 * tl.abs(x), IS_NARROW)
        tail = 0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)
        tail = t * (0.127414796 + t * (-0.142248368 + t * tail)) * tl.exp2(-0.7213475204 * x * x)
        return tl.where(x < 0.0, tail, 1.0 - tail)
    return 0.5 + 0.5 * tl.erf(0.7071067812 * x)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, IS_NARROW: tl.constexpr):
    """The activation of x. Far left of 0 the exponential is infinite and the gate, its reciprocal, 0."""
    if ACTIVATION == "silu":
        value = x * invert(1.0 + tl.exp2(-1.442695041 * x), IS_NARROW)
    elif ACTIVATION == "gelu":
        value = x * normal_cdf(x, IS_NARROW)
    elif ACTIVATION == "gelu_tanh":
        # The sigmoid of 2 sqrt(2 / pi) (x + 0.044715 x**3).
        value = x * invert(1.0 + tl.exp2(x * (-2.302208198 - 0.1029432397 * x * x)), IS_NARROW)
    elif ACTIVATION == "squared_relu":
        rectified = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        value = rectified * rectified
    else:
        tl.static_assert(ACTIVATION == "relu")
        value = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return value


@triton.jit
def differentiate(x, ACTIVATION: tl.constexpr, IS_NARROW: tl.constexpr):
    """The activation of x and its derivative, which share their exponential; the compiler drops what is not used.

    Where a factor of the derivative would overflow, x is clamped first, to where both are relu's to float32.
    """
    if ACTIVATION == "silu":
        near = clamp(x, 87.0)
        power = tl.exp2(-1.442695041 * near)
        gate = invert(1.0 + power, IS_NARROW)
        rest = power * gate
        value, slope = tl.maximum(x, near) * gate, gate + gate * (near * rest)
    elif ACTIVATION == "gelu":
        gate = normal_cdf(x, IS_NARROW)
        value, slope = x * gate, gate + x * 0.3989422804 * tl.exp2(-0.7213475204 * x * x)
    elif ACTIVATION == "gelu_tanh":
        near = clamp(x, 10.0)
        square = near * near
        power = tl.exp2(near * (-2.302208198 - 0.1029432397 * square))
        gate = invert(1.0 + power, IS_NARROW)
        rest = power * gate
        value, slope = tl.maximum(x, near) * gate, gate + gate * (rest * near * (1.595769122 + 0.2140644488 * square))
    elif ACTIVATION == "squared_relu":
        rectified = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        value, slope = rectified * rectified, 2.0 * rectified
    else:
        tl.static_assert(ACTIVATION == "relu")
        value, slope = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL), tl.where(x > 0.0, 1.0, 0.0)
    return value, slope

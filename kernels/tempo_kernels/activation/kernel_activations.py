"""Computes activations and their derivatives in float32 inside kernels.

Instructions are the budget: on an H200, about 30 per 16-bit element in forward and 45 in backward take as long as the
memory traffic. Hence 16-bit types, which do not show an error of 1e-7, get an erf with half the instructions of tl.erf.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tempo_kernels.kernel_numbers import clamp, invert


@triton.jit
def normal_cdf(x, IS_NARROW: tl.constexpr):
    """Computes the standard normal distribution function; for 16-bit types by Abramowitz and Stegun 7.1.26, with an
    error of 8e-8, in half the instructions of tl.erf."""
    if IS_NARROW:
        t = invert(1.0 + 0.231641888 * tl.abs(x))
        tail = 0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)
        tail = t * (0.127414796 + t * (-0.142248368 + t * tail)) * tl.exp2(-0.7213475204 * x * x)
        return tl.where(x < 0.0, tail, 1.0 - tail)
    return 0.5 + 0.5 * tl.erf(0.7071067812 * x)


@triton.jit
def normal_tail(x):
    """Computes the probability that a standard normal variable exceeds x in [0, 14], as 2 to the power of a polynomial.
    The relative error is 6e-5 up to x = 5.6, a quarter of float16's rounding; beyond, 0.02 of less than 1e-8."""
    power = (3.636025576e-05 - 7.946160281e-07 * x) * x - 0.0006939099985
    power = ((power * x + 0.007419955917) * x - 0.05140890926) * x - 0.4613083899
    return tl.exp2((power * x - 1.150054693) * x - 1.00007987)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, IS_NARROW: tl.constexpr):
    """Computes the activation of x. Far left of 0 the exponential is infinite and the gate, its reciprocal, is 0."""
    if ACTIVATION == "silu":
        value = x * invert(1.0 + tl.exp2(-1.442695041 * x))
    elif ACTIVATION == "gelu":
        if IS_NARROW:
            size = tl.minimum(tl.abs(x), 14.0)
            value = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - size * normal_tail(size)
        else:
            value = x * normal_cdf(x, IS_NARROW)
    elif ACTIVATION == "gelu_tanh":
        # The sigmoid of 2 sqrt(2 / pi) (x + 0.044715 x**3).
        value = x * invert(1.0 + tl.exp2(x * (-2.302208198 - 0.1029432397 * x * x)))
    else:
        value, _ = differentiate(x, ACTIVATION, IS_NARROW)
    return value


@triton.jit
def differentiate(x, ACTIVATION: tl.constexpr, IS_NARROW: tl.constexpr):
    """Computes the activation of x and its derivative, which share their exponential; the compiler drops unused ones.

    Where a factor of the derivative would overflow, x is clamped to a point beyond which both equal relu's in float32.
    """
    if ACTIVATION == "silu":
        near = clamp(x, 87.0)
        power = tl.exp2(-1.442695041 * near)
        gate = invert(1.0 + power)
        rest = power * gate
        value, slope = tl.maximum(x, near) * gate, gate + gate * (near * rest)
    elif ACTIVATION == "gelu":
        gate = normal_cdf(x, IS_NARROW)
        value, slope = x * gate, gate + x * 0.3989422804 * tl.exp2(-0.7213475204 * x * x)
    elif ACTIVATION == "gelu_tanh":
        near = clamp(x, 10.0)
        square = near * near
        power = tl.exp2(near * (-2.302208198 - 0.1029432397 * square))
        gate = invert(1.0 + power)
        rest = power * gate
        value, slope = tl.maximum(x, near) * gate, gate + gate * (rest * near * (1.595769122 + 0.2140644488 * square))
    elif ACTIVATION == "mish":
        # x tanh(log(1 + e**x)) = x n / (n + 2) with n = e**x (e**x + 2) (Misra, "Mish", 2019).
        near = tl.minimum(x, 20.0, propagate_nan=tl.PropagateNan.ALL)
        power = tl.exp2(1.442695041 * near)
        squares = power * (power + 2.0)
        inverse = invert(squares + 2.0)
        gate = squares * inverse
        value, slope = x * gate, gate + near * (4.0 * power * (power + 1.0) * inverse * inverse)
    elif ACTIVATION == "squared_relu":
        rectified = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        value, slope = rectified * rectified, 2.0 * rectified
    else:
        tl.static_assert(ACTIVATION == "relu")
        value, slope = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL), tl.where(x > 0.0, 1.0, 0.0)
    return value, slope


@triton.jit
def differentiate_output(y, is_left, ACTIVATION: tl.constexpr, IS_NARROW: tl.constexpr, bounds, p, q):
    """Computes f'(x) from y = f(x), which has the dtype of the tensor. The sign bit of is_left, an int32, is set left
    of f's minimum; for bounds, p and q see `get_coefficients` in inverse.py."""
    if ACTIVATION == "squared_relu":
        # 2 r for y = r**2; the rounded root is r again, see activations.py. For a 16-bit y an approximate float32 root
        # suffices, because the rounding hides its error.
        slope = 2.0 * tl.sqrt(y.to(tl.float32)).to(y.dtype).to(tl.float32) if IS_NARROW else 2.0 * tl.sqrt_rn(y)
    else:
        tl.static_assert(ACTIVATION == "gelu" or ACTIVATION == "gelu_tanh")
        # y - y_min is exact near the minimum, and y_min_low holds the digits that y_min lacks in float32: GELU' is a
        # square root of the difference there, which amplifies any error. NaN stays NaN.
        square = tl.maximum(y.to(tl.float32) - bounds[0], bounds[1], propagate_nan=tl.PropagateNan.ALL)
        square = tl.minimum(square, bounds[2], propagate_nan=tl.PropagateNan.ALL) - bounds[1]
        # The root gets the branch's sign bit without a comparison. Below, s (s + root_zero) = square + root_zero s.
        s = (tl.sqrt(square).to(tl.int32, bitcast=True) | (is_left & -0x80000000)).to(tl.float32, bitcast=True)
        slope = _evaluate(s, p) * invert(_evaluate(s, q)) * (square + bounds[3] * s)
    return slope


@triton.jit
def _evaluate(s, coefficients):
    """Evaluates the polynomial with these coefficients, highest power first, by Horner's scheme."""
    value = coefficients[0] * s + coefficients[1]
    for index in tl.static_range(2, len(coefficients)):
        value = value * s + coefficients[index]
    return value

"""Derives GELU'(x) from y = GELU(x) and one bit: formula, coefficients and measured error.

GELU falls from 0 to its minimum at x_min and then rises, so y and the bit x >= x_min determine x. At the minimum GELU'
is a square root of y, but it is smooth in the signed root

    s = sign(x - x_min) sqrt(y - minimum),

in which both branches are one analytic function. It is 0 at s = 0 (the minimum) and s = -root_zero (x -> -inf), so

    GELU'(x(y)) = s (s + root_zero) P(s) / Q(s)        for y up to Y_MAX, constant beyond,

with one pair of polynomials for both branches. A quotient follows the logarithmic singularity of the left tail; a
polynomial of degree 14, on that branch alone, is still off by 1e-4. Rounding y to float16 or bfloat16 moves GELU' by up
to 7e-3 or 1.6e-2, so for these the kernels use shorter polynomials, off by up to 4.0e-4 and 1.4e-3. `benchmarks/
gelu_inverse_fit.py` fits P and Q and prints them with their error.

Why not hide the bit in the lowest mantissa bit of negative outputs, where it would be free? The changed y makes GELU'
1.9 (float32) and 1.6 (bfloat16) times as wrong as an exact inverse, and still 1.5 and 1.2 times with the best possible
decoder (benchmarks/gelu_branch_bit.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Y_MAX = 5.0
"""GELU' is taken as 1 from here on; GELU'(5) - 1 is 7.1e-6 in the erf form and 1.5e-6 in the tanh form."""


@dataclass(frozen=True)
class Inverse:
    """The constants of one form of GELU. y_min, root_zero, P and Q are float32 values, written with 9 digits."""

    x_min: float
    y_min: float
    """The minimum, rounded to float32."""
    y_min_low: float
    """The minimum less y_min."""
    root_zero: float
    """abs(s) at y = 0."""
    numerator: tuple[float, ...]
    """P, highest power first."""
    denominator: tuple[float, ...]
    """Q, highest power first."""
    fit_error: float
    """Largest error of GELU' over x in [-9, 5] from an exact y, evaluated in float32."""


INVERSES = {
    "none": Inverse(
        x_min=-0.7517915246935645,
        y_min=-0.16997121274471283,
        y_min_low=5.264809199712062e-09,
        root_zero=0.41227564215660095,
        numerator=(0.491414696, -2.34002137, 3.41920209, 3.41691446, -11.3329544, 1.53296196, 8.12848282, 2.25303483),
        denominator=(
            0.25895381,
            -0.703229308,
            0.830524087,
            -0.718690932,
            2.19226146,
            -2.16036487,
            -3.07136464,
            4.90796423,
            4.74138832,
            1,
        ),
        fit_error=2.6439058547209245e-05,
    ),
    "tanh": Inverse(
        x_min=-0.7524614220710163,
        y_min=-0.17004075646400452,
        y_min_low=5.892750482017206e-09,
        root_zero=0.41235998272895813,
        numerator=(0.676378489, -3.85732126, 7.77958488, -0.753584862, -12.9173927, 4.62307787, 9.22961712, 2.24981594),
        denominator=(
            0.238897339,
            -0.541143656,
            0.336012751,
            -0.00774459541,
            2.49771404,
            -4.22594213,
            -2.16018963,
            6.8198185,
            5.23280048,
            1,
        ),
        fit_error=2.7783289931804234e-05,
    ),
}

SHORT_INVERSES = {
    ("none", torch.bfloat16): replace(
        INVERSES["none"],
        numerator=(-0.300598234, 2.02764559, -3.62606621, 0.989071727, 2.25113845),
        denominator=(0.164392546, -0.000391334295, -0.00371176191, -0.962971747, 1.55462301, 1),
        fit_error=0.0012595698415218681,
    ),
    ("none", torch.float16): replace(
        INVERSES["none"],
        numerator=(0.106912591, -1.15343332, 4.22156334, -5.81428432, 1.40132046, 2.25347447),
        denominator=(-0.0802057087, 0.465738386, -1.0126797, 1.30438995, -0.372259945, -1.73961496, 1.76171839, 1),
        fit_error=0.0003282757439127667,
    ),
    ("tanh", torch.bfloat16): replace(
        INVERSES["tanh"],
        numerator=(-0.331781417, 2.20365453, -4.02266932, 1.31447673, 2.24966192),
        denominator=(0.126332924, 0.105158046, -0.109893709, -0.973491609, 1.6987499, 1),
        fit_error=0.0013575724861873972,
    ),
    ("tanh", torch.float16): replace(
        INVERSES["tanh"],
        numerator=(0.0970833302, -1.16100156, 4.30087614, -5.90337276, 1.39348042, 2.25014734),
        denominator=(-0.100943714, 0.527285159, -1.09838259, 1.35022175, -0.355267346, -1.80293918, 1.75750792, 1),
        fit_error=0.00039555051233798773,
    ),
}
"""What the kernels take for a 16-bit y, whose rounding costs more than these do."""


def gelu_float64(x: Tensor, approximate: str) -> Tensor:
    """Computes GELU(x) in float64, with small relative error in the left tail too."""
    return x * _evaluate_gate(x, approximate)[0]


def gelu_derivative_float64(x: Tensor, approximate: str) -> Tensor:
    """Computes GELU'(x) in float64."""
    gate, slope = _evaluate_gate(x, approximate)
    return gate + x * slope


def _evaluate_gate(x: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """Returns GELU(x) / x and its derivative."""
    if approximate == "none":
        return torch.special.ndtr(x), torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    scale = 2 * math.sqrt(2 / math.pi)
    gate = torch.sigmoid(scale * (x + 0.044715 * x**3))
    return gate, gate * (1 - gate) * scale * (1 + 3 * 0.044715 * x * x)


def evaluate(inverse: Inverse, s: Tensor) -> Tensor:
    """Evaluates the formula in the dtype of s."""
    p, q = torch.zeros_like(s), torch.zeros_like(s)
    for coefficient in inverse.numerator:
        p = p * s + coefficient
    for coefficient in inverse.denominator:
        q = q * s + coefficient
    return p / q * s * (s + inverse.root_zero)


def derivative_float64(y: Tensor, is_right: Tensor, approximate: str) -> Tensor:
    """Finds GELU'(x(y)) by bisection in float64: exact away from the minimum. is_right is the bit x >= x_min."""
    x_min = torch.full_like(y, INVERSES[approximate].x_min)
    y_inside = y.clamp(max=40.0)  # GELU is the identity to float64 from here on, and 0 left of -40
    low = torch.where(is_right, x_min, -40.0)
    high = torch.where(is_right, y_inside.clamp(min=0.0) + 0.2, x_min)
    for _ in range(64):
        middle = 0.5 * (low + high)
        is_low = (gelu_float64(middle, approximate) < y_inside) == is_right
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    return gelu_derivative_float64(0.5 * (low + high), approximate).where(~y.isnan(), y)


def interpolate_float64(s: Tensor, approximate: str) -> Tensor:
    """Finds GELU' at the signed root s in float64 to 1e-8, between 2**16 points of GELU."""
    inverse = INVERSES[approximate]
    x = torch.linspace(-12.0, 9.0, 1 << 16, dtype=torch.float64, device=s.device)
    above = gelu_float64(x, approximate) - (inverse.y_min + inverse.y_min_low)
    roots, slopes = above.clamp_(min=0.0).sqrt_() * (x - inverse.x_min).sign(), gelu_derivative_float64(x, approximate)
    right = torch.searchsorted(roots, s).clamp_(1, len(roots) - 1)
    low, high = roots[right - 1], roots[right]
    share = ((s - low) / (high - low)).clamp_(0.0, 1.0).nan_to_num_(0.0)  # left of -9 roots do not differ any more
    return torch.lerp(slopes[right - 1], slopes[right], share)

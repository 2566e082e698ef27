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
    "gelu": Inverse(
        x_min=-0.7517915246935645,
        y_min=-0.16997121274471283,
        y_min_low=5.264809199712062e-09,
        root_zero=0.41227564215660095,
        numerator=(0.491414696, -2.34002137, 3.41920209, 3.41691446, -11.3329544, 1.53296196, 8.12848282, 2.25303483),
        denominator=(
            0.25895381, -0.703229308, 0.830524087, -0.718690932, 2.19226146, -2.16036487, -3.07136464, 4.90796423,
            4.74138832, 1,
        ),
        fit_error=2.6439058547209245e-05,
    ),
    "gelu_tanh": Inverse(
        x_min=-0.7524614220710163,
        y_min=-0.17004075646400452,
        y_min_low=5.892750482017206e-09,
        root_zero=0.41235998272895813,
        numerator=(0.676378489, -3.85732126, 7.77958488, -0.753584862, -12.9173927, 4.62307787, 9.22961712, 2.24981594),
        denominator=(
            0.238897339, -0.541143656, 0.336012751, -0.00774459541, 2.49771404, -4.22594213, -2.16018963, 6.8198185,
            5.23280048, 1,
        ),
        fit_error=2.7783289931804234e-05,
    ),
}  # fmt: skip

SHORT_INVERSES = {
    ("gelu", torch.bfloat16): replace(
        INVERSES["gelu"],
        numerator=(-0.300598234, 2.02764559, -3.62606621, 0.989071727, 2.25113845),
        denominator=(0.164392546, -0.000391334295, -0.00371176191, -0.962971747, 1.55462301, 1),
        fit_error=0.0012595698415218681,
    ),
    ("gelu", torch.float16): replace(
        INVERSES["gelu"],
        numerator=(0.106912591, -1.15343332, 4.22156334, -5.81428432, 1.40132046, 2.25347447),
        denominator=(-0.0802057087, 0.465738386, -1.0126797, 1.30438995, -0.372259945, -1.73961496, 1.76171839, 1),
        fit_error=0.0003282757439127667,
    ),
    ("gelu_tanh", torch.bfloat16): replace(
        INVERSES["gelu_tanh"],
        numerator=(-0.331781417, 2.20365453, -4.02266932, 1.31447673, 2.24966192),
        denominator=(0.126332924, 0.105158046, -0.109893709, -0.973491609, 1.6987499, 1),
        fit_error=0.0013575724861873972,
    ),
    ("gelu_tanh", torch.float16): replace(
        INVERSES["gelu_tanh"],
        numerator=(0.0970833302, -1.16100156, 4.30087614, -5.90337276, 1.39348042, 2.25014734),
        denominator=(-0.100943714, 0.527285159, -1.09838259, 1.35022175, -0.355267346, -1.80293918, 1.75750792, 1),
        fit_error=0.00039555051233798773,
    ),
}
"""What the kernels take for a 16-bit y, whose rounding costs more than these do."""


def get_coefficients(activation: str, dtype: torch.dtype) -> tuple[tuple[float, ...], ...]:
    """Returns what a kernel takes for a y of `dtype`: (y_min, y_min_low, Y_MAX - y_min, root_zero), P and Q."""
    inverse = INVERSES[activation] if dtype == torch.float32 else SHORT_INVERSES[activation, dtype]
    # No 16-bit y is so close to the minimum that digits of y_min beyond float32 would matter.
    y_min_low = inverse.y_min_low if dtype == torch.float32 else 0.0
    bounds = (inverse.y_min, y_min_low, Y_MAX - inverse.y_min, inverse.root_zero)
    return bounds, inverse.numerator, inverse.denominator


def gelu_float64(x: Tensor, activation: str) -> Tensor:
    """Computes GELU(x) in float64, with small relative error in the left tail too."""
    return x * _compute_gate(x, activation)[0]


def gelu_derivative_float64(x: Tensor, activation: str) -> Tensor:
    """Computes GELU'(x) in float64."""
    gate, slope = _compute_gate(x, activation)
    return gate + x * slope


def _compute_gate(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Returns GELU(x) / x and its derivative."""
    if activation == "gelu":
        return torch.special.ndtr(x), torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    scale = 2 * math.sqrt(2 / math.pi)
    gate = torch.sigmoid(scale * (x + 0.044715 * x**3))
    return gate, gate * (1 - gate) * scale * (1 + 3 * 0.044715 * x * x)


def compute_gelu_slope(y: Tensor, sign: Tensor | None, activation: str) -> Tensor:
    """Computes GELU'(x(y)) in float32, in float64 for float64; sign is 1 where x >= x_min and -1 elsewhere."""
    assert sign is not None
    if y.dtype == torch.float64:
        return derivative_float64(y, sign > 0, activation)
    return compute_slope_by(INVERSES[activation], y, sign)


def compute_slope_by(inverse: Inverse, y: Tensor, sign: Tensor) -> Tensor:
    """Computes GELU'(x(y)) in float32."""
    above = y.float() - inverse.y_min  # exact near the minimum, where it matters
    square = above.clamp_(inverse.y_min_low, Y_MAX - inverse.y_min).sub_(inverse.y_min_low)
    return evaluate(inverse, square.sqrt_().mul_(sign))


def evaluate(inverse: Inverse, s: Tensor) -> Tensor:
    """Evaluates the formula in the dtype of s."""
    p, q = (_evaluate_polynomial(coefficients, s) for coefficients in (inverse.numerator, inverse.denominator))
    return p.div_(q).mul_(s).mul_(s + inverse.root_zero)


def _evaluate_polynomial(coefficients: tuple[float, ...], s: Tensor) -> Tensor:
    """Evaluates the polynomial with these coefficients, highest power first, by Horner's scheme."""
    constants = [torch.full((), coefficient, dtype=s.dtype, device=s.device) for coefficient in coefficients[1:]]
    value = torch.add(constants[0], s, alpha=coefficients[0])
    for constant in constants[1:]:
        torch.addcmul(constant, value, s, out=value)
    return value


def derivative_float64(y: Tensor, is_right: Tensor, activation: str) -> Tensor:
    """Finds GELU'(x(y)) by bisection in float64: exact away from the minimum. is_right is the bit x >= x_min."""
    x_min = torch.full_like(y, INVERSES[activation].x_min)
    y_inside = y.clamp(max=40.0)  # GELU is the identity to float64 from here on, and 0 left of -40
    low = torch.where(is_right, x_min, -40.0)
    high = torch.where(is_right, y_inside.clamp(min=0.0) + 0.2, x_min)
    for _ in range(64):
        middle = 0.5 * (low + high)
        is_low = (gelu_float64(middle, activation) < y_inside) == is_right
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    return gelu_derivative_float64(0.5 * (low + high), activation).where(~y.isnan(), y)

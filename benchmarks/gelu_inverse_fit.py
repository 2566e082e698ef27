"""Fits the polynomials P and Q of tempo_kernels/activation/inverse.py, and prints them with their error.

python benchmarks/gelu_inverse_fit.py       # a minute
"""

from __future__ import annotations

import math
from dataclasses import fields, replace

import torch

from tempo_kernels.activation.inverse import Inverse, evaluate, gelu_derivative_float64, gelu_float64

DEGREES = ((7, 9), (4, 5), (5, 7))
"""Of P and Q for float32, bfloat16 and float16: rounding a 16-bit y costs more than the shorter polynomials do."""


def fit(activation: str, numerator_degree: int = 7, denominator_degree: int = 9, rounds: int = 300) -> Inverse:
    """Fits P and Q so that the largest weighted error is smallest, by iteratively reweighted linear least squares."""
    x_min, minimum = _find_minimum(activation)
    root_zero = math.sqrt(-minimum)
    # Chebyshev points of [-9, 5], except where y - minimum has lost its digits; the function is smooth there anyway.
    x = -2 - 7 * torch.cos(torch.linspace(0, math.pi, 3000, dtype=torch.float64))
    x = x[(x - x_min).abs() > 0.01]
    y, target = gelu_float64(x, activation), gelu_derivative_float64(x, activation)
    s = torch.sign(x - x_min) * torch.sqrt(y - minimum)
    factor = s * torch.where(s < 0, -y / (root_zero - s), s + root_zero)
    # The middle counts more: most inputs lie there, and around the minimum the rounding of y already costs accuracy.
    # The end counts most, because the derivative is set to the constant 1 beyond it.
    weight = 1 + 3 * torch.exp(-((x / 1.5) ** 2))
    target[-1], weight[-1] = 1.0, 50.0

    powers = s[:, None] ** torch.arange(max(numerator_degree, denominator_degree) + 1, dtype=torch.int64)
    p_powers, q_powers = powers[:, : numerator_degree + 1], powers[:, 1 : denominator_degree + 1]
    matrix = torch.cat([factor[:, None] * p_powers, -target[:, None] * q_powers], dim=1)
    emphasis, q, best, smallest = torch.ones_like(s), torch.ones_like(s), s.new_zeros(matrix.shape[1]), math.inf
    for _ in range(rounds):
        scale = (weight * emphasis.sqrt() / q.abs())[:, None]
        norms = (matrix * scale).norm(dim=0)
        solution = (
            torch.linalg.lstsq(matrix * scale / norms, target[:, None] * scale, driver="gelsd").solution[:, 0] / norms
        )
        q = 1 + q_powers @ solution[numerator_degree + 1 :]
        error = weight * (factor * (p_powers @ solution[: numerator_degree + 1]) / q - target).abs()
        if q.min() > 0 and error.max() < smallest:
            best, smallest = solution, error.max().item()
        emphasis = emphasis * (error / error.max() + 1e-4)
        emphasis /= emphasis.mean()

    numerator, denominator = best[: numerator_degree + 1], torch.cat([best.new_ones(1), best[numerator_degree + 1 :]])
    inverse = Inverse(
        x_min=x_min,
        y_min=_round_to_float32(minimum),
        y_min_low=minimum - _round_to_float32(minimum),
        root_zero=_round_to_float32(root_zero),
        numerator=tuple(numerator.flip(0).float().tolist()),
        denominator=tuple(denominator.flip(0).float().tolist()),
        fit_error=math.inf,
    )
    return replace(inverse, fit_error=(evaluate(inverse, s.float()).double() - target).abs().max().item())


def _find_minimum(activation: str) -> tuple[float, float]:
    """Returns x_min and GELU(x_min)."""
    low, high = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-0.5], dtype=torch.float64)
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if gelu_derivative_float64(middle, activation).item() < 0 else (low, middle)
    return low.item(), gelu_float64(low, activation).item()


def _round_to_float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def main() -> None:
    """Prints INVERSES and SHORT_INVERSES with P and Q from a fresh fit."""
    for activation in ("gelu", "gelu_tanh"):
        for degrees in DEGREES:
            inverse = fit(activation, *degrees)
            print(f'    "{activation}", P of degree {degrees[0]} and Q of degree {degrees[1]}: Inverse(')
            for field in fields(inverse):
                value = getattr(inverse, field.name)
                digits = [f"{number:.9g}" for number in value] if isinstance(value, tuple) else []
                print(f"        {field.name}={'(' + ', '.join(digits) + ')' if digits else repr(value)},")
            print("    ),")


if __name__ == "__main__":
    main()

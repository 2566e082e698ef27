"""Measures the error of GELU' if the branch bit were carried in the lowest mantissa bit of y instead of a packed bit.

Only negative outputs are ambiguous. Each is rounded to the nearest number whose lowest bit is the branch bit. The error
of GELU' is measured for an exact inverse, and for the best possible decoder, which returns the middle of all
derivatives that share a code. Both are compared with an exact inverse of a correctly rounded y.

python benchmarks/gelu_branch_bit.py       # appends to benchmarks/results/cpu/gelu_branch_bit.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from measurements import RESULTS, append_records, describe_cpu_run
from torch import Tensor

from tempo_kernels.activation import ACTIVATIONS
from tempo_kernels.activation.inverse import INVERSES, derivative_float64, gelu_derivative_float64, gelu_float64

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ALLOWED = 1.2
POINTS = 400_001


def measure() -> Iterator[dict[str, Any]]:
    """Yields one record per form and dtype."""
    for form in INVERSES:
        for dtype in DTYPES:
            yield {
                "form": "erf" if form == "gelu" else "tanh",
                "dtype": str(dtype).removeprefix("torch."),
                **_figures(form, dtype),
                **describe_cpu_run(),
            }


def _figures(form: str, dtype: torch.dtype) -> dict[str, float | bool]:
    """Measures errors over the negative inputs. A set bit may mean either branch; the better meaning counts."""
    x, x_min = _negative_inputs(form), INVERSES[form].x_min
    is_right, y, slope = x >= x_min, gelu_float64(x, form), gelu_derivative_float64(x, form)
    rounded = y.to(dtype)
    floor = _inverse_error(rounded, is_right, slope, form)
    marked = [_nearest_with_lowest_bit(y, bit, dtype) for bit in (is_right, ~is_right)]
    inverse_error = min(_inverse_error(code, is_right, slope, form) for code in marked)
    best_error = min(_smallest_error(code, is_right, slope) for code in marked)
    y_error = max((code.double() - y).abs().max().item() for code in marked)
    of_torch = (ACTIVATIONS[form].value(x.to(dtype)).double() - gelu_float64(x.to(dtype).double(), form)).abs().max()
    y_limit = 2 * of_torch.item() + _ulp(y, dtype).max().item()
    normal = y.abs() >= torch.finfo(dtype).smallest_normal
    return {
        "y_max_error": y_error,
        "y_max_error_allowed": y_limit,
        "y_max_ulp_rounded": _largest_ulp_error(rounded[normal], y[normal]),
        "y_max_ulp": max(_largest_ulp_error(code[normal], y[normal]) for code in marked),
        "slope_error_floor": floor,
        "slope_error_exact_inverse": inverse_error,
        "slope_error_best_decoder": best_error,
        "meets_both_contracts": y_error <= y_limit and inverse_error <= ALLOWED * floor,
        "best_decoder_would": y_error <= y_limit and best_error <= ALLOWED * floor,
    }


def _negative_inputs(form: str) -> Tensor:
    """Returns points of [-8, 0), dense around the minimum, in float64."""
    x_min = INVERSES[form].x_min
    near = [x_min + torch.linspace(-r, r, POINTS, dtype=torch.float64) for r in (0.12, 1e-3)]
    return torch.cat([torch.linspace(-8, -1e-6, POINTS, dtype=torch.float64), *near])


def _nearest_with_lowest_bit(y: Tensor, bit: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the number of dtype nearest to y among those whose pattern ends in bit: at most one ulp away."""
    rounded = y.to(dtype)
    pattern = rounded.view(torch.int32 if dtype.itemsize == 4 else torch.int16)
    outwards = torch.where(y.abs() > rounded.double().abs(), 1, -1)
    return torch.where((pattern & 1) == bit, pattern, pattern + outwards).to(pattern.dtype).view(dtype)


def _inverse_error(y: Tensor, is_right: Tensor, slope: Tensor, form: str) -> float:
    return (derivative_float64(y.double(), is_right, form) - slope).abs().max().item()


def _smallest_error(y: Tensor, is_right: Tensor, slope: Tensor) -> float:
    """Returns half of the widest range of derivatives that one code of one branch stands for."""
    errors = []
    for side in (is_right, ~is_right):
        codes, place = y[side].double().unique(return_inverse=True)
        lowest, highest = (
            torch.zeros_like(codes).scatter_reduce_(0, place, slope[side], reduce, include_self=False)
            for reduce in ("amin", "amax")
        )
        errors.append((highest - lowest).max().item() / 2)
    return max(errors)


def _largest_ulp_error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).abs() / _ulp(exact, found.dtype)).max().item()


def _ulp(y: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ldexp(torch.full_like(y, torch.finfo(dtype).eps), torch.frexp(y).exponent - 1)


def main() -> None:
    for record in measure():
        append_records(RESULTS / "cpu" / "gelu_branch_bit.jsonl", [record])
        print(json.dumps(record))


if __name__ == "__main__":
    main()

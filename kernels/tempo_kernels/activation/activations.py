"""Activations of one number and their derivatives, in plain torch: the table that kernel_activations.py reproduces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tempo_kernels.activation.inverse import INVERSES, compute_gelu_slope


class Activation(NamedTuple):
    """An activation f. Each of its functions computes in the dtype of its arguments, 16-bit types with one rounding."""

    value: Callable[..., Tensor]
    """value(x, out=None): f(x), written to `out` where that is given."""
    grad_x: Callable[[Tensor, Tensor], Tensor]
    """grad_x(grad_y, x): grad_y f'(x)."""
    rounds_sum: bool = True
    """Whether x + bias is rounded to the dtype of x before f, as torch rounds it. Megatron's fused GELU does not."""
    slope_of_output: Callable[[Tensor, Tensor | None], Tensor] | None = None
    """slope_of_output(y, sign): f'(x) from y = f(x), at least in float32; None where the output does not determine it.
    sign is 1 where x >= x_min and -1 elsewhere."""
    x_min: float | None = None
    """Where f has its minimum, on both sides of which it has the same values: in place keeps a bit per element, which
    says on which side x is. None where f never falls."""


def _square_relu(x: Tensor, out: Tensor | None = None) -> Tensor:
    rectified = torch.clamp_min(x, 0, out=out)
    return torch.mul(rectified, rectified, out=out)


def _differentiate_square_relu(grad_y: Tensor, x: Tensor) -> Tensor:
    return torch.clamp_min(x, 0).mul_(2).mul_(grad_y)


def _compute_square_relu_slope(y: Tensor, sign: Tensor | None) -> Tensor:
    """Returns 2 r for y = r**2, rounded to y's dtype: r again.

    The rounded square is off by at most half an ulp of y. The root has slope 1 / (2 r), so its argument's error becomes
    at most 0.71 of half an ulp of r, and rounding gives r. Exceptions are values whose square leaves the range of the
    dtype: in float16 r is infinite from 256 on, has lost digits below 0.008 and all of them below 0.0002.
    """
    if y.dtype.itemsize == 2:
        return y.sqrt().mul_(2)
    # torch.sqrt of float32 is off by one ulp for 4 in a million numbers, and takes long where many are 0.
    return y.double().rsqrt().reciprocal().to(y.dtype).mul_(2)


_gelu_backward = torch.ops.aten.gelu_backward

ACTIVATIONS = {
    "silu": Activation(torch._C._nn.silu, torch.ops.aten.silu_backward),
    "gelu": Activation(
        F.gelu,
        _gelu_backward,
        slope_of_output=partial(compute_gelu_slope, activation="gelu"),
        x_min=INVERSES["gelu"].x_min,
    ),
    "gelu_tanh": Activation(
        partial(F.gelu, approximate="tanh"),
        partial(_gelu_backward, approximate="tanh"),
        rounds_sum=False,
        slope_of_output=partial(compute_gelu_slope, activation="gelu_tanh"),
        x_min=INVERSES["gelu_tanh"].x_min,
    ),
    "mish": Activation(torch._C._nn.mish, torch.ops.aten.mish_backward),
    "relu": Activation(
        partial(torch.clamp_min, min=0), lambda grad_y, x: torch.ops.aten.threshold_backward(grad_y, x, 0)
    ),
    "squared_relu": Activation(_square_relu, _differentiate_square_relu, slope_of_output=_compute_square_relu_slope),
}

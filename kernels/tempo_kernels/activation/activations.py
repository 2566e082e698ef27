"""Activations of one number and their derivatives, in plain torch: the table that kernel_activations.py reproduces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tempo_kernels.activation.inverse import INVERSES, compute_gelu_slope


class Activation(NamedTuple):
    """An activation f. Each of its functions computes in the dtype of its arguments, 16-bit types with one rounding."""

    value: Callable[..., Tensor]
    """value(x, out=None): f(x), written to `out` where that is given."""
    grad_x: Callable[..., Tensor]
    """grad_x(grad_y, x, out=None): grad_y f'(x), written to `out`, which may be x, where that is given."""
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


def _differentiate_square_relu(grad_y: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    rectified = torch.clamp_min(x, 0, out=out)
    # 2 r grad_y in one pass with one rounding; adding -0 leaves every number as it is, where 0 would change -0.
    zero = torch.full((), -0.0, dtype=x.dtype, device=x.device)
    return torch.addcmul(zero, rectified, grad_y, value=2, out=rectified)


def _compute_square_relu_slope(y: Tensor, sign: Tensor | None) -> Tensor:
    """Returns 2 r for y = r**2, rounded to y's dtype: r again.

    The rounded square is off by at most half an ulp of y. The root has slope 1 / (2 r), so its argument's error becomes
    at most 0.71 of half an ulp of r, and rounding gives r. Exceptions are values whose square leaves the range of the
    dtype: in float16 r is infinite from 256 on, has lost digits below 0.008 and all of them below 0.0002.
    """
    if y.dtype.itemsize == 2 or torch.compiler.is_compiling():  # a compiled root is the processor's, rounded correctly
        return y.sqrt().mul_(2)
    # torch.sqrt of float32 is off by one ulp for 4 in a million numbers, and takes long where many are 0.
    return y.double().rsqrt().reciprocal().to(y.dtype).mul_(2)


def _differentiate(function: Any, *numbers: Any, **names: Any) -> Callable[..., Tensor]:
    """Makes a derivative from an operator of torch, whose `out`, if it has one, is named grad_input."""

    def grad_x(grad_y: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        if out is not None and "grad_input" in function.overloads():
            return function.grad_input(grad_y, x, *numbers, **names, grad_input=out)  # type: ignore[no-any-return]
        found: Tensor = function(grad_y, x, *numbers, **names)
        return found if out is None else out.copy_(found)

    return grad_x


_aten = torch.ops.aten

ACTIVATIONS = {
    "silu": Activation(torch._C._nn.silu, _differentiate(_aten.silu_backward)),
    "gelu": Activation(
        F.gelu,
        _differentiate(_aten.gelu_backward),
        slope_of_output=partial(compute_gelu_slope, activation="gelu"),
        x_min=INVERSES["gelu"].x_min,
    ),
    "gelu_tanh": Activation(
        partial(F.gelu, approximate="tanh"),
        _differentiate(_aten.gelu_backward, approximate="tanh"),
        rounds_sum=False,
        slope_of_output=partial(compute_gelu_slope, activation="gelu_tanh"),
        x_min=INVERSES["gelu_tanh"].x_min,
    ),
    "mish": Activation(torch._C._nn.mish, _differentiate(_aten.mish_backward)),
    "relu": Activation(partial(torch.clamp_min, min=0), _differentiate(_aten.threshold_backward, 0)),
    "squared_relu": Activation(_square_relu, _differentiate_square_relu, slope_of_output=_compute_square_relu_slope),
}

"""Activations of one number and their derivatives, in plain torch: the table that kernel_activations.py reproduces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Activation(NamedTuple):
    """An activation f. Each of its functions computes in the dtype of its arguments, 16-bit types with one rounding."""

    value: Callable[..., Tensor]
    """value(x, out=None): f(x), written to `out` where that is given."""
    grad_x: Callable[..., Tensor]
    """grad_x(grad_y, x, out=None): grad_y f'(x), written to `out` where that is given."""
    rounds_sum: bool = True
    """Whether x + bias is rounded to the dtype of x before f, as torch rounds it. Megatron's fused GELU does not."""


def _square_relu(x: Tensor, out: Tensor | None = None) -> Tensor:
    rectified = torch.clamp_min(x, 0, out=out)
    return torch.mul(rectified, rectified, out=out)


def _differentiate_square_relu(grad_y: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    rectified = torch.clamp_min(x, 0, out=out)
    return double_product(rectified, grad_y, out=rectified)


def double_product(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """Computes 2 x y into out in one pass with one rounding."""
    # Adding -0 leaves every number as it is; adding 0 would turn -0 into 0.
    return torch.addcmul(torch.full((), -0.0, dtype=x.dtype, device=x.device), x, y, value=2, out=out)


def _differentiate(function: Any, *numbers: Any, **names: Any) -> Callable[..., Tensor]:
    """Makes a derivative from an operator of torch, which names its out argument grad_input."""

    def grad_x(grad_y: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            return function(grad_y, x, *numbers, **names)  # type: ignore[no-any-return]
        return function.grad_input(grad_y, x, *numbers, **names, grad_input=out)  # type: ignore[no-any-return]

    return grad_x


ACTIVATIONS = {
    "silu": Activation(torch._C._nn.silu, _differentiate(torch.ops.aten.silu_backward)),
    "gelu": Activation(F.gelu, _differentiate(torch.ops.aten.gelu_backward)),
    "gelu_tanh": Activation(
        partial(F.gelu, approximate="tanh"),
        _differentiate(torch.ops.aten.gelu_backward, approximate="tanh"),
        rounds_sum=False,
    ),
    "relu": Activation(partial(torch.clamp_min, min=0), _differentiate(torch.ops.aten.threshold_backward, 0)),
    "squared_relu": Activation(_square_relu, _differentiate_square_relu),
}

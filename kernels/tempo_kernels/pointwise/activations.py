"""Activations of one number and their derivatives, in plain torch: the table that kernel_activations.py reproduces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Activation(NamedTuple):
    """An activation f. Each of its functions computes in the dtype of its arguments, 16-bit types with one rounding."""

    value: Callable[..., Tensor]
    """value(x, out=None): f(x), written to `out` where that is given."""
    grad_x: Callable[[Tensor, Tensor], Tensor]
    """grad_y f'(x), of grad_y and x."""
    rounds_sum: bool = True
    """Whether x + bias is rounded to the dtype of x before f, as torch rounds it. Megatron's fused GELU does not."""


def _square_relu(x: Tensor, out: Tensor | None = None) -> Tensor:
    rectified = torch.clamp_min(x, 0, out=out)
    return torch.mul(rectified, rectified, out=out)


ACTIVATIONS = {
    "silu": Activation(torch._C._nn.silu, lambda grad_y, x: torch.ops.aten.silu_backward(grad_y, x)),
    "gelu": Activation(F.gelu, lambda grad_y, x: torch.ops.aten.gelu_backward(grad_y, x)),
    "gelu_tanh": Activation(
        partial(F.gelu, approximate="tanh"),
        lambda grad_y, x: torch.ops.aten.gelu_backward(grad_y, x, approximate="tanh"),
        rounds_sum=False,
    ),
    "relu": Activation(
        partial(torch.clamp_min, min=0), lambda grad_y, x: torch.ops.aten.threshold_backward(grad_y, x, 0)
    ),
    "squared_relu": Activation(_square_relu, lambda grad_y, x: x.clamp_min(0).mul_(2).mul_(grad_y)),
}

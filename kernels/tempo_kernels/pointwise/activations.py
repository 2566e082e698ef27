"""Activations of one number and their derivatives, in plain torch: the table that kernel_activations.py reproduces."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Activation(NamedTuple):
    """An activation f, of tensors in the dtype of computation."""

    value: Callable[[Tensor], Tensor]
    """f(x)."""
    grad_x: Callable[[Tensor, Tensor], Tensor]
    """grad_y f'(x), of grad_y and x."""


ACTIVATIONS = {
    "silu": Activation(F.silu, lambda grad_y, x: torch.ops.aten.silu_backward(grad_y, x)),
    "gelu": Activation(F.gelu, lambda grad_y, x: torch.ops.aten.gelu_backward(grad_y, x)),
    "gelu_tanh": Activation(
        lambda x: F.gelu(x, approximate="tanh"),
        lambda grad_y, x: torch.ops.aten.gelu_backward(grad_y, x, approximate="tanh"),
    ),
    "relu": Activation(F.relu, lambda grad_y, x: torch.ops.aten.threshold_backward(grad_y, x, 0)),
}

"""Specifies squared ReLU's gradient from its output in plain torch.

    y = r**2,  r = relu(x + bias)        grad_x = 2 r grad_y,  r = sqrt(y)

The root gives r back exactly. The rounded square is off by at most half an ulp of y. The root has slope 1 / (2 r), so
its argument's error becomes at most 0.71 of half an ulp of r, and rounding gives r again. Exceptions are values whose
square leaves the range of the dtype: in float16 r is infinite from 256 on, has lost digits below 0.008 and all of them
below 0.0002. Forward is in activation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tempo_kernels.activation import sum_rows


def backward(grad_y: Tensor, y: Tensor, has_grad_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Returns grad_x = 2 sqrt(y) grad_y, contiguous, and its sum over all dimensions but the last in float32 [f]."""
    grad_x = take_root(y).mul_(2).mul_(grad_y)
    return grad_x, sum_rows(grad_x) if has_grad_bias else None


def take_root(y: Tensor) -> Tensor:
    """Returns sqrt(y), correctly rounded, contiguous."""
    root = y.sqrt()
    if y.dtype.itemsize == 2:
        return root
    # torch's root may be off by one ulp: for 4 in a million float32 numbers it is.
    is_off = root * root != y
    for limit in (0.0, torch.inf):
        neighbour = root.nextafter(root.new_tensor(limit))
        root = torch.where(is_off & (neighbour * neighbour == y), neighbour, root)
    return root

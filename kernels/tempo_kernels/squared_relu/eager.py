"""Squared ReLU's derivative from its output in plain torch: the specification.

    y = r**2,  r = relu(x + bias)        grad_x = 2 r grad_y,  r = sqrt(y)

The root is exact. The rounded square is off by at most half the distance between its neighbours, and its root, by the
slope of the root, by at most 0.71 of half the distance between neighbours of r: rounded, it is r again. Only where r**2
leaves the range of its dtype it is not: r is then infinite (float16: from 256), or has lost digits (below 0.008) or all
of them (below 0.0002). y comes from pointwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tempo_kernels.pointwise import sum_rows


def backward(grad_y: Tensor, y: Tensor, has_grad_bias: bool) -> tuple[Tensor, Tensor | None]:
    """grad_x = 2 sqrt(y) grad_y, contiguous, and its sum over all dimensions but the last in float32 [f]."""
    grad_x = take_root(y).mul_(2).mul_(grad_y)
    return grad_x, sum_rows(grad_x) if has_grad_bias else None


def take_root(y: Tensor) -> Tensor:
    """sqrt(y), correctly rounded, contiguous."""
    root = y.sqrt()
    if y.dtype.itemsize == 2:
        return root
    # torch's root of a float32 or float64 may be the neighbour of the rounded one: 4 in a million float32 are.
    is_off = root * root != y
    for limit in (0.0, torch.inf):
        neighbour = root.nextafter(root.new_tensor(limit))
        root = torch.where(is_off & (neighbour * neighbour == y), neighbour, root)
    return root

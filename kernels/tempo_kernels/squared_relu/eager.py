"""relu(x + bias)**2 in plain torch: the specification.

    y = r**2,  r = relu(x + bias)        grad_x = 2 r grad_y,  r = sqrt(y)

The root is exact. The rounded square is off by at most half the distance between its neighbours, and its root, by the
slope of the root, by at most 0.71 of half the distance between neighbours of r: rounded, it is r again. Only where r**2
leaves the range of its dtype it is not: r is then infinite (float16: from 256), or has lost digits (below 0.008) or all
of them (below 0.0002).
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """y = relu(x + bias)**2, contiguous; the sum is rounded to x's dtype, as torch rounds it."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _rectified(x, bias, y)
    return torch.mul(y, y, out=y)


def backward(grad_y: Tensor, y: Tensor, has_grad_bias: bool) -> tuple[Tensor, Tensor | None]:
    """grad_x = 2 sqrt(y) grad_y, contiguous, and its sum over all dimensions but the last in float32 [f]."""
    return _gradients(_root(y), grad_y, has_grad_bias)


def backward_from_input(
    grad_y: Tensor, x: Tensor, bias: Tensor | None, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """grad_x = 2 relu(x + bias) grad_y, contiguous, and its sum likewise."""
    root = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rectified(x, bias, root)
    return _gradients(root, grad_y, has_grad_bias)


def _root(y: Tensor) -> Tensor:
    """sqrt(y), correctly rounded."""
    root = y.sqrt()
    if y.dtype != torch.float64:
        return root
    # Where its registers are 512 bits wide, torch's root of a float64 may be the neighbour of the rounded one.
    is_off = root * root != y
    for limit in (0.0, torch.inf):
        neighbour = root.nextafter(root.new_tensor(limit))
        root = torch.where(is_off & (neighbour * neighbour == y), neighbour, root)
    return root


def _rectified(x: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.clamp_min(x, 0, out=out)
    else:
        torch.add(x, bias, out=out).clamp_min_(0)


def _gradients(root: Tensor, grad_y: Tensor, has_grad_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Overwrites root."""
    grad_x = root.mul_(2).mul_(grad_y)
    if not has_grad_bias:
        return grad_x, None
    # A dimension more, since no dimensions at all would mean every one. torch adds up in float32, then rounds.
    total = grad_x.unsqueeze(0).sum(tuple(range(grad_x.dim())))
    return grad_x, total.to(torch.promote_types(grad_x.dtype, torch.float32))

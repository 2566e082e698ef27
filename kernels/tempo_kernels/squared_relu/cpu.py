"""Computes squared ReLU's gradient from its output on a CPU, where the cost is passes over memory; see eager.py.

torch's square root of a float32 y (Intel's vector library) takes ten times as long where many elements are 0, and is
not always correctly rounded. Zeros are therefore 1 while it is taken. From COMPILED_ELEMENTS on there is one
compiled pass, whose root is an instruction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tempo_kernels.activation import double_product, sum_rows
from tempo_kernels.compiled import Compiled, pays_for
from tempo_kernels.squared_relu.eager import take_root

COMPILED_ELEMENTS = 1 << 20
"""Elements of a tensor from which on one compilation, which takes seconds, is worth its time."""


def backward(grad_y: Tensor, y: Tensor, has_grad_bias: bool) -> tuple[Tensor, Tensor | None]:
    """As in eager.py."""
    if y.dtype == torch.float32 and pays_for(y, COMPILED_ELEMENTS):
        grad_x = _differentiate(grad_y.reshape(-1), y.view(-1)).view(y.shape)
    else:
        root = _take_root(y)
        grad_x = double_product(root, grad_y, out=root)
    return grad_x, sum_rows(grad_x) if has_grad_bias else None


def _take_root(y: Tensor) -> Tensor:
    """As take_root, whose corrections take only the few numbers that they concern."""
    if y.dtype.itemsize == 2 or type(y) is not Tensor:  # a fake tensor has no numbers
        return take_root(y)
    is_zero = torch.eq(y, 0, out=torch.empty_like(y))  # 1 or 0 in y's dtype, which takes one pass
    root = (y + is_zero).sqrt_().sub_(is_zero)
    off = (root * root != y).view(-1).nonzero().squeeze(1)
    root.view(-1).index_copy_(0, off, take_root(y.view(-1).index_select(0, off)))
    return root


@Compiled
def _differentiate(grad_y: Tensor, y: Tensor) -> Tensor:
    return y.sqrt() * 2 * grad_y

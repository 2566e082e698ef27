"""Specifies an activation of x + bias, differentiated from its input, in plain torch.

    y = f(x + bias)        grad_x = grad_y f'(x + bias)

If the activation's row of the table says so, x + bias is rounded to the dtype of x, as in the operation that it
replaces; otherwise the sum stays in float32 (float64 for float64). f and f' compute in the dtype of that sum.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tempo_kernels.activation.activations import ACTIVATIONS

_PLACES = (7, 6, 5, 4, 3, 2, 1, 0)


def forward(x: Tensor, bias: Tensor | None, activation: str, out: Tensor | None = None) -> Tensor:
    """Returns y = f(x + bias), contiguous, written to `out` if given; activation is a name in ACTIVATIONS."""
    y = ACTIVATIONS[activation].value(add_bias(x, bias, activation)).to(x.dtype)
    return y if out is None else out.copy_(y)


def forward_with_bits(x: Tensor, bias: Tensor | None, activation: str, threshold: float) -> tuple[Tensor, Tensor]:
    """Returns y and the bits x + bias >= threshold, eight to a byte, the first in the highest bit."""
    total = add_bias(x, bias, activation)
    flags = (total.flatten() >= smallest_at_least(threshold, total.dtype)).to(torch.uint8)
    eights = F.pad(flags, (0, -x.numel() % 8)).view(-1, 8)
    bits = (eights << eights.new_tensor(_PLACES)).sum(1, dtype=torch.uint8)
    return forward(x, bias, activation), bits


def unpack_bits(bits: Tensor, shape: torch.Size) -> Tensor:
    """Unpacks the bits to a bool tensor of this shape."""
    return (bits.unsqueeze(1) >> bits.new_tensor(_PLACES) & 1).flatten()[: shape.numel()].view(shape).bool()


def backward(
    grad_y: Tensor, x: Tensor, bias: Tensor | None, activation: str, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns grad_x = grad_y f'(x + bias), contiguous, and its sum over all dimensions but the last in float32 [f]."""
    total = add_bias(x, bias, activation)
    grad_x = ACTIVATIONS[activation].grad_x(grad_y.contiguous().to(total.dtype), total).to(x.dtype)
    return grad_x, sum_rows(grad_x) if has_grad_bias else None


def add_bias(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Returns x + bias, contiguous, in the dtype in which the activation takes it."""
    total = x.contiguous()
    return total if bias is None else total.to(find_sum_dtype(x, bias, activation)) + bias


def find_sum_dtype(x: Tensor, bias: Tensor | None, activation: str) -> torch.dtype:
    """Returns the dtype in which the activation takes x + bias."""
    rounds = bias is None or ACTIVATIONS[activation].rounds_sum
    return x.dtype if rounds else torch.promote_types(x.dtype, torch.float32)


def sum_rows(grad: Tensor) -> Tensor:
    """Sums over all dimensions but the last, to [f] in float32; torch would round the sum of a 16-bit type."""
    # unsqueeze: sum over an empty tuple of dimensions would sum over all of them.
    total = grad.unsqueeze(0).sum(tuple(range(grad.dim())))
    return total.to(torch.promote_types(grad.dtype, torch.float32))


def smallest_at_least(value: float, dtype: torch.dtype) -> float:
    """Returns the smallest number of dtype that is >= value, for a value in the dtype's normal range."""
    spacing = torch.finfo(dtype).eps * 2.0 ** (math.frexp(value)[1] - 1)
    return math.ceil(value / spacing) * spacing

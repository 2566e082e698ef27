"""GELU from its output and one bit, and from its input, in plain torch: the specification.

    y = GELU(x + bias),  bit = x + bias >= x_min        grad_x = grad_y GELU'(x(y)), by the formula of inverse.py

The sum x + bias is rounded as in the operations that this one replaces: to x's dtype in the erf form, which makes y
equal to F.gelu(x + bias) bit for bit; not in the tanh form, which is one fused kernel there. The derivative is computed
in float32, in float64 for float64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tempo_kernels.gelu.inverse import INVERSES, Y_MAX, derivative_float64, evaluate, smallest_at_least

_PLACES = (7, 6, 5, 4, 3, 2, 1, 0)


def forward(
    x: Tensor, bias: Tensor | None, approximate: str, has_bits: bool = True, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """y = GELU(x + bias), contiguous, and the bits x + bias >= x_min, eight to a byte, the first in the highest bit."""
    total = add_bias(x, bias, approximate)
    y = F.gelu(total, approximate=approximate).to(x.dtype)
    y = y if out is None else out.copy_(y)
    if not has_bits:
        return y, None
    is_right = total.flatten() >= smallest_at_least(INVERSES[approximate].x_min, total.dtype)
    eights = F.pad(is_right.to(torch.uint8), (0, -x.numel() % 8)).view(-1, 8)
    return y, (eights << eights.new_tensor(_PLACES)).sum(1, dtype=torch.uint8)


def backward(
    grad_y: Tensor, y: Tensor, bits: Tensor, approximate: str, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """grad_x = grad_y GELU'(x(y)), contiguous, and its sum over all dimensions but the last in float32 [f]."""
    is_right = (bits.unsqueeze(1) >> bits.new_tensor(_PLACES) & 1).flatten()[: y.numel()].view(y.shape).bool()
    if y.dtype == torch.float64:
        slope = derivative_float64(y, is_right, approximate)
    else:
        inverse = INVERSES[approximate]
        above = y.float() - inverse.y_min  # exact near the minimum, where it matters
        square = above.clamp(inverse.y_min_low, Y_MAX - inverse.y_min) - inverse.y_min_low
        slope = evaluate(inverse, torch.where(is_right, 1.0, -1.0).float() * square.sqrt())
    grad_x = (slope * grad_y).to(y.dtype).contiguous()
    return grad_x, sum_of_rows(grad_x) if has_grad_bias else None


def backward_from_input(
    grad_y: Tensor, x: Tensor, bias: Tensor | None, approximate: str, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """grad_x = grad_y GELU'(x + bias), contiguous, and its sum likewise; the sum of x and bias is that of forward."""
    total = add_bias(x, bias, approximate)
    grad_y = grad_y.contiguous().to(total.dtype)
    grad_x = torch.ops.aten.gelu_backward(grad_y, total, approximate=approximate).to(x.dtype)
    return grad_x, sum_of_rows(grad_x) if has_grad_bias else None


def add_bias(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """x + bias, contiguous, rounded to the dtype of sum_dtype."""
    total = x.contiguous()
    return total if bias is None else total.to(sum_dtype(x, bias, approximate)) + bias


def sum_dtype(x: Tensor, bias: Tensor | None, approximate: str) -> torch.dtype:
    """In which dtype x and bias are added."""
    is_fused = bias is not None and approximate == "tanh"
    return torch.promote_types(x.dtype, torch.float32) if is_fused else x.dtype


def sum_of_rows(grad: Tensor) -> Tensor:
    """[f] in float32; torch adds 16-bit types up in float32, but rounds the sum."""
    # A dimension more, since no dimensions at all would mean every one.
    total = grad.unsqueeze(0).sum(tuple(range(grad.dim())))
    return total.to(torch.promote_types(grad.dtype, torch.float32))

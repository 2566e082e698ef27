"""Specifies GELU's gradient from its output and one bit per element, in plain torch.

    y = GELU(x + bias),  bit = x + bias >= x_min        grad_x = grad_y GELU'(x(y)), by the formula of inverse.py

The derivative is computed in float32, in float64 for float64. y and the bits come from activation.forward_with_bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tempo_kernels.activation import sum_rows, unpack_bits
from tempo_kernels.gelu.inverse import INVERSES, Y_MAX, derivative_float64, evaluate


def backward(
    grad_y: Tensor, y: Tensor, bits: Tensor, approximate: str, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns grad_x = grad_y GELU'(x(y)), contiguous, and its sum over all dimensions but the last in float32 [f]."""
    is_right = unpack_bits(bits, y.shape)
    if y.dtype == torch.float64:
        slope = derivative_float64(y, is_right, approximate)
    else:
        inverse = INVERSES[approximate]
        above = y.float() - inverse.y_min  # exact near the minimum, where it matters
        square = above.clamp(inverse.y_min_low, Y_MAX - inverse.y_min) - inverse.y_min_low
        slope = evaluate(inverse, torch.where(is_right, 1.0, -1.0).float() * square.sqrt())
    grad_x = (slope * grad_y).to(y.dtype).contiguous()
    return grad_x, sum_rows(grad_x) if has_grad_bias else None

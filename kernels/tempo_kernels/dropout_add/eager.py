"""Specifies residual + dropout(x + bias) in plain torch.

    out = residual + keep * (x + bias) * scale       grad_x = keep * grad_out * scale,  grad_bias = sum of grad_x

keep is 0 or 1, drawn by position (see tempo_kernels.philox). scale is 1 / (1 - p), where p is the probability rounded
to 16 bits. Arithmetic is float32 (float64 for float64 inputs) with one rounding at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tempo_kernels.dropout_add.settings import Draw
from tempo_kernels.philox import drop_mask, effective_probability


def forward(x: Tensor, bias: Tensor | None, residual: Tensor | None, draw: Draw) -> Tensor:
    """Returns out [s, b, h], contiguous."""
    total = x.contiguous().to(torch.promote_types(x.dtype, torch.float32))
    out = _drop(total if bias is None else total + bias, draw)
    return (out if residual is None else residual + out).to(x.dtype)


def backward(
    grad_out: Tensor, draw: Draw, has_grad_bias: bool, sum_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None]:
    """Returns grad_x [s, b, h], contiguous, and its sum over s and b, [h], in sum_dtype; sum_dtype None is the dtype of
    the arithmetic."""
    grad_x = _drop(grad_out.contiguous().to(torch.promote_types(grad_out.dtype, torch.float32)), draw)
    return grad_x.to(grad_out.dtype), grad_x.sum((0, 1)).to(sum_dtype or grad_x.dtype) if has_grad_bias else None


def _drop(x: Tensor, draw: Draw) -> Tensor:
    """Returns x * scale where dropout keeps and 0 where it drops, even if x is NaN there."""
    if draw.p == 0:
        return x
    rows, samples = draw.place(x.size(0), x.size(1), x.device)
    dropped = drop_mask(
        int(draw.key) % 2**64,
        draw.p,
        sample=samples,
        head=torch.zeros((), dtype=torch.int64, device=x.device),
        row=rows,
        num_columns=x.size(-1),
        first_column=draw.first_column,
    )
    return (x / (1.0 - effective_probability(draw.p))).masked_fill(dropped, 0.0)

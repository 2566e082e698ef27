"""residual + dropout(x + bias) in plain torch: the specification.

Arithmetic is float32 (float64 for float64 inputs) with one rounding at the end. Work goes block by block of rows,
so that the random words, eight bytes each, stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tempo_kernels.philox import drop_mask, effective_probability

BLOCK_ELEMENTS = 1 << 17


def forward(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    key: int,
    first_sample: int,
    first_row: int,
) -> Tensor:
    """out [s, b, h] = residual + keep * (x + bias) / (1 - p)."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    scale = 1.0 / (1.0 - effective_probability(p))
    for rows, dropped in _masks(x, p, key, first_sample, first_row):
        # [rows, b, h]
        block = x[rows].to(compute_dtype, copy=bias is None)
        if bias is not None:
            block = block + bias
        block.masked_fill_(dropped, 0.0)
        if residual is None:
            torch.mul(block, scale, out=block)
        else:
            torch.add(residual[rows].to(compute_dtype), block, alpha=scale, out=block)
        out[rows] = block
    return out


def backward(
    grad_out: Tensor, p: float, key: int, first_sample: int, first_row: int, needs_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """grad_x [s, b, h] = keep * grad_out / (1 - p), and its sum over s and b in float32 [h]."""
    grad_x = torch.empty(grad_out.shape, dtype=grad_out.dtype, device=grad_out.device)
    compute_dtype = torch.promote_types(grad_out.dtype, torch.float32)
    grad_bias = torch.zeros(grad_out.size(-1), dtype=compute_dtype, device=grad_out.device) if needs_grad_bias else None
    scale = 1.0 / (1.0 - effective_probability(p))
    for rows, dropped in _masks(grad_out, p, key, first_sample, first_row):
        # [rows, b, h]
        block = grad_out[rows].to(compute_dtype) * scale
        block.masked_fill_(dropped, 0.0)
        grad_x[rows] = block
        if grad_bias is not None:
            grad_bias += block.sum((0, 1))
    return grad_x, grad_bias


def _masks(x: Tensor, p: float, key: int, first_sample: int, first_row: int) -> Iterator[tuple[slice, Tensor]]:
    """(rows, mask [rows, b, h]) for consecutive blocks of rows."""
    num_rows, batch, num_columns = x.shape
    sample = torch.arange(first_sample, first_sample + batch, device=x.device)
    head = torch.zeros((), dtype=torch.int64, device=x.device)
    step = max(1, BLOCK_ELEMENTS // max(1, batch * num_columns))
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        row = torch.arange(first_row + start, first_row + stop, device=x.device).unsqueeze(-1)
        yield slice(start, stop), drop_mask(key, p, sample=sample, head=head, row=row, num_columns=num_columns)

"""residual + dropout(x + bias) in plain torch: the specification.

Arithmetic is float32 (float64 for float64 inputs) with one rounding at the end. Work goes block by block of rows, so
that what is between an input and an output stays in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tempo_kernels.philox import drop_, effective_probability, keep_bits

BLOCK_ELEMENTS = 1 << 19  # a call of Philox has to be worth its overhead


def forward(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    key: int | Tensor,
    first_sample: int | Tensor,
    first_row: int,
) -> Tensor:
    """out [s, b, h] = residual + keep * (x + bias) / (1 - p)."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scale = 1.0 / (1.0 - effective_probability(p))
    for rows, block, bits in _blocks(out, p, key, first_sample, first_row):
        # [rows, b, h]
        block.copy_(x[rows])
        if bias is not None:
            block += bias
        if bits is not None:
            drop_(block, bits)
        if residual is None:
            torch.mul(block, scale, out=out[rows])
        else:
            torch.add(residual[rows], block, alpha=scale, out=out[rows])
    return out


def backward(
    grad_out: Tensor,
    p: float,
    key: int | Tensor,
    first_sample: int | Tensor,
    first_row: int,
    needs_grad_bias: bool,
) -> tuple[Tensor, Tensor | None]:
    """grad_x [s, b, h] = keep * grad_out / (1 - p), and its sum over s and b in float32 [h]."""
    grad_x = torch.empty(grad_out.shape, dtype=grad_out.dtype, device=grad_out.device)
    compute_dtype = torch.promote_types(grad_out.dtype, torch.float32)
    grad_bias = torch.zeros(grad_out.size(-1), dtype=compute_dtype, device=grad_out.device) if needs_grad_bias else None
    scale = 1.0 / (1.0 - effective_probability(p))
    for rows, block, bits in _blocks(grad_x, p, key, first_sample, first_row):
        # [rows, b, h]
        block.copy_(grad_out[rows]).mul_(scale)
        if bits is not None:
            drop_(block, bits)
        if block.dtype != grad_x.dtype:
            grad_x[rows] = block
        if grad_bias is not None:
            grad_bias += block.sum((0, 1))
    return grad_x, grad_bias


def _blocks(
    out: Tensor, p: float, key: int | Tensor, first_sample: int | Tensor, first_row: int
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Consecutive blocks of rows: where, memory [rows, b, h] to compute in, and what dropout keeps (None: all).

    The memory is that of out's rows themselves where its dtype is the one to compute in.
    """
    num_rows, batch, num_columns = out.shape
    step = max(1, BLOCK_ELEMENTS // max(1, batch * num_columns))
    compute_dtype = torch.promote_types(out.dtype, torch.float32)
    blocks = None
    if compute_dtype != out.dtype:
        blocks = torch.empty((min(step, num_rows), batch, num_columns), dtype=compute_dtype, device=out.device)
    key, first_sample = int(key) % 2**64, int(first_sample)
    sample = torch.arange(first_sample, first_sample + batch, dtype=torch.int64, device=out.device)
    head = torch.zeros((), dtype=torch.int64, device=out.device)
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        bits = None
        if p > 0:
            row = torch.arange(first_row + start, first_row + stop, dtype=torch.int64, device=out.device).unsqueeze(-1)
            bits = keep_bits(key, p, sample=sample, head=head, row=row, num_columns=num_columns)
        yield slice(start, stop), out[start:stop] if blocks is None else blocks[: stop - start], bits

"""Specifies residual + dropout(x + bias) in plain torch, by blocks of rows.

    out = residual + keep * (x + bias) * scale       grad_x = keep * grad_out * scale,  grad_bias = sum of grad_x

keep is 0 or 1, drawn by position (see tempo_kernels.philox). scale is 1 / (1 - p), where p is the probability rounded
to 16 bits. Arithmetic is float32 (float64 for float64 inputs) with one rounding at the end.

On a CPU the cost is passes over memory: a block's intermediate results stay in the cache, and a float32 output serves
as its own buffer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tempo_kernels.dropout_add.settings import Draw
from tempo_kernels.philox import drop_, effective_probability, keep_bits

BLOCK_ELEMENTS = 1 << 19  # large enough that a call of Philox is worth its overhead


def forward(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, draw: Draw, *, block_elements: int = BLOCK_ELEMENTS
) -> Tensor:
    """Returns out [s, b, h], contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scale = 1.0 / (1.0 - effective_probability(draw.p))
    if bias is not None:
        bias = bias.to(torch.promote_types(x.dtype, torch.float32))  # once, instead of with every block
    for rows, block, bits in _blocks(out, draw, block_elements):
        if bias is None:
            block.copy_(x[rows])
        elif x.dtype == block.dtype:
            torch.add(x[rows], bias, out=block)
        else:
            block.copy_(x[rows]).add_(bias)
        if bits is not None:
            drop_(block, bits)
        if residual is None:
            torch.mul(block, scale, out=out[rows])
        elif residual.dtype == block.dtype:
            torch.add(residual[rows], block, alpha=scale, out=out[rows])
        else:
            # Adding two dtypes is faster in torch when the result goes into the wider of the two tensors.
            out[rows] = block.mul_(scale).add_(residual[rows])
    return out


def backward(
    grad_out: Tensor, draw: Draw, has_grad_bias: bool, sum_dtype: torch.dtype | None = None, *,
    block_elements: int = BLOCK_ELEMENTS,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Returns grad_x [s, b, h], contiguous, and its sum over s and b, [h], in sum_dtype; sum_dtype None is the dtype of
    the arithmetic."""
    grad_x = torch.empty(grad_out.shape, dtype=grad_out.dtype, device=grad_out.device)
    compute_dtype = torch.promote_types(grad_out.dtype, torch.float32)
    grad_bias = torch.zeros(grad_out.size(-1), dtype=compute_dtype, device=grad_out.device) if has_grad_bias else None
    scale = 1.0 / (1.0 - effective_probability(draw.p))
    for rows, block, bits in _blocks(grad_x, draw, block_elements):
        if grad_out.dtype == block.dtype:
            torch.mul(grad_out[rows], scale, out=block)
        else:
            block.copy_(grad_out[rows]).mul_(scale)
        if bits is not None:
            drop_(block, bits)
        if block.dtype != grad_x.dtype:
            grad_x[rows] = block
        if grad_bias is not None:
            grad_bias += block.sum((0, 1))
    return grad_x, None if grad_bias is None else grad_bias.to(sum_dtype or compute_dtype)


def _blocks(out: Tensor, draw: Draw, block_elements: int) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yields consecutive blocks of rows: the slice, a buffer [rows, b, h], and what dropout keeps (None: all).

    If out has the dtype to compute in, the buffer is out's own rows.
    """
    num_rows, batch, num_columns = out.shape
    step = max(1, block_elements // max(1, batch * num_columns))
    compute_dtype = torch.promote_types(out.dtype, torch.float32)
    blocks = None
    if compute_dtype != out.dtype:
        blocks = torch.empty((min(step, num_rows), batch, num_columns), dtype=compute_dtype, device=out.device)
    row, sample = draw.place(num_rows, batch, out.device)
    sample = sample.expand(num_rows, batch)
    head = torch.zeros((), dtype=torch.int64, device=out.device)
    columns = {"num_columns": num_columns, "first_column": draw.first_column}
    for start in range(0, num_rows, step):
        rows, bits = slice(start, min(start + step, num_rows)), None
        if draw.p > 0:
            key = int(draw.key) % 2**64
            bits = keep_bits(key, draw.p, sample=sample[rows], head=head, row=row[rows], **columns)
        yield rows, out[rows] if blocks is None else blocks[: rows.stop - start], bits

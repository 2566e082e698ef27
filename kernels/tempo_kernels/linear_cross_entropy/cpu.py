"""Computes the cross entropy of one chunk of logits on a CPU in blocks of rows; eager.py is the specification.

A block stays in the cache. Plain logits take no temporary tensors; for scaled logits and the entropy eager.py itself
runs block by block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tempo_kernels.linear_cross_entropy import eager
from tempo_kernels.linear_cross_entropy.eager import find_results, list_rows, locate_columns, make_finite
from tempo_kernels.linear_cross_entropy.settings import Rows, Shares
from tempo_kernels.opaque import skip_alike

__all__ = ["find_results", "find_statistics", "list_rows", "write_gradient_"]

BLOCK_ELEMENTS = 1 << 18


def find_statistics(logits: Tensor, columns: Tensor, shares: Shares) -> Tensor:
    """As in eager.py."""
    found = torch.empty(
        shares.num_statistics,
        logits.size(0),
        dtype=torch.promote_types(logits.dtype, torch.float32),
        device=logits.device,
    )
    for block, memory in _cut_into_blocks(logits, found.dtype):
        if not shares.is_plain:
            found[:, block] = eager.find_statistics(logits[block], columns[block], shares)
            continue
        top = found[0, block] = logits[block].amax(-1).to(found.dtype)
        column, is_here = locate_columns(columns[block], logits.size(1))
        target = logits[block].gather(1, column).squeeze(1)
        found[2, block] = target.masked_fill_(~is_here, float("-inf")).to(found.dtype)
        values = torch.sub(logits[block], make_finite(top).unsqueeze(1), out=memory)
        if shares.other:
            found[3, block] = values[:, : shares.num_real].sum(1)
        found[1, block] = values.exp_().sum(1)
    return found


def write_gradient_(logits: Tensor, rows: Rows, shares: Shares) -> None:
    """As in eager.py."""
    compute_dtype = rows.top.dtype
    for block, memory in _cut_into_blocks(logits, compute_dtype):
        if not shares.is_plain or rows.slope is not None:
            of_block = (None if t is None else t[block] for t in rows)
            eager.write_gradient_(logits[block], Rows(*of_block), shares)  # type: ignore[arg-type]  # slope alone is None
            continue
        columns, top, scale, grad = (t[block] for t in rows[:4])
        values = logits[block] if logits.dtype == compute_dtype else memory
        torch.sub(logits[block], top.unsqueeze(1), out=values).exp_().mul_(scale.unsqueeze(1))
        of_target = grad.unsqueeze(1)
        values.index_fill_(0, _find_zeros(grad), 0.0)
        if shares.other:
            values[:, : shares.num_real].sub_(of_target * shares.other)
        column, is_here = locate_columns(columns, logits.size(1))
        values.scatter_add_(1, column, (of_target * -shares.target).masked_fill_(~is_here.unsqueeze(1), 0.0))
        if values is memory:
            logits[block] = values


def _find_zeros(grad: Tensor) -> Tensor:
    """Returns the indices of rows whose gradient is 0, or none for a fake tensor, which has no numbers."""
    is_zero = grad == 0
    if isinstance(grad, FakeTensor):
        return is_zero.new_empty(0, dtype=torch.int64)
    return is_zero.nonzero().squeeze(1)


def _cut_into_blocks(logits: Tensor, compute_dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yields slices of rows, each with a buffer."""
    num_rows, num_columns = logits.shape
    step = min(num_rows, max(1, BLOCK_ELEMENTS // num_columns))
    memory = torch.empty(step, num_columns, dtype=compute_dtype, device=logits.device)
    blocks = [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, max(1, step))]
    yield from ((block, memory[: block.stop - block.start]) for block in skip_alike(blocks, logits))

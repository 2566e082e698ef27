"""Computes the cross entropy of one chunk of logits on a CPU: eager.py in blocks of rows, which stay in the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tempo_kernels.linear_cross_entropy import eager
from tempo_kernels.linear_cross_entropy.settings import Rows, Shares
from tempo_kernels.opaque import skip_alike

BLOCK_ELEMENTS = 1 << 18


def compute_statistics(logits: Tensor, columns: Tensor, shares: Shares) -> Tensor:
    """As in eager.py."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    statistics = logits.new_empty(shares.num_statistics, logits.size(0), dtype=dtype)
    for block in _cut_into_blocks(logits):
        statistics[:, block] = eager.compute_statistics(logits[block], columns[block], shares)
    return statistics


def write_gradient_(logits: Tensor, rows: Rows, shares: Shares) -> None:
    """As in eager.py."""
    for block in _cut_into_blocks(logits):
        own = Rows._make(None if t is None else t[block] for t in rows)
        eager.write_gradient_(logits[block], own, shares)


def _cut_into_blocks(logits: Tensor) -> Sequence[slice]:
    """Returns slices of rows."""
    num_rows, num_columns = logits.shape
    step = max(1, BLOCK_ELEMENTS // num_columns)
    return skip_alike([slice(start, start + step) for start in range(0, num_rows, step)], logits)

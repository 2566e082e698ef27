"""Cross entropy of one chunk of logits in plain torch: the specification.

A token has logits l over the K real columns of the vocabulary and the target y. Label smoothing a is Megatron's: 1 - a
on the target and a / (K - 1) on every other column.
    top = max l,  total = sum exp(l - top),  logsumexp = top + log total
    loss = log total - target_share (l_y - top) - other_share sum_real (l - top) + z logsumexp**2
    other_share = a / (K - 1),  target_share = 1 - K other_share
    grad_l = grad ((1 + 2 z logsumexp) exp(l - top) / total - target_share [y] - other_share [real])
l holds the columns of one shard of the vocabulary. Columns that pad the vocabulary are in the softmax, as in Megatron,
but take no part in the smoothing. Arithmetic is float32 (float64 for float64 logits).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tempo_kernels.linear_cross_entropy.settings import Rows, Shares


def find_statistics(logits: Tensor, columns: Tensor, shares: Shares) -> Tensor:
    """[3 or 4, n] of logits [n, v]: top, total, the target's logit and, with an other share, sum_real (l - top).

    columns [n] are the targets as columns of this shard: outside of it their logit is -inf.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = logits.amax(-1)
    above = logits - top.unsqueeze(1)
    column, is_here = locate_columns(columns, logits.size(1))
    target = logits.gather(1, column).squeeze(1).masked_fill(~is_here, float("-inf"))
    sums = [above[:, : shares.num_real].sum(1)] if shares.other else []
    return torch.stack([top, above.exp().sum(1), target, *sums])


def write_gradient_(logits: Tensor, rows: Rows, shares: Shares) -> None:
    """Writes grad_l over logits [n, v]; a row whose grad is 0 becomes 0 whatever it holds."""
    grad = rows.grad.unsqueeze(1)
    values = (logits.to(rows.top.dtype) - rows.top.unsqueeze(1)).exp() * rows.scale.unsqueeze(1)
    values = values.masked_fill(grad == 0, 0.0)
    if shares.other:
        values[:, : shares.num_real] -= grad * shares.other
    column, is_here = locate_columns(rows.columns, logits.size(1))
    values.scatter_add_(1, column, (grad * -shares.target).masked_fill(~is_here.unsqueeze(1), 0.0))
    logits.copy_(values)


def locate_columns(columns: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Columns of this shard [n, 1], and whether they are the targets [n]: a target on another shard has none here."""
    return columns.clamp(0, num_columns - 1).unsqueeze(1), (columns >= 0) & (columns < num_columns)

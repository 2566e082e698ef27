"""Cross entropy of one chunk of logits in plain torch: the specification.

Of a token with logits l over the K real rows of the vocabulary, target y and label smoothing a, as Megatron defines it
(1 - a on the target and a / (K - 1) on every other row):
    top = max l,  total = sum exp(l - top),  logsumexp = top + log total
    loss = log total - target_share (l_y - top) - other_share sum_real (l - top) + z logsumexp**2
    other_share = a / (K - 1),  target_share = 1 - K other_share
    grad_l = grad ((1 + 2 z logsumexp) exp(l - top) / total - target_share [y] - other_share [real])
l holds the columns of one shard of the vocabulary; rows that pad it are in the softmax, as in Megatron, but take no
part in the smoothing. Arithmetic is float32 (float64 for float64 logits).
"""

from __future__ import annotations

import torch
from torch import Tensor


def statistics(logits: Tensor, columns: Tensor, num_real: int, needs_sum: bool) -> Tensor:
    """[3 or 4, n] of logits [n, v]: top, total, the target's logit and, where asked for, sum_real (l - top).

    columns [n] are the targets as columns of this shard: outside of it their logit is -inf. The first num_real columns
    are real.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = logits.amax(-1)
    above = logits - top.unsqueeze(1)
    column, is_here = find_columns(columns, logits.size(1))
    target = logits.gather(1, column).squeeze(1).masked_fill(~is_here, float("-inf"))
    sums = [above[:, :num_real].sum(1)] if needs_sum else []
    return torch.stack([top, above.exp().sum(1), target, *sums])


def gradient_(
    logits: Tensor,
    columns: Tensor,
    top: Tensor,
    scale: Tensor,
    grad: Tensor,
    target_share: float,
    other_share: float,
    num_real: int,
) -> None:
    """Writes grad_l over logits [n, v]; a row whose grad is 0 becomes 0 whatever it holds.

    top, scale and grad are [n]: the maximum over all shards, grad (1 + 2 z logsumexp) / total, and the loss's gradient.
    """
    grad = grad.unsqueeze(1)
    values = (logits.to(top.dtype) - top.unsqueeze(1)).exp() * scale.unsqueeze(1)
    values = values.masked_fill(grad == 0, 0.0)
    if other_share:
        values[:, :num_real] -= grad * other_share
    column, is_here = find_columns(columns, logits.size(1))
    values.scatter_add_(1, column, (grad * -target_share).masked_fill(~is_here.unsqueeze(1), 0.0))
    logits.copy_(values)


def find_columns(columns: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Columns that exist [n, 1], and whether they are those asked for [n]."""
    return columns.clamp(0, num_columns - 1).unsqueeze(1), (columns >= 0) & (columns < num_columns)

"""Specifies the cross entropy and the entropy of one chunk of logits in plain torch, in blocks of rows, which stay in a
CPU's cache.

A token has logits z over the vocabulary, of which K columns are real, and a target y. The softmax takes
    l = softcap tanh(z / softcap) / temperature,  or z / temperature without a softcap.
Label smoothing a is Megatron's: 1 - a on the target and a / (K - 1) on every other real column.
    top = max l,  total = sum exp(l - top),  logsumexp = top + log total
    loss = log total - target_share (l_y - top) - other_share sum_real (l - top) + z logsumexp**2
    other_share = a / (K - 1),  target_share = 1 - K other_share
    grad_l = grad ((1 + 2 z logsumexp) exp(l - top) / total - target_share [y] - other_share [real])
    weighted = sum exp(l - top) (l - top),  expected = weighted / total,  entropy = log total - expected
    grad_l -= grad_entropy exp(l - top) / total (l - top - expected)
    grad_z = grad_l (1 - tanh(z / softcap)**2) / temperature
The entropy is that of the softmax. It is never negative: total is at least 1, and no part of weighted is positive.
l holds the columns of one shard of the vocabulary. Columns that pad the vocabulary take no part in the smoothing. They
take part in the softmax, as in Megatron, unless they are excluded: then they are -inf, even if one is the target.
Arithmetic is float32 (float64 for float64 logits).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tempo_kernels.linear_cross_entropy.settings import Rows, Settings, Shares
from tempo_kernels.opaque import cut, get_block_size, skip_alike

BLOCK_ELEMENTS = 1 << 18


def compute_statistics(logits: Tensor, columns: Tensor, shares: Shares) -> Tensor:
    """Computes the statistics [3 to 5, n] of logits z [n, v]: top, total and the target's l, with an other share also
    sum_real (l - top), for the entropy also weighted.

    columns [n] are the targets as columns of this shard; a target on another shard has a logit of -inf here.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    statistics = logits.new_empty(shares.num_statistics, logits.size(0), dtype=dtype)
    for rows in _cut_into_blocks(logits):
        statistics[:, rows] = _compute_block(logits[rows], columns[rows], shares)
    return statistics


def _cut_into_blocks(logits: Tensor) -> Sequence[slice]:
    elements = get_block_size("linear_cross_entropy", BLOCK_ELEMENTS)
    return skip_alike(cut(logits.size(0), max(1, elements // logits.size(1))), logits)


def _compute_block(logits: Tensor, columns: Tensor, shares: Shares) -> Tensor:
    logits, _ = scale_logits(logits, shares)
    top = logits.amax(-1)
    above = logits - make_finite(top).unsqueeze(1)
    column, is_here = locate_columns(columns, logits.size(1))
    target = logits.gather(1, column).squeeze(1).masked_fill(~is_here, float("-inf"))
    exponentials = above.exp()
    found = [top, exponentials.sum(1), target]
    if shares.other:
        found.append(above[:, : shares.num_real].sum(1))
    if shares.has_entropy:
        found.append((exponentials * make_finite(above)).sum(1))
    return torch.stack(found)


def compute_results(found: Tensor, labels: Tensor, settings: Settings) -> tuple[tuple[Tensor, ...], Tensor]:
    """Returns losses and, if asked for, entropies [...], and what backward takes, top, total, expected [2 or 3, ...],
    from the statistics [3 to 5, ...] of the whole vocabulary and the labels [...]."""
    top, total, target, *more = found.unbind(0)
    log_total, of_target = total.log(), target - top
    losses = log_total - (of_target * settings.target_share if settings.other_share else of_target)
    if settings.other_share:
        losses -= settings.other_share * more[0]
    if settings.z_loss:
        losses += settings.z_loss * (top + log_total).square()
    is_ignored = labels == settings.ignore_index
    losses = losses.masked_fill_(is_ignored, 0.0)
    if not settings.has_entropy:
        return (losses,), torch.stack((top, total))
    expected = more[-1] / total
    entropies = (log_total - expected).masked_fill_(is_ignored, 0.0)
    return (losses, entropies), torch.stack((top, total, expected))


def compute_rows(
    columns: Tensor, labels: Tensor, grad: Tensor, grad_entropy: Tensor | None, kept: Tensor, settings: Settings
) -> Rows:
    """Returns what `write_gradient_` takes: the gradients [n] of the losses and of the entropies divided by the
    temperature, with 0 for ignored labels [n]. kept [2 or 3, n] is as `compute_results` returned it."""
    top, total, *expected = kept.unbind(0)
    is_ignored = labels == settings.ignore_index
    grad = _weigh(grad, is_ignored, settings)
    scale, slope = grad / total, None
    if settings.z_loss:
        scale *= 1.0 + 2.0 * settings.z_loss * (top + total.log())
    if grad_entropy is not None:
        grad_entropy = _weigh(grad_entropy, is_ignored, settings)
        # A gradient of 0 stays 0, even where the row's total is 0, infinite or NaN.
        slope = (-grad_entropy / total).masked_fill(grad_entropy == 0, 0.0)
        scale = scale - slope * expected[0]
    return Rows(columns, top, scale, grad, slope)


def _weigh(grad: Tensor, is_ignored: Tensor, settings: Settings) -> Tensor:
    grad = grad.masked_fill(is_ignored, 0.0)
    return grad / settings.temperature if settings.temperature != 1.0 else grad


def write_gradient_(logits: Tensor, rows: Rows, shares: Shares) -> None:
    """Overwrites logits z [n, v] with grad_z; a row whose gradients are 0 becomes 0, even if it holds NaN.

    rows.grad, rows.scale and rows.slope are already divided by the temperature.
    """
    for block in _cut_into_blocks(logits):
        _write_block_(logits[block], Rows._make(None if t is None else t[block] for t in rows), shares)


def _write_block_(logits: Tensor, rows: Rows, shares: Shares) -> None:
    scaled, slope_of_cap = scale_logits(logits, shares)
    grad, above = rows.grad.unsqueeze(1), scaled - rows.top.unsqueeze(1)
    factor, is_ignored = rows.scale.unsqueeze(1), grad == 0
    if rows.slope is not None:
        slope = rows.slope.unsqueeze(1)
        factor, is_ignored = factor + slope * make_finite(above), is_ignored & (slope == 0)
    values = above.exp_().mul_(factor)
    if shares.other:
        values[:, : shares.num_real] -= grad * shares.other
    column, is_here = locate_columns(rows.columns, logits.size(1))
    values.scatter_add_(1, column, (grad * -shares.target).masked_fill(~is_here.unsqueeze(1), 0.0))
    if slope_of_cap is not None:
        values *= slope_of_cap
    if shares.excludes_padding:
        values[:, shares.num_real :] = 0.0
    logits.copy_(values.masked_fill_(is_ignored, 0.0))


def scale_logits(logits: Tensor, shares: Shares) -> tuple[Tensor, Tensor | None]:
    """Returns l of logits z in float32 or float64, and the derivative of the cap, or None without one."""
    values, slope_of_cap = logits.to(torch.promote_types(logits.dtype, torch.float32)), None
    if shares.softcap:
        bent = (values / shares.softcap).tanh()
        values, slope_of_cap = bent * shares.softcap, 1.0 - bent.square()
    if shares.temperature != 1.0:
        values = values / shares.temperature
    if shares.excludes_padding:
        is_padding = torch.arange(values.size(1), dtype=torch.int64, device=values.device) >= shares.num_real
        values = values.masked_fill(is_padding, float("-inf"))
    return values, slope_of_cap


def make_finite(values: Tensor) -> Tensor:
    """Replaces -inf by 0, because -inf * 0 and -inf - -inf are NaN."""
    return values.masked_fill(values == float("-inf"), 0.0)


def locate_columns(columns: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Returns columns [n, 1] clamped to this shard, to index with, and whether the target [n] lies on this shard."""
    return columns.clamp(0, num_columns - 1).unsqueeze(1), (columns >= 0) & (columns < num_columns)

"""Blockwise attention in plain torch: the specification.

After FlashAttention-2 (Dao, arXiv 2307.08691), with a whole row of keys per block of queries:
    S = scale Q K^T,  P = exp(S - L),  L = logsumexp(S),  D = keep * P / (1 - p),  O = D V
    dV = D^T dO,  dP = keep * (dO V^T) / (1 - p),  dS = P * (dP - sum(P * dP)),  dQ = scale dS K,  dK = scale dS^T Q
Matrix products run in the inputs' dtype, everything between them in float32 (float64 for float64 inputs).
A query head h reads key-value group h // (heads / groups), as in Megatron.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tempo_kernels.philox import drop_mask, effective_probability

BLOCK_ELEMENTS = 1 << 17
MIN_BLOCK_ROWS = 64
MASKED_SCORE = -10000.0
"""What Megatron writes over masked scores; a row whose every key is masked attends to all of them equally."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is not a tensor."""

    causal: bool
    softmax_scale: float
    dropout_p: float
    dropout_key: int
    first_sample: int
    first_head: int


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, settings: Settings) -> tuple[Tensor, Tensor]:
    """out [sq, b, a, d] and logsumexp [b, a, sq] (float32) of q [sq, b, a, d] and k, v [sk, b, g, d]."""
    num_rows, batch, heads, _ = q.shape
    out = torch.empty(*q.shape[:-1], v.size(-1), dtype=q.dtype, device=q.device)
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    logsumexp = torch.empty(batch, heads, num_rows, dtype=compute_dtype, device=q.device)
    keep_scale = 1.0 / (1.0 - effective_probability(settings.dropout_p))
    for sample in range(batch):
        # [a, sq, d] and [g, sk, d]
        q_sample, k_sample, v_sample = (t[:, sample].transpose(0, 1).contiguous() for t in (q, k, v))
        for start in range(0, num_rows, step := _rows_per_block(heads, k.size(0))):
            block = _Block(start, min(start + step, num_rows), sample, q_sample, k_sample, mask, settings)
            scores = block.scores(q_sample, k_sample)
            top = scores.amax(-1, keepdim=True)
            probabilities = scores.sub_(top).exp_()
            total = probabilities.sum(-1, keepdim=True)
            logsumexp[sample, :, block.rows] = (top + total.log()).view(heads, -1)
            if settings.dropout_p > 0:
                probabilities.masked_fill_(block.dropped(), 0.0)
            context = torch.bmm(probabilities.to(q.dtype), v_sample[:, : block.num_keys])
            context = context.to(compute_dtype).div_(total).mul_(keep_scale)
            # [rows, a, d]
            out[block.rows, sample] = context.view(heads, -1, v.size(-1)).transpose(0, 1).to(q.dtype)
    return out, logsumexp


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, logsumexp: Tensor, mask: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """grad_q, grad_k, grad_v in the shapes of q, k, v."""
    num_rows, batch, heads, _ = q.shape
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    grads = tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    keep_scale = 1.0 / (1.0 - effective_probability(settings.dropout_p))
    for sample in range(batch):
        # [a, sq, d] and [g, sk, d]
        q_sample, k_sample, v_sample, grad_sample = (
            t[:, sample].transpose(0, 1).contiguous() for t in (q, k, v, grad_out)
        )
        grad_q = torch.empty_like(q_sample)
        # Per query head; summed over the heads of a group at the end, as torch does, which is also more precise.
        grad_k, grad_v = (t.new_zeros(heads, *t.shape[1:], dtype=compute_dtype) for t in (k_sample, v_sample))
        for start in range(0, num_rows, step := _rows_per_block(heads, k.size(0))):
            block = _Block(start, min(start + step, num_rows), sample, q_sample, k_sample, mask, settings)
            row_sum = logsumexp[sample, :, block.rows].reshape(block.groups, -1, 1)
            probabilities = block.scores(q_sample, k_sample).sub_(row_sum).exp_()
            # The whole row is here: normalising it again takes the rounding of its logsumexp out.
            probabilities.div_(probabilities.sum(-1, keepdim=True))
            # [g, a/g * rows, d]
            grad_block = block.of(grad_sample)
            grad_probabilities = torch.bmm(grad_block, v_sample[:, : block.num_keys].transpose(1, 2)).to(compute_dtype)
            kept = probabilities
            if settings.dropout_p > 0:
                dropped = block.dropped()
                kept = probabilities.masked_fill(dropped, 0.0)
                grad_probabilities.masked_fill_(dropped, 0.0)
            block.accumulate(grad_v, kept.to(q.dtype), grad_block, keep_scale)
            grad_probabilities.mul_(keep_scale)
            delta = (grad_probabilities * probabilities).sum(-1, keepdim=True)
            grad_scores = grad_probabilities.sub_(delta).mul_(probabilities)
            if block.mask is not None:
                grad_scores.masked_fill_(block.mask, 0.0)
            grad_scores = grad_scores.to(q.dtype)
            grad_block_q = torch.bmm(grad_scores, k_sample[:, : block.num_keys]).mul_(settings.softmax_scale)
            grad_q[:, block.rows] = grad_block_q.view(heads, -1, q.size(-1))
            block.accumulate(grad_k, grad_scores, block.of(q_sample), settings.softmax_scale)
        for grad, grad_of_sample in zip(grads, (grad_q, grad_k, grad_v), strict=True):
            grouped = grad_of_sample.view(grad.size(2), -1, *grad_of_sample.shape[1:]).sum(1)
            grad[:, sample] = grouped.transpose(0, 1)
    return grads[0], grads[1], grads[2]


def _rows_per_block(heads: int, num_keys: int) -> int:
    """Queries per block: few, for scores to stay in the cache and causal blocks to end early; enough for a product."""
    return max(MIN_BLOCK_ROWS, BLOCK_ELEMENTS // max(1, heads * num_keys) // 16 * 16)


class _Block:
    """Queries [start, stop) of every head of one sample, and the keys that they can see."""

    def __init__(
        self, start: int, stop: int, sample: int, q: Tensor, k: Tensor, mask: Tensor | None, settings: Settings
    ) -> None:
        self.rows = slice(start, stop)
        self.sample = sample
        self.heads, self.groups = q.size(0), k.size(0)
        self.settings = settings
        self.device = q.device
        # With fewer queries than keys the last query sees the last key.
        self.diagonal = k.size(1) - q.size(1)
        self.num_keys = max(0, min(k.size(1), stop + self.diagonal)) if settings.causal else k.size(1)
        self.mask = None if mask is None else self._mask_of(mask)

    def _mask_of(self, mask: Tensor) -> Tensor:
        """[g or 1, rows or a/g * rows, keys] of mask [b or 1, a or 1, sq or 1, sk]."""
        part = mask[self.sample if mask.size(0) > 1 else 0]
        part = (part[:, self.rows] if part.size(1) > 1 else part)[..., : self.num_keys]
        if part.size(0) == 1 and self.groups == self.heads:
            return part
        return part.expand(self.heads, self.rows.stop - self.rows.start, -1).reshape(self.groups, -1, self.num_keys)

    def of(self, t: Tensor) -> Tensor:
        """[g, a/g * rows, d] of t [a, sq, d]."""
        return t[:, self.rows].reshape(self.groups, -1, t.size(-1))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """[g, a/g * rows, keys] in the dtype of computation."""
        scores = torch.bmm(self.of(q), k[:, : self.num_keys].transpose(1, 2))
        scores = scores.to(torch.promote_types(q.dtype, torch.float32)).mul_(self.settings.softmax_scale)
        if self.mask is not None:
            scores.masked_fill_(self.mask, MASKED_SCORE)
        if self.settings.causal:
            # Only the last columns hold keys that some of these rows must not see.
            first = max(0, min(self.num_keys, self.rows.start + self.diagonal + 1))
            row = torch.arange(self.rows.start, self.rows.stop, device=q.device).unsqueeze(-1)
            hidden = torch.arange(first, self.num_keys, device=q.device) > row + self.diagonal
            scores.view(self.heads, -1, self.num_keys)[..., first:].masked_fill_(hidden, float("-inf"))
        if self.mask is not None:
            # A logsumexp near MASKED_SCORE would have no digits left for the differences between scores.
            top = scores.amax(-1, keepdim=True)
            scores.sub_(top.masked_fill_(top != MASKED_SCORE, 0.0))
        return scores

    def accumulate(self, total: Tensor, weights: Tensor, values: Tensor, scale: float) -> None:
        """total [a, keys, d] += scale * weights^T values of [g, a/g * rows, keys] and [g, a/g * rows, d]."""
        weights = weights.view(self.heads, -1, self.num_keys).transpose(1, 2)
        values = values.view(self.heads, -1, values.size(-1))
        part = total[:, : self.num_keys]
        if part.dtype == weights.dtype:
            part.baddbmm_(weights, values, alpha=scale)
        else:
            part.add_(torch.bmm(weights, values), alpha=scale)

    def dropped(self) -> Tensor:
        """The dropout mask [g, a/g * rows, keys]."""
        settings = self.settings
        device = self.device
        return drop_mask(
            settings.dropout_key,
            settings.dropout_p,
            sample=torch.tensor(settings.first_sample + self.sample, device=device),
            head=torch.arange(settings.first_head, settings.first_head + self.heads, device=device).unsqueeze(-1),
            row=torch.arange(self.rows.start, self.rows.stop, device=device),
            num_columns=self.num_keys,
        ).view(self.groups, -1, self.num_keys)

"""Attention as in eager.py, on a CPU in blocks of queries whose scores stay in the cache.

Without dropout it is torch's own flash attention, where that computes the same.

After FlashAttention-2 (Dao, arXiv 2307.08691), with a whole row of keys per block of queries. Backward computes the
scores again, or reads the probabilities that forward kept. Causal and windowed blocks end where their queries see no
more keys. The softmax form runs here on a GPU too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tempo_kernels.attention import cpu_flash
from tempo_kernels.attention.settings import MASKED_SCORE, Inputs, Kept, Settings
from tempo_kernels.philox import drop_, effective_probability, keep_bits

BLOCK_ELEMENTS = 1 << 17
GPU_BLOCK_ELEMENTS = 1 << 26
MIN_BLOCK_ROWS = 64
_LOWEST = torch.finfo(torch.float32).min


def forward(inputs: Inputs, settings: Settings, probabilities_out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As in eager.py."""
    if probabilities_out is None and cpu_flash.can_run(inputs, settings):
        out, logsumexp = cpu_flash.forward(inputs, settings)
        if cpu_flash.is_small(logsumexp):
            return out, logsumexp
    q, k, v, _, _ = inputs
    num_rows, batch, heads, _ = q.shape
    out = torch.empty(*q.shape[:-1], v.size(-1), dtype=q.dtype, device=q.device)
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    logsumexp = torch.empty(batch, heads, num_rows, dtype=compute_dtype, device=q.device)
    keep_scale = 1.0 / (1.0 - effective_probability(settings.dropout_p))
    for sample in range(batch):
        # [a, sq, d] and [g, sk, d]
        q_sample, k_sample, v_sample = (t[:, sample].transpose(0, 1).contiguous() for t in (q, k, v))
        for block in _cut_into_blocks(inputs, sample, settings):
            if block.num_keys == 0:
                out[block.rows, sample], logsumexp[sample, :, block.rows] = 0.0, float("inf")
                continue
            scores = block.find_scores(q_sample, k_sample)
            top = scores.amax(-1, keepdim=True)
            probabilities = scores.sub_(top.clamp_min_(_LOWEST)).exp_()
            total = probabilities.sum(-1, keepdim=True)
            # Infinite where there is nothing to normalise: it divides to 0, and backward finds probabilities of 0.
            total.masked_fill_(total == 0.0, float("inf"))
            logsumexp[sample, :, block.rows] = (top + total.log()).view(heads, -1)
            if probabilities_out is not None:
                probabilities_out[sample, :, block.rows, block.keys] = (probabilities / total).view(
                    heads, -1, block.num_keys
                )
            if settings.dropout_p > 0:
                drop_(probabilities, block.draw_keep_bits())
            context = torch.bmm(probabilities.to(q.dtype), v_sample[:, block.keys])
            context = context.to(compute_dtype).div_(total).mul_(keep_scale)
            # [rows, a, d]
            out[block.rows, sample] = context.view(heads, -1, v.size(-1)).transpose(0, 1).to(q.dtype)
    return out, logsumexp


def backward(grad_out: Tensor, inputs: Inputs, kept: Kept, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """As in eager.py; `kept.out` is there where `cpu_flash.can_run_backward`."""
    if kept.probabilities is None and cpu_flash.can_run_backward(inputs, settings):
        assert kept.logsumexp is not None
        if cpu_flash.is_small(kept.logsumexp):
            return cpu_flash.backward(grad_out, inputs, kept, settings)
    q, k, v, _, _ = inputs
    batch, heads = q.shape[1:3]
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
        for block in _cut_into_blocks(inputs, sample, settings):
            if block.num_keys == 0:
                grad_q[:, block.rows] = 0.0
                continue
            if kept.probabilities is None:
                assert kept.logsumexp is not None
                probabilities = block.find_probabilities(q_sample, k_sample, kept.logsumexp[sample])
            else:
                probabilities = kept.probabilities[sample, :, block.rows, block.keys].to(compute_dtype)
                probabilities = probabilities.reshape(block.groups, -1, block.num_keys)
            # [g, a/g * rows, d]
            grad_block = block.cut(grad_sample)
            grad_probabilities = torch.bmm(grad_block, v_sample[:, block.keys].transpose(1, 2)).to(compute_dtype)
            survivors = probabilities
            if settings.dropout_p > 0:
                bits = block.draw_keep_bits()
                survivors = drop_(probabilities.clone(), bits)
                drop_(grad_probabilities, bits)
            block.accumulate(grad_v, survivors.to(q.dtype), grad_block, keep_scale)
            grad_probabilities.mul_(keep_scale)
            grad_scores = grad_probabilities.mul_(probabilities)
            grad_scores.addcmul_(probabilities, grad_scores.sum(-1, keepdim=True), value=-1.0)
            if block.mask is not None:
                grad_scores.masked_fill_(block.mask, 0.0)
            grad_scores = grad_scores.to(q.dtype)
            grad_block_q = torch.bmm(grad_scores, k_sample[:, block.keys]).mul_(settings.softmax_scale)
            grad_q[:, block.rows] = grad_block_q.view(heads, -1, q.size(-1))
            block.accumulate(grad_k, grad_scores, block.cut(q_sample), settings.softmax_scale)
        for grad, grad_of_sample in zip(grads, (grad_q, grad_k, grad_v), strict=True):
            grouped = grad_of_sample.view(grad.size(2), -1, *grad_of_sample.shape[1:]).sum(1)
            grad[:, sample] = grouped.transpose(0, 1)
    return grads[0], grads[1], grads[2]


def _cut_into_blocks(inputs: Inputs, sample: int, settings: Settings) -> Iterator[_Block]:
    """Few queries a block, for its scores to stay in the cache and causal blocks to end early, but enough of them for
    a fast matrix product."""
    q, k = inputs.q, inputs.k
    elements = BLOCK_ELEMENTS if q.device.type == "cpu" else GPU_BLOCK_ELEMENTS
    step = max(MIN_BLOCK_ROWS, elements // max(1, q.size(2) * k.size(0)) // 16 * 16)
    for start in range(0, q.size(0), step):
        yield _Block(start, min(start + step, q.size(0)), sample, inputs, settings)


class _Block:
    """Queries [start, stop) of every head of one sample, and the keys that they can see."""

    def __init__(self, start: int, stop: int, sample: int, inputs: Inputs, settings: Settings) -> None:
        q, k, _, mask, key_lengths = inputs
        self.rows = slice(start, stop)
        self.sample = sample
        self.heads, self.groups = q.size(2), k.size(2)
        self.settings = settings
        self.device = q.device
        self.first, self.last = settings.find_window(q.size(0), k.size(0))
        seen = k.size(0) if key_lengths is None else max(0, min(k.size(0), int(key_lengths[sample])))
        last = seen if self.last is None else max(0, min(seen, stop + self.last))
        self.keys = slice(0 if self.first is None else max(0, min(last, start + self.first)), last)
        self.num_keys = self.keys.stop - self.keys.start
        self.mask = None if mask is None else self._cut_mask(mask)

    def _cut_mask(self, mask: Tensor) -> Tensor:
        """[g or 1, rows or a/g * rows, keys] of mask [b or 1, a or 1, sq or 1, sk]."""
        part = mask[self.sample if mask.size(0) > 1 else 0]
        part = (part[:, self.rows] if part.size(1) > 1 else part)[..., self.keys]
        if part.size(0) == 1 and self.groups == self.heads:
            return part
        return part.expand(self.heads, self.rows.stop - self.rows.start, -1).reshape(self.groups, -1, self.num_keys)

    def cut(self, t: Tensor) -> Tensor:
        """[g, a/g * rows, d] of t [a, sq, d]."""
        return t[:, self.rows].reshape(self.groups, -1, t.size(-1))

    def find_scores(self, q: Tensor, k: Tensor) -> Tensor:
        """[g, a/g * rows, keys] in the dtype of computation."""
        scores = torch.bmm(self.cut(q), k[:, self.keys].transpose(1, 2))
        scores = scores.to(torch.promote_types(q.dtype, torch.float32)).mul_(self.settings.softmax_scale)
        if self.mask is not None:
            scores.masked_fill_(self.mask, MASKED_SCORE)
        self._hide_outside_of_the_window(scores.view(self.heads, -1, self.num_keys))
        if self.mask is not None:
            # A logsumexp near MASKED_SCORE would have no digits left for the differences between scores.
            top = scores.amax(-1, keepdim=True)
            scores.sub_(top.masked_fill_(top != MASKED_SCORE, 0.0))
        return scores

    def find_probabilities(self, q: Tensor, k: Tensor, logsumexp: Tensor) -> Tensor:
        """[g, a/g * rows, keys], from logsumexp [a, sq]."""
        row_sum = logsumexp[:, self.rows].reshape(self.groups, -1, 1)
        probabilities = self.find_scores(q, k).sub_(row_sum).exp_()
        # The whole row is here: normalising it again takes the rounding of its logsumexp out, which for scores around
        # 1e8 is as large as the logarithm of how many are equal. Of none it stays 0.
        total = probabilities.sum(-1, keepdim=True)
        return probabilities.div_(total.masked_fill_(total == 0.0, float("inf")))

    def _hide_outside_of_the_window(self, scores: Tensor) -> None:
        """Minus infinity in scores [a, rows, keys]; only columns at either end hold keys that some rows do not see."""
        rows, keys = self.rows, self.keys
        row = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=self.device).unsqueeze(-1)
        if self.last is not None:
            first = max(keys.start, min(keys.stop, rows.start + self.last + 1))
            hidden = torch.arange(first, keys.stop, dtype=torch.int64, device=self.device) > row + self.last
            scores[..., first - keys.start :].masked_fill_(hidden, float("-inf"))
        if self.first is not None:
            stop = max(keys.start, min(keys.stop, rows.stop - 1 + self.first))
            hidden = torch.arange(keys.start, stop, dtype=torch.int64, device=self.device) < row + self.first
            scores[..., : stop - keys.start].masked_fill_(hidden, float("-inf"))

    def accumulate(self, total: Tensor, weights: Tensor, values: Tensor, scale: float) -> None:
        """total [a, keys, d] += scale * weights^T values of [g, a/g * rows, keys] and [g, a/g * rows, d]."""
        weights = weights.view(self.heads, -1, self.num_keys).transpose(1, 2)
        values = values.view(self.heads, -1, values.size(-1))
        part = total[:, self.keys]
        if part.dtype == weights.dtype:
            part.baddbmm_(weights, values, alpha=scale)
        else:
            part.add_(torch.bmm(weights, values), alpha=scale)

    def draw_keep_bits(self) -> Tensor:
        """What dropout keeps, [g, a/g * rows, keys]."""
        settings, first_head, device = self.settings, self.settings.first_head, self.device
        bits = keep_bits(
            int(settings.dropout_key or 0) % 2**64,
            settings.dropout_p,
            sample=torch.tensor(int(settings.first_sample or 0) + self.sample, dtype=torch.int64, device=device),
            head=torch.arange(first_head, first_head + self.heads, dtype=torch.int64, device=device).unsqueeze(-1),
            row=torch.arange(self.rows.start, self.rows.stop, dtype=torch.int64, device=device),
            num_columns=self.keys.stop,
        )
        return bits[..., self.keys].reshape(self.groups, -1, self.num_keys)

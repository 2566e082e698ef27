"""Computes blocks of attention on a CPU: the scores, probabilities and gradients of some queries; see cpu.py.

Scores are multiplied by log2(e) and exponentials are powers of two, because torch's exp takes 15 times as long where a
score is minus infinity.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tempo_kernels.attention.settings import HIDING_BIAS, Inputs, Kept, Settings
from tempo_kernels.philox import drop_, keep_bits

LOG2_E = math.log2(math.e)


class Block:
    """A block: some queries of every head of n samples, and the keys that these queries can see."""

    def __init__(self, samples: slice, rows: slice, inputs: Inputs, settings: Settings) -> None:
        q, k, _, mask, key_lengths = inputs[:5]
        self.inputs = inputs
        self.samples, self.rows = samples, rows
        self.num_samples = samples.stop - samples.start
        self.heads, self.groups = q.size(2), k.size(2)
        self.settings = settings
        self.device = q.device
        self.compute_dtype = torch.promote_types(q.dtype, torch.float32)
        self.diagonal = settings.compute_diagonal(q.size(0), k.size(0))
        self.first, self.last = settings.compute_window(q.size(0), k.size(0))
        seen = k.size(0) if key_lengths is None else max(0, min(k.size(0), int(key_lengths[samples.start])))
        last = seen if self.last is None else max(0, min(seen, rows.stop + self.last))
        self.keys = slice(0 if self.first is None else max(0, min(last, rows.start + self.first)), last)
        self.num_keys = self.keys.stop - self.keys.start
        self.shown = None if mask is None else self._get_shown(mask)

    def _get_shown(self, mask: Tensor) -> Tensor:
        """Returns 0 where mask [b or 1, a or 1, sq or 1, sk] hides a key, all bits set elsewhere, for `drop_`:
        [n * g or 1, rows or a/g * rows or 1, keys]."""
        part = mask[self.samples] if mask.size(0) > 1 else mask
        part = (part[:, :, self.rows] if part.size(2) > 1 else part)[..., self.keys]
        if self.groups != self.heads or part.shape[:2] not in ((1, 1), (self.num_samples, self.heads)):
            num_rows = part.size(2) if self.groups == self.heads else self.rows.stop - self.rows.start
            part = part.expand(self.num_samples, self.heads, num_rows, -1)
            part = part.reshape(self.num_samples * self.groups, -1, self.num_keys)
        else:
            part = part.flatten(0, 1)
        return part.to(torch.int64 if self.compute_dtype == torch.float64 else torch.int32) - 1

    def cut(self, t: Tensor) -> Tensor:
        """Returns [n * g, a/g * rows, d] of t [n * a, s, d]."""
        return t[:, self.rows].reshape(self.num_samples * self.groups, -1, t.size(-1))

    def cut_statistic(self, t: Tensor) -> Tensor:
        """Returns [n * g, a/g * rows, 1] of t [b, a, sq]."""
        return t[self.samples, :, self.rows].reshape(self.num_samples * self.groups, -1, 1)

    def split_heads(self, t: Tensor) -> Tensor:
        """Returns [n, a, rows, x] of t [n * g, a/g * rows, x]."""
        return t.view(self.num_samples, self.heads, -1, t.size(-1))

    def compute_products(self, q: Tensor, k: Tensor) -> Tensor:
        """Returns log2(e) times the scores [n * g, a/g * rows, keys] in the dtype of computation, without
        what is added to them; with a softcap, the tangents by which it is multiplied."""
        scale, operands = self.settings.softmax_scale, (self.cut(q), k[:, self.keys].mT)
        scale = scale * LOG2_E if self.settings.softcap is None else scale / self.settings.softcap
        if q.dtype == self.compute_dtype:
            shape = (*operands[0].shape[:2], self.num_keys)
            scores = torch.empty(shape, dtype=q.dtype, device=q.device).baddbmm_(*operands, beta=0, alpha=scale)
        else:
            scores = torch.bmm(*operands).to(self.compute_dtype).mul_(scale)
        return scores if self.settings.softcap is None else scores.tanh_()

    def compute_scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Returns log2(e) times the scores [n * g, a/g * rows, keys] in the dtype of computation."""
        scores, masked_score = self.compute_products(q, k), self.settings.masked_score * LOG2_E
        if self.settings.softcap is not None:
            scores.mul_(self.settings.softcap * LOG2_E)
        if self.inputs.bias is not None:
            bias = self._cut_bias(self.inputs.bias).to(self.compute_dtype)
            self.split_heads(scores).add_(bias.masked_fill(bias < HIDING_BIAS, -math.inf), alpha=LOG2_E)
        if self.inputs.alibi_slopes is not None:
            slopes = self.inputs.alibi_slopes.to(self.compute_dtype).mul(LOG2_E).view(-1, 1, 1)
            self.split_heads(scores).addcmul_(slopes, self._compute_distances())
        if self.shown is not None:
            hiding = torch.zeros_like(self.shown, dtype=scores.dtype).masked_fill_(self.shown == 0, masked_score)
            drop_(scores, self.shown).add_(hiding)
        self._hide_outside_of_the_window(scores.view(-1, self.rows.stop - self.rows.start, self.num_keys))
        if self.shown is not None and self.inputs.sink is None and math.isfinite(masked_score):
            # A logsumexp near MASKED_SCORE would have no digits left for the differences between scores.
            top = scores.amax(-1, keepdim=True)
            scores.sub_(top.masked_fill_(top != masked_score, 0.0))
        return scores

    def get_sink(self) -> Tensor | None:
        """Returns log2(e) times each row's sink, [n * g, a/g * rows, 1]."""
        if self.inputs.sink is None:
            return None
        sink = self.inputs.sink.to(self.compute_dtype).mul(LOG2_E).view(1, -1, 1)
        sink = sink.expand(self.num_samples, -1, self.rows.stop - self.rows.start)
        return sink.reshape(self.num_samples * self.groups, -1, 1)

    def _cut_bias(self, bias: Tensor) -> Tensor:
        """Returns the block's part of a bias [b or 1, a or 1, sq or 1, sk]."""
        part = bias[self.samples] if bias.size(0) > 1 else bias
        return (part[:, :, self.rows] if part.size(2) > 1 else part)[..., self.keys]

    def add_to_bias(self, grad_bias: Tensor, grad_scores: Tensor) -> None:
        """Adds the gradient of the scores [n * g, a/g * rows, keys], summed where the bias is broadcast."""
        part = self._cut_bias(grad_bias)
        part.add_(self.split_heads(grad_scores).sum_to_size(part.shape))

    def _compute_distances(self) -> Tensor:
        """Returns how far behind its query each key stands, [rows, keys]."""
        row, column = (self._count(where, 0).to(self.compute_dtype) for where in (self.rows, self.keys))
        return column - (row.unsqueeze(-1) + self.diagonal)

    def compute_p(self, q: Tensor, k: Tensor, kept: Kept) -> tuple[Tensor, Tensor | None]:
        """Returns P [n * g, a/g * rows, keys] in the dtype of computation, and the sink's, [n * g, a/g * rows, 1]."""
        shape = (self.num_samples * self.groups, -1)
        sink = self.get_sink()
        if sink is not None:
            assert kept.logsumexp is not None
            sink = (sink - self.cut_statistic(kept.logsumexp) * LOG2_E).exp2_()
        if kept.probabilities is not None:
            found = kept.probabilities[self.samples, :, self.rows, self.keys].to(self.compute_dtype)
            return found.reshape(*shape, self.num_keys), sink
        assert kept.logsumexp is not None
        probabilities = self.compute_scores(q, k).sub_(self.cut_statistic(kept.logsumexp) * LOG2_E).exp2_()
        if kept.is_part:
            return probabilities, sink
        # The whole row is here: normalising it again takes the rounding of its logsumexp out, which for scores around
        # 1e8 is as large as the logarithm of how many are equal. Of none it stays 0.
        total = probabilities.sum(-1, keepdim=True)
        if sink is not None:
            total.add_(sink)
        total.masked_fill_(total == 0.0, float("inf"))
        return probabilities.div_(total), None if sink is None else sink.div_(total)

    def _hide_outside_of_the_window(self, scores: Tensor) -> None:
        """Writes minus infinity into scores [n * a, rows, keys] where the window hides a key.

        Only the triangles at both ends hold such keys. 0 is written first because a hidden score may be NaN: adding
        minus infinity would leave it NaN. Both steps together take a third of masked_fill_'s time.
        """
        num_rows, num_keys = scores.shape[1:]
        # A row sees the columns from its own number + first to + last.
        offset = self.rows.start - self.keys.start
        if self.last is not None and (last := offset + self.last) < num_keys - 1:
            start = max(0, last + 1)
            hidden = torch.full((num_rows, num_keys - start), -math.inf, dtype=scores.dtype, device=self.device)
            scores.tril_(last)[..., start:].add_(hidden.triu_(last + 1 - start))
        if self.first is not None and (first := offset + self.first) > 1 - num_rows:
            stop = max(0, min(num_keys, num_rows - 1 + first))
            hidden = torch.full((num_rows, stop), -math.inf, dtype=scores.dtype, device=self.device)
            scores.triu_(first)[..., :stop].add_(hidden.tril_(first - 1))

    def accumulate(self, total: Tensor, weights: Tensor, values: Tensor, scale: float) -> None:
        """total [n * a, keys, d] += scale * weights^T values, both [n * g, a/g * rows, ...]."""
        weights = weights.view(total.size(0), -1, self.num_keys).mT
        values = values.view(total.size(0), -1, values.size(-1))
        total[:, self.keys].add_(torch.bmm(weights, values), alpha=scale)

    def draw_keep_bits(self) -> Tensor:
        """Draws which probabilities dropout keeps, [n * g, a/g * rows, keys]."""
        settings = self.settings
        bits = keep_bits(
            int(settings.dropout_key or 0) % 2**64,
            settings.dropout_p,
            sample=(
                self._count(self.samples, 0) + (0 if settings.first_sample is None else settings.first_sample)
            ).view(-1, 1, 1),
            head=self._count(slice(0, self.heads), settings.first_head).view(-1, 1),
            row=self._count(self.rows, settings.first_row),
            num_columns=self.num_keys,
            first_column=(settings.first_column or 0) + self.keys.start,
        )
        return bits.reshape(self.num_samples * self.groups, -1, self.num_keys)

    def _count(self, where: slice, first: int) -> Tensor:
        return torch.arange(first + where.start, first + where.stop, dtype=torch.int64, device=self.device)


class BlockSums:
    """Sums the gradients of q, k and v [n * a or n * g, s, d] of some samples over the blocks of queries."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> None:
        self.q, self.k, self.v, self.grad_out = q, k, v, grad_out
        dtype = torch.promote_types(q.dtype, torch.float32)
        self.grad_q = torch.empty_like(q)
        # One per query head. compute_sums adds up a group's heads at the end, as torch does, which is more precise.
        self.grad_k, self.grad_v = (torch.zeros(q.size(0), *t.shape[1:], dtype=dtype, device=t.device) for t in (k, v))

    def add_block(
        self,
        block: Block,
        kept: Kept,
        row_sums: Tensor | None,
        grad_bias: Tensor | None = None,
        grad_sink: Tensor | None = None,
    ) -> None:
        """Adds the gradients that come from the block's queries; row_sums [b, a, sq] are there with is_part, and
        grad_bias and grad_sink, to which it adds too, where they are wanted."""
        if block.num_keys == 0:
            self.grad_q[:, block.rows] = 0.0
            return
        dtype, settings = self.q.dtype, block.settings
        probabilities, sink = block.compute_p(self.q, self.k, kept)
        # [n * g, a/g * rows, d]
        grad_block, q_block = block.cut(self.grad_out), block.cut(self.q)
        grad_probabilities = torch.bmm(grad_block, self.v[:, block.keys].mT).to(probabilities.dtype)
        survivors = probabilities
        if settings.dropout_p > 0:
            bits = block.draw_keep_bits()
            survivors = drop_(probabilities.clone(), bits)
            drop_(grad_probabilities, bits)
        block.accumulate(self.grad_v, survivors.to(dtype), grad_block, settings.keep_scale)
        grad_probabilities.mul_(settings.keep_scale)
        if sink is not None and grad_sink is not None:
            sink.mul_(torch.linalg.vecdot(probabilities, grad_probabilities).unsqueeze(-1))
            grad_sink.sub_(block.split_heads(sink).sum((0, 2, 3)))
        if row_sums is None:
            # probabilities * (grad_probabilities - sum(probabilities * grad_probabilities)) in one pass
            grad_scores = torch._softmax_backward_data(grad_probabilities, probabilities, -1, probabilities.dtype)
        else:
            grad_scores = grad_probabilities.sub_(block.cut_statistic(row_sums)).mul_(probabilities)
        grad_shown = grad_scores
        if block.shown is not None:
            is_added = settings.hidden_rows == "added"
            if grad_bias is not None or not is_added:
                grad_shown = drop_(grad_scores.clone() if is_added else grad_scores, block.shown)
        if grad_bias is not None:
            block.add_to_bias(grad_bias, grad_shown)
        if settings.softcap is not None:
            tangents = block.compute_products(self.q, self.k)
            grad_scores.addcmul_(grad_scores * tangents, tangents, value=-1)
        grad_scores = grad_scores.to(dtype)
        grad_q_block = torch.bmm(grad_scores, self.k[:, block.keys]).mul_(settings.softmax_scale)
        self.grad_q[:, block.rows] = grad_q_block.view(self.grad_q.size(0), -1, self.grad_q.size(-1))
        block.accumulate(self.grad_k, grad_scores, q_block, settings.softmax_scale)

    def compute_sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns grad_q [n * a, sq, d], grad_k and grad_v [n * g, sk, d]."""
        grad_k, grad_v = (t.unflatten(0, (self.k.size(0), -1)).sum(1) for t in (self.grad_k, self.grad_v))
        return self.grad_q, grad_k, grad_v

"""Specifies attention with dropout in plain torch, in blocks of queries, each of which takes all the keys that it sees.

    S = scale Q K^T,  P = exp(S - L),  L = logsumexp(S),  D = keep * P / (1 - p),  O = D V
    dV = D^T dO,  dP = keep * (dO V^T) / (1 - p),  dS = P * (dP - sum(P * dP)),  dQ = scale dS K,  dK = scale dS^T Q
With a softcap c, S = c tanh(scale Q K^T / c), and dQ and dK take (1 - (S / c)^2) dS in the place of dS. A bias, whose
gradient is dS, and ALiBi's distances are added to S. A sink z is one more score of every row, without a value: L is the
logarithm of exp(z) + sum(exp(S)), and its gradient is -sum(exp(z - L) * sum(P * dP)) over rows.
Matrix products run in the inputs' dtype, everything between them in float32 (float64 for float64 inputs).
A query head h reads key-value group h // (heads / groups), as in Megatron.

On a CPU the scores of a block stay in the cache; on a GPU, where the softmax form runs here, blocks are larger. As a
block has all keys, the softmax needs no running maximum, and a causal or windowed one ends at the last key that its
queries see. Backward computes the scores again, or reads the probabilities that forward kept. Scores are multiplied by
log2(e) and exponentials are powers of two, because torch's exp takes 15 times as long where a score is minus infinity.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from tempo_kernels.attention.settings import HIDING_BIAS, MASKED_SCORES, Gradients, Inputs, Kept, Settings
from tempo_kernels.opaque import cut, get_block_size, skip_alike, use_blocks
from tempo_kernels.philox import drop_, keep_bits

BLOCK_ELEMENTS = 1 << 19
GPU_BLOCK_ELEMENTS = 1 << 26
MIN_BLOCK_ROWS = 64
_LOG2_E = math.log2(math.e)
_LOWEST = torch.finfo(torch.float32).min
use_gpu_blocks = functools.partial(use_blocks, attention=GPU_BLOCK_ELEMENTS)
"""Makes blocks as large as on a GPU on every device inside the context."""


def forward(
    inputs: Inputs, settings: Settings, probabilities_out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Returns out [sq, b, a, dv] and logsumexp [b, a, sq] (float32) of q [sq, b, a, d], k [sk, b, g, d] and v
    [sk, b, g, dv].

    Where a query sees no key, out is 0 and the logsumexp infinite. The probabilities before dropout are written to
    `probabilities_out` [b, a, sq, sk], zeros, where one is given. out has q's dtype, unless another one is given.
    """
    q, v, compute_dtype = inputs.q, inputs.v, inputs.compute_dtype
    num_rows, batch, heads, _ = q.shape
    out = torch.empty(*q.shape[:-1], v.size(-1), dtype=out_dtype or q.dtype, device=q.device)
    logsumexp = torch.empty(batch, heads, num_rows, dtype=compute_dtype, device=q.device)
    rows_per_block, samples_per_block = _choose_block(inputs, settings)
    for samples in skip_alike(cut(batch, samples_per_block), q):
        q_heads, k_heads, v_heads = (_order_heads(t, samples) for t in inputs[:3])
        for rows in cut(num_rows, rows_per_block):
            block = _Block(samples, rows, inputs, settings)
            if block.num_keys == 0:
                nothing = float("inf") if inputs.sink is None else inputs.sink.to(compute_dtype).unsqueeze(-1)
                out[rows, samples], logsumexp[samples, :, rows] = 0.0, nothing
                continue
            scores = block.compute_scores(q_heads, k_heads)
            top = scores.amax(-1, keepdim=True).clamp_min_(_LOWEST)
            sink = block.get_sink()
            if sink is not None:
                top = torch.maximum(top, sink)
            p = scores.sub_(top).exp2_()
            total = p.sum(-1, keepdim=True)
            if sink is not None:
                total.add_((sink - top).exp2_())
            # Infinite where there is nothing to normalise: it divides to 0, and backward finds probabilities of 0.
            total.masked_fill_(total == 0.0, float("inf"))
            logsumexp[samples, :, rows] = block.split_heads(top.add_(total.log2()).div_(_LOG2_E)).squeeze(-1)
            if probabilities_out is not None:
                probabilities_out[samples, :, rows, block.keys] = block.split_heads(p / total)
            if settings.dropout_p > 0:
                drop_(p, block.draw_keep_bits())
            context = torch.bmm(p.to(q.dtype), v_heads[:, block.keys])
            context = context.to(compute_dtype).div_(total).mul_(settings.keep_scale)
            out[rows, samples] = block.split_heads(context).permute(2, 0, 1, 3).to(out.dtype)
    return out, logsumexp


def backward(
    grad_out: Tensor, inputs: Inputs, kept: Kept, settings: Settings, needs_grad_bias: bool = False
) -> Gradients:
    """Returns the gradients in the shapes of q, k, v, and in their dtype, or with is_part in that of softmax; of the
    sink where there is one, and of the bias if it is needed.

    Where whole rows are here, `kept.out` is not needed.
    """
    q, bias, sink, compute_dtype = inputs.q, inputs.bias, inputs.sink, inputs.compute_dtype
    dtype = compute_dtype if kept.is_part else q.dtype
    row_sums = sum_rows(grad_out, kept) if kept.is_part else None
    grads = [torch.empty(t.shape, dtype=dtype, device=t.device) for t in inputs[:3]]
    grad_bias, grad_sink = (
        None if t is None else torch.zeros(t.shape, dtype=compute_dtype, device=t.device)
        for t in (bias if needs_grad_bias else None, sink)
    )
    rows_per_block, samples_per_block = _choose_block(inputs, settings)
    for samples in skip_alike(cut(q.size(1), samples_per_block), q):
        heads, sums = _order_operands(inputs, grad_out, samples, grad_bias, grad_sink)
        for rows in cut(q.size(0), rows_per_block):
            _add_gradients(_Block(samples, rows, inputs, settings), *heads, kept, row_sums, sums)
        num_groups = heads[1].size(0)
        grouped = (t.unflatten(0, (num_groups, -1)).sum(1) for t in (sums.k, sums.v))
        for grad, found in zip(grads, (sums.q, *grouped), strict=True):
            grad[:, samples] = found.unflatten(0, (-1, grad.size(2))).permute(2, 0, 1, 3)
    if bias is not None and grad_bias is not None:
        grad_bias = grad_bias.to(bias.dtype)
    if sink is not None and grad_sink is not None:
        grad_sink = grad_sink.to(sink.dtype)
    return Gradients(grads[0], grads[1], grads[2], grad_bias, grad_sink)


def _order_operands(
    inputs: Inputs, grad_out: Tensor, samples: slice, grad_bias: Tensor | None, grad_sink: Tensor | None
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Gradients]:
    """Returns q, k, v and grad_out of some samples by heads, and the gradients to which their blocks add."""
    q, k, v, grad_out = (_order_heads(t, samples) for t in (*inputs[:3], grad_out))
    grad_q = torch.empty_like(q)
    # One per query head: a group's heads are added up at the end, as torch does, which is more precise.
    grad_k, grad_v = (torch.zeros(q.size(0), *t.shape[1:], dtype=inputs.compute_dtype, device=q.device) for t in (k, v))
    return (q, k, v, grad_out), Gradients(grad_q, grad_k, grad_v, grad_bias, grad_sink)


def _add_gradients(
    block: _Block, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, kept: Kept, row_sums: Tensor | None,
    sums: Gradients,
) -> None:  # fmt: skip
    """Adds the gradients that come from a block's queries to sums, whose q [n * a, sq, d], k and v [n * a, sk, d] are
    of the block's samples; q, k, v and grad_out are too. row_sums [b, a, sq] are there with is_part."""
    if block.num_keys == 0:
        sums.q[:, block.rows] = 0.0
        return
    dtype, settings = q.dtype, block.settings
    p, sink = block.compute_p(q, k, kept)
    # [n * g, a/g * rows, d]
    grad_block, q_block = block.cut(grad_out), block.cut(q)
    dp = torch.bmm(grad_block, v[:, block.keys].mT).to(p.dtype)
    survivors = p
    if settings.dropout_p > 0:
        bits = block.draw_keep_bits()
        survivors = drop_(p.clone(), bits)
        drop_(dp, bits)
    block.accumulate(sums.v, survivors.to(dtype), grad_block, settings.keep_scale)
    dp.mul_(settings.keep_scale)
    if sink is not None and sums.sink is not None:
        sink.mul_(torch.linalg.vecdot(p, dp).unsqueeze(-1))
        sums.sink.sub_(block.split_heads(sink).sum((0, 2, 3)))
    if row_sums is None:
        # p * (dp - sum(p * dp)) in one pass
        ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
    else:
        ds = dp.sub_(block.cut_statistic(row_sums)).mul_(p)
    ds_shown = ds
    if block.shown is not None:
        is_added = settings.hidden_rows == "added"
        if sums.bias is not None or not is_added:
            ds_shown = drop_(ds.clone() if is_added else ds, block.shown)
    if sums.bias is not None:
        part = block.cut_broadcast(sums.bias)
        part.add_(block.split_heads(ds_shown).sum_to_size(part.shape))
    if settings.softcap is not None:
        tangents = block.compute_products(q, k)
        ds.addcmul_(ds * tangents, tangents, value=-1)
    ds = ds.to(dtype)
    grad_q_block = torch.bmm(ds, k[:, block.keys]).mul_(settings.softmax_scale)
    sums.q[:, block.rows] = grad_q_block.view(q.size(0), -1, q.size(-1))
    block.accumulate(sums.k, ds, q_block, settings.softmax_scale)


def sum_rows(grad_out: Tensor, kept: Kept) -> Tensor:
    """Returns each row's sum of out * grad_out [b, a, sq], in the logsumexp's dtype: what the gradients of its
    scores share."""
    assert kept.out is not None and kept.logsumexp is not None
    dtype = kept.logsumexp.dtype
    return (kept.out.to(dtype) * grad_out.to(dtype)).sum(-1).permute(1, 2, 0)


def _choose_block(inputs: Inputs, settings: Settings) -> tuple[int, int]:
    """Returns how many queries and samples make a block: few enough that its scores stay in the cache and causal blocks
    end early, many enough that matrix products are fast and calls are worth their overhead."""
    q, k = inputs.q, inputs.k
    elements = get_block_size("attention", BLOCK_ELEMENTS if q.device.type == "cpu" else GPU_BLOCK_ELEMENTS)
    elements_per_row = max(1, q.size(2) * k.size(0))
    rows = elements // elements_per_row
    if settings.compute_window(q.size(0), k.size(0)) != (None, None):
        rows = min(rows, k.size(0) // 4)
    rows = max(get_block_size("attention_rows", MIN_BLOCK_ROWS), rows // 16 * 16)
    return rows, max(1, elements // (elements_per_row * min(rows, max(1, q.size(0)))))


def _order_heads(t: Tensor, samples: slice) -> Tensor:
    """Returns [n * a, s, d] of t [s, b, a, d]."""
    return t[:, samples].permute(1, 2, 0, 3).flatten(0, 1).contiguous()


class _Block:
    """Some queries of every head of n samples, and the keys that these queries can see.

    What has rows is [n * g, a/g * rows, ...]: the rows of a group's heads, which share keys, one behind the other.
    """

    def __init__(self, samples: slice, rows: slice, inputs: Inputs, settings: Settings) -> None:
        q, k, _, mask = inputs[:4]
        self.inputs, self.settings = inputs, settings
        self.samples, self.rows = samples, rows
        self.num_samples, self.num_rows = samples.stop - samples.start, rows.stop - rows.start
        self.heads, self.groups = q.size(2), self.num_samples * k.size(2)
        self.compute_dtype = inputs.compute_dtype
        self.diagonal = settings.compute_diagonal(q.size(0), k.size(0))
        self.first, self.last = settings.compute_window(q.size(0), k.size(0))
        last = k.size(0) if self.last is None else max(0, min(k.size(0), rows.stop + self.last))
        self.keys = slice(0 if self.first is None else max(0, min(last, rows.start + self.first)), last)
        self.num_keys = self.keys.stop - self.keys.start
        self.shown = None if mask is None else self._get_shown(mask)

    def _get_shown(self, mask: Tensor) -> Tensor:
        """Returns 0 where mask [b or 1, a or 1, sq or 1, sk] hides a key, all bits set elsewhere, for `drop_`:
        [n * g or 1, rows or a/g * rows or 1, keys]."""
        part, has_groups = self.cut_broadcast(mask), self.groups != self.num_samples * self.heads
        if has_groups or part.shape[:2] not in ((1, 1), (self.num_samples, self.heads)):
            num_rows = self.num_rows if has_groups else part.size(2)
            part = part.expand(self.num_samples, self.heads, num_rows, -1).reshape(self.groups, -1, self.num_keys)
        else:
            part = part.flatten(0, 1)
        return part.to(torch.int64 if self.compute_dtype == torch.float64 else torch.int32) - 1

    def cut(self, t: Tensor) -> Tensor:
        """Returns [n * g, a/g * rows, d] of t [n * a, s, d]."""
        return t[:, self.rows].reshape(self.groups, -1, t.size(-1))

    def cut_statistic(self, t: Tensor) -> Tensor:
        """Returns [n * g, a/g * rows, 1] of t [b, a, sq]."""
        return t[self.samples, :, self.rows].reshape(self.groups, -1, 1)

    def cut_broadcast(self, t: Tensor) -> Tensor:
        """Returns the block's part of t [b or 1, a or 1, sq or 1, sk]."""
        part = t[self.samples] if t.size(0) > 1 else t
        return (part[:, :, self.rows] if part.size(2) > 1 else part)[..., self.keys]

    def split_heads(self, t: Tensor) -> Tensor:
        """Returns [n, a, rows, x] of t [n * g, a/g * rows, x]."""
        return t.view(self.num_samples, self.heads, -1, t.size(-1))

    def compute_products(self, q: Tensor, k: Tensor) -> Tensor:
        """Returns log2(e) times the scores [n * g, a/g * rows, keys] in the dtype of computation, without
        what is added to them; with a softcap, the tangents by which it is multiplied."""
        scale, operands = self.settings.softmax_scale, (self.cut(q), k[:, self.keys].mT)
        scale = scale * _LOG2_E if self.settings.softcap is None else scale / self.settings.softcap
        if q.dtype == self.compute_dtype:
            shape = (*operands[0].shape[:2], self.num_keys)
            scores = torch.empty(shape, dtype=q.dtype, device=q.device).baddbmm_(*operands, beta=0, alpha=scale)
        else:
            scores = torch.bmm(*operands).to(self.compute_dtype).mul_(scale)
        return scores if self.settings.softcap is None else scores.tanh_()

    def compute_scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Returns log2(e) times the scores [n * g, a/g * rows, keys] in the dtype of computation."""
        scores, masked_score = self.compute_products(q, k), MASKED_SCORES[self.settings.hidden_rows] * _LOG2_E
        if self.settings.softcap is not None:
            scores.mul_(self.settings.softcap * _LOG2_E)
        if self.inputs.bias is not None:
            bias = self.cut_broadcast(self.inputs.bias).to(self.compute_dtype)
            self.split_heads(scores).add_(bias.masked_fill(bias < HIDING_BIAS, -math.inf), alpha=_LOG2_E)
        if self.inputs.alibi_slopes is not None:
            slopes = self.inputs.alibi_slopes.to(self.compute_dtype).mul(_LOG2_E).view(-1, 1, 1)
            self.split_heads(scores).addcmul_(slopes, self._compute_distances())
        if self.shown is not None:
            hiding = torch.zeros_like(self.shown, dtype=scores.dtype).masked_fill_(self.shown == 0, masked_score)
            drop_(scores, self.shown).add_(hiding)
        self._hide_outside_of_the_window(scores.view(-1, self.num_rows, self.num_keys))
        if self.shown is not None and self.inputs.sink is None and math.isfinite(masked_score):
            # A logsumexp near MASKED_SCORE would have no digits left for the differences between scores.
            top = scores.amax(-1, keepdim=True)
            scores.sub_(top.masked_fill_(top != masked_score, 0.0))
        return scores

    def get_sink(self) -> Tensor | None:
        """Returns log2(e) times each row's sink, [n * g, a/g * rows, 1]."""
        if self.inputs.sink is None:
            return None
        sink = self.inputs.sink.to(self.compute_dtype).mul(_LOG2_E).view(1, -1, 1)
        return sink.expand(self.num_samples, -1, self.num_rows).reshape(self.groups, -1, 1)

    def compute_p(self, q: Tensor, k: Tensor, kept: Kept) -> tuple[Tensor, Tensor | None]:
        """Returns P [n * g, a/g * rows, keys] in the dtype of computation, and the sink's, [n * g, a/g * rows, 1]."""
        sink = self.get_sink()
        if sink is not None:
            assert kept.logsumexp is not None
            sink = (sink - self.cut_statistic(kept.logsumexp) * _LOG2_E).exp2_()
        if kept.probabilities is not None:
            p = kept.probabilities[self.samples, :, self.rows, self.keys].to(self.compute_dtype)
            return p.reshape(self.groups, -1, self.num_keys), sink
        assert kept.logsumexp is not None
        p = self.compute_scores(q, k).sub_(self.cut_statistic(kept.logsumexp) * _LOG2_E).exp2_()
        if kept.is_part:
            return p, sink
        # The whole row is here: normalising it again takes the rounding of its logsumexp out, which for scores around
        # 1e8 is as large as the logarithm of how many are equal. Of none it stays 0.
        total = p.sum(-1, keepdim=True)
        if sink is not None:
            total.add_(sink)
        total.masked_fill_(total == 0.0, float("inf"))
        return p.div_(total), None if sink is None else sink.div_(total)

    def _compute_distances(self) -> Tensor:
        """Returns how far behind its query each key stands, [rows, keys]."""
        row, column = (self._count(where, 0).to(self.compute_dtype) for where in (self.rows, self.keys))
        return column - (row.unsqueeze(-1) + self.diagonal)

    def _hide_outside_of_the_window(self, scores: Tensor) -> None:
        """Writes minus infinity into scores [n * a, rows, keys] where the window hides a key.

        Only the triangles at both ends hold such keys. 0 is written first because a hidden score may be NaN: adding
        minus infinity would leave it NaN. Both steps together take a third of masked_fill_'s time.
        """
        num_rows, num_keys = self.num_rows, self.num_keys
        # A row sees the columns from its own number + first to + last.
        offset = self.rows.start - self.keys.start
        if self.last is not None and (last := offset + self.last) < num_keys - 1:
            start = max(0, last + 1)
            hidden = torch.full((num_rows, num_keys - start), -math.inf, dtype=scores.dtype, device=scores.device)
            scores.tril_(last)[..., start:].add_(hidden.triu_(last + 1 - start))
        if self.first is not None and (first := offset + self.first) > 1 - num_rows:
            stop = max(0, min(num_keys, num_rows - 1 + first))
            hidden = torch.full((num_rows, stop), -math.inf, dtype=scores.dtype, device=scores.device)
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
            int(settings.dropout_key) % 2**64,
            settings.dropout_p,
            sample=(self._count(self.samples, 0) + settings.first_sample).view(-1, 1, 1),
            head=self._count(slice(0, self.heads), settings.first_head).view(-1, 1),
            row=self._count(self.rows, settings.first_row),
            num_columns=self.num_keys,
            first_column=(settings.first_column or 0) + self.keys.start,
        )
        return bits.reshape(self.groups, -1, self.num_keys)

    def _count(self, where: slice, first: int) -> Tensor:
        return torch.arange(first + where.start, first + where.stop, dtype=torch.int64, device=self.inputs.q.device)

"""Specifies attention with dropout in plain torch, with all [b, a, sq, sk] scores at once.

    S = scale Q K^T,  P = exp(S - L),  L = logsumexp(S),  D = keep * P / (1 - p),  O = D V
    dV = D^T dO,  dP = keep * (dO V^T) / (1 - p),  dS = P * (dP - sum(P * dP)),  dQ = scale dS K,  dK = scale dS^T Q
With a softcap c, S = c tanh(scale Q K^T / c), and dQ and dK take (1 - (S / c)^2) dS in the place of dS. A bias, whose
gradient is dS, and ALiBi's distances are added to S. A sink z is one more score of every row, without a value: L is the
logarithm of exp(z) + sum(exp(S)), and its gradient is -sum(exp(z - L) * sum(P * dP)) over rows.
Matrix products run in the inputs' dtype, everything between them in float32 (float64 for float64 inputs).
A query head h reads key-value group h // (heads / groups), as in Megatron.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tempo_kernels.attention.settings import HIDING_BIAS, Gradients, Inputs, Kept, Settings
from tempo_kernels.philox import drop_mask

_LOWEST = torch.finfo(torch.float32).min


def forward(
    inputs: Inputs,
    settings: Settings,
    probabilities_out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns out [sq, b, a, dv] and logsumexp [b, a, sq] (float32) of q [sq, b, a, d], k [sk, b, g, d] and v
    [sk, b, g, dv].

    Where a query sees no key, out is 0 and the logsumexp infinite. The probabilities before dropout are written to
    `probabilities_out` [b, a, sq, sk], zeros, where one is given. out has q's dtype, unless another one is given.
    """
    q, v = inputs.q, inputs.v
    heads_v = _order_heads(v, q.size(2), inputs.key_lengths)
    scores = _compute_scores(inputs, settings)
    top = F.pad(scores, (0, 1), value=_LOWEST).amax(-1, keepdim=True)
    sink = _get_sink(inputs)
    if sink is not None:
        top = torch.maximum(top, sink)
    powers = (scores - top).exp()
    total = powers.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink - top).exp()
    # A query without keys gets an infinite logsumexp: output and probabilities come out as 0, in backward too.
    total = total.masked_fill(total == 0.0, float("inf"))
    if probabilities_out is not None:
        probabilities_out.copy_(powers / total)
    context = (_drop(powers, settings).to(q.dtype) @ heads_v).to(total.dtype) / total * settings.keep_scale
    return context.to(out_dtype or q.dtype).permute(2, 0, 1, 3).contiguous(), (top + total.log()).squeeze(-1)


def backward(
    grad_out: Tensor, inputs: Inputs, kept: Kept, settings: Settings, needs_grad_bias: bool = False
) -> Gradients:
    """Returns the gradients in the shapes of q, k, v, and in their dtype, or with is_part in that of softmax; of the
    sink where there is one, and of the bias if it is needed.

    Where whole rows are here, `kept.out` is not needed.
    """
    q, k, v, mask, key_lengths = inputs[:5]
    heads_q, heads_k, heads_v, grad = (_order_heads(t, q.size(2), None) for t in (q, k, v, grad_out))
    if key_lengths is not None:
        heads_k, heads_v = (_order_heads(t, q.size(2), key_lengths) for t in (k, v))
    sink = _get_sink(inputs)
    if sink is not None:
        assert kept.logsumexp is not None
        sink = (sink - kept.logsumexp.unsqueeze(-1)).exp()
    if kept.probabilities is None:
        assert kept.logsumexp is not None
        probabilities = (_compute_scores(inputs, settings) - kept.logsumexp.unsqueeze(-1)).exp()
        if not kept.is_part:
            # Normalise again: for scores around 1e8 the rounding error of a logsumexp is not small.
            total = probabilities.sum(-1, keepdim=True)
            total = total if sink is None else total + sink
            total = total.masked_fill(total == 0.0, float("inf"))
            probabilities, sink = probabilities / total, None if sink is None else sink / total
    else:
        probabilities = kept.probabilities.to(torch.promote_types(q.dtype, torch.float32))
    grad_v = (_drop(probabilities, settings).to(q.dtype).mT @ grad).to(probabilities.dtype) * settings.keep_scale
    grad_probabilities = _drop((grad @ heads_v.mT).to(probabilities.dtype), settings) * settings.keep_scale
    grad_scores = probabilities * grad_probabilities
    row_sums = sum_rows(grad_out, kept) if kept.is_part else grad_scores.sum(-1)
    grad_scores = grad_scores - probabilities * row_sums.unsqueeze(-1)
    grad_shown = grad_scores if mask is None else grad_scores.masked_fill(mask, 0.0)
    if settings.hidden_rows != "added":
        grad_scores = grad_shown
    grad_sink = grad_bias = None
    if inputs.sink is not None and sink is not None:
        grad_sink = (sink.squeeze(-1) * row_sums).sum((0, 2)).neg().to(inputs.sink.dtype)
    if inputs.bias is not None and needs_grad_bias:
        grad_bias = grad_shown.sum_to_size(inputs.bias.shape).to(inputs.bias.dtype)
    if settings.softcap is not None:
        grad_scores = grad_scores * (1 - (_compute_products(inputs, settings) / settings.softcap) ** 2)
    grad_scores = grad_scores.to(q.dtype)
    grad_q = (grad_scores @ heads_k) * settings.softmax_scale
    grad_k = (grad_scores.mT @ heads_q).to(probabilities.dtype) * settings.softmax_scale
    # Summed over the heads of a group, [b, g, a/g, s, d], and back to the inputs' layout.
    found = zip((grad_q, grad_k, grad_v), (q, k, v), strict=True)
    dtype = probabilities.dtype if kept.is_part else q.dtype
    grads = [g.unflatten(1, (t.size(2), -1)).sum(2).to(dtype).permute(2, 0, 1, 3).contiguous() for g, t in found]
    return Gradients(grads[0], grads[1], grads[2], grad_bias, grad_sink)


def sum_rows(grad_out: Tensor, kept: Kept) -> Tensor:
    """Returns each row's sum of out * grad_out [b, a, sq], in the logsumexp's dtype: what the gradients of its
    scores share."""
    assert kept.out is not None and kept.logsumexp is not None
    dtype = kept.logsumexp.dtype
    return (kept.out.to(dtype) * grad_out.to(dtype)).sum(-1).permute(1, 2, 0)


def _order_heads(t: Tensor, num_heads: int, key_lengths: Tensor | None) -> Tensor:
    """Returns [b, a, s, d] of [s, b, g, d]: each group once per head that reads it, and zeros behind key_lengths."""
    t = t.permute(1, 2, 0, 3).repeat_interleave(num_heads // t.size(2), dim=1)
    if key_lengths is None:
        return t
    column = torch.arange(t.size(2), dtype=torch.int64, device=t.device)
    return t.masked_fill((column >= key_lengths.unsqueeze(-1))[:, None, :, None], 0.0)


def _get_sink(inputs: Inputs) -> Tensor | None:
    """Returns the sink as [a, 1, 1] in the dtype of computation."""
    if inputs.sink is None:
        return None
    return inputs.sink.to(torch.promote_types(inputs.q.dtype, torch.float32)).view(-1, 1, 1)


def _compute_products(inputs: Inputs, settings: Settings) -> Tensor:
    """Returns [b, a, sq, sk] in the dtype of computation: scaled products of queries and keys, within the softcap."""
    q, k = inputs.q, inputs.k
    scores = _order_heads(q, q.size(2), None) @ _order_heads(k, q.size(2), inputs.key_lengths).mT
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)) * settings.softmax_scale
    return scores if settings.softcap is None else (scores / settings.softcap).tanh() * settings.softcap


def _compute_scores(inputs: Inputs, settings: Settings) -> Tensor:
    """Returns [b, a, sq, sk] in the dtype of computation; minus infinity where window, key_lengths and bias hide a key,
    and the masked score where the mask does."""
    q, k, _, mask, key_lengths = inputs[:5]
    scores = _compute_products(inputs, settings)
    row = torch.arange(q.size(0), dtype=torch.int64, device=q.device).unsqueeze(-1)
    column = torch.arange(k.size(0), dtype=torch.int64, device=q.device)
    if inputs.bias is not None:
        bias = inputs.bias.to(scores.dtype)
        scores = scores + bias.masked_fill(bias < HIDING_BIAS, float("-inf"))
    if inputs.alibi_slopes is not None:
        distance = column - row - settings.compute_diagonal(q.size(0), k.size(0))
        scores = scores + inputs.alibi_slopes.to(scores.dtype).view(-1, 1, 1) * distance
    if mask is not None:
        scores = scores.masked_fill(mask, settings.masked_score)
    first, last = settings.compute_window(q.size(0), k.size(0))
    if first is not None:
        scores = scores.masked_fill(column < row + first, float("-inf"))
    if last is not None:
        scores = scores.masked_fill(column > row + last, float("-inf"))
    if key_lengths is not None:
        scores = scores.masked_fill(column >= key_lengths.view(-1, 1, 1, 1), float("-inf"))
    if mask is None or k.size(0) == 0 or inputs.sink is not None or settings.hidden_rows == "zero":
        return scores
    # A logsumexp near MASKED_SCORE would have no digits left for the differences between scores.
    top = scores.amax(-1, keepdim=True)
    return scores - top.masked_fill(top != settings.masked_score, 0.0)


def _drop(weights: Tensor, settings: Settings) -> Tensor:
    """Returns weights [b, a, sq, sk], 0 where dropout drops."""
    if settings.dropout_p == 0:
        return weights
    sample, head, row = (torch.arange(n, dtype=torch.int64, device=weights.device) for n in weights.shape[:3])
    dropped = drop_mask(
        int(settings.dropout_key or 0) % 2**64,
        settings.dropout_p,
        sample=(sample + (0 if settings.first_sample is None else settings.first_sample)).view(-1, 1, 1),
        head=(head + settings.first_head).view(-1, 1),
        row=row + settings.first_row,
        num_columns=weights.size(-1),
        first_column=settings.first_column or 0,
    )
    return weights.masked_fill(dropped, 0.0)

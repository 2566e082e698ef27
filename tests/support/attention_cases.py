"""What the tests of attention share: shapes and masks, settings, and unfused attention to hold results against."""

from __future__ import annotations

import functools

import torch

from tempo_kernels.attention import (
    add_sink,
    attend_block,
    attention,
    differentiate_block,
    differentiate_sink,
    merge_blocks,
)
from tempo_kernels.attention.settings import MASKED_SCORE, Settings
from tempo_kernels.philox import drop_mask, effective_probability

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KEY, FIRST_SAMPLE, FIRST_HEAD, SCALE = 0xABCDEF0123456789, 3, 4, 0.125


def settings(causal=True, p=0.1, key=KEY, first_sample=FIRST_SAMPLE, window_size=None, **firsts):
    return Settings(causal, SCALE, p, key, first_sample, FIRST_HEAD, window_size, **firsts)


def reference(q, k, v, chosen, mask=None, sink=None, bias=None, alibi_slopes=None):
    """Unfused attention with the mask of dropout from its definition, and the value that hidden_rows stands for."""
    (sq, b, a, _), sk, column = q.shape, k.size(0), chosen.first_column
    k, v = (t.repeat_interleave(a // t.size(2), 2) for t in (k, v))
    scores = torch.einsum("sbad,tbad->bast", q, k) * chosen.softmax_scale
    # Positions count from the end, where the last query sees the last key, unless they are given.
    diagonal = sk - sq if column is None else chosen.first_row - column
    distance = torch.arange(sk) - (torch.arange(sq).unsqueeze(-1) + diagonal)
    if chosen.softcap is not None:
        scores = chosen.softcap * (scores / chosen.softcap).tanh()
    if bias is not None:
        scores = scores + bias
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.to(scores.dtype).view(-1, 1, 1) * distance
    if mask is not None and chosen.hidden_rows == "added":
        scores = scores + scores.new_zeros(mask.shape).masked_fill(mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores.masked_fill(mask, MASKED_SCORE)
    left, right = chosen.window_size or (-1, -1)
    hidden = torch.zeros(b, 1, sq, sk, dtype=torch.bool)
    hidden |= (distance > (0 if chosen.causal else right)) & (chosen.causal or right >= 0)
    hidden |= (distance < -left) & (left >= 0)
    if mask is not None and chosen.hidden_rows == "zero":
        hidden = hidden | mask
    scores = scores.masked_fill(hidden, float("-inf"))
    if sink is None:
        probabilities = scores.softmax(-1)
    else:
        probabilities = torch.cat((scores, sink.view(1, a, 1, 1).expand(b, a, sq, 1)), -1).softmax(-1)[..., :-1]
    probabilities = probabilities.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    if chosen.dropout_p:
        dropped = drop_mask(
            chosen.dropout_key,
            chosen.dropout_p,
            sample=torch.arange(chosen.first_sample, chosen.first_sample + b).view(-1, 1, 1),
            head=torch.arange(chosen.first_head, chosen.first_head + a).unsqueeze(-1),
            row=torch.arange(chosen.first_row, chosen.first_row + sq),
            num_columns=(column or 0) + sk,
        )[..., column or 0 :]
        probabilities = probabilities * (~dropped) / (1 - effective_probability(chosen.dropout_p))
    return torch.einsum("bast,tbad->sbad", probabilities, v)


def ours(q, k, v, chosen, mask=None, **more):
    return attention(q, k, v, mask=mask, **vars(chosen), **more)


def attend_in_parts(q, k, v, chosen, sink=None, alibi_slopes=None):
    """Attention by parts of 16 keys, as under context parallelism."""
    return _Parts.apply(q, k, v, sink, alibi_slopes, chosen)


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, slopes, chosen):
        numbers = {name: number for name, number in vars(chosen).items() if name != "hidden_rows"}
        places = [numbers | {"first_column": first, "alibi_slopes": slopes} for first in range(0, k.size(0), 16)]
        ctx.parts = list(zip(k.split(16), v.split(16), places, strict=True))
        out, logsumexp = functools.reduce(merge_blocks, (attend_block(q, *part, **at) for *part, at in ctx.parts))
        if sink is not None:
            out, logsumexp = add_sink(out, logsumexp, sink)
        ctx.save_for_backward(q, out, logsumexp, sink)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx, grad_out):
        q, out, logsumexp, sink = ctx.saved_tensors
        parts = [differentiate_block(grad_out, out, logsumexp, q, *part, **at) for *part, at in ctx.parts]
        grad_q, grad_k, grad_v = zip(*parts, strict=True)
        assert {t.dtype for t in (*grad_q, *grad_k, *grad_v)} == {torch.promote_types(q.dtype, torch.float32)}
        grads = (t.to(q.dtype) for t in (sum(grad_q), torch.cat(grad_k), torch.cat(grad_v)))
        grad_sink = None if sink is None else differentiate_sink(grad_out, out, logsumexp, sink)
        return *grads, grad_sink, None, None


SLOPES = torch.tensor([0.5, 0.25, 0.0625, 0.3])
# What is given: a sink, the softcap, ALiBi's slopes, whether the bias has samples, heads and queries.
CHANGES = {
    "sink": (True, None, False, None),
    "softcap": (False, 0.7, False, None),
    "slopes": (False, None, True, None),
    "bias of heads": (False, None, False, (False, True, True)),
    "bias of samples": (False, None, False, (True, False, False)),
    "bias of rows": (False, None, False, (True, False, True)),
    "all": (True, 1.5, True, (True, True, True)),
}
# causal, window_size, whether there is a mask
SEEN = {
    "all": (False, None, False),
    "causal": (True, None, False),
    "window": (False, (5, 2), False),
    "mask": (True, None, True),
}


def make_change(change, b, a, sq, sk):
    """The sink, the bias, the softcap and ALiBi's slopes of one of CHANGES."""
    has_sink, softcap, has_slopes, has_sizes = change
    sizes = has_sizes and [size if has_size else 1 for size, has_size in zip((b, a, sq), has_sizes, strict=True)]
    bias = None if sizes is None else torch.randn(*sizes, sk)
    return torch.randn(a) if has_sink else None, bias, softcap, SLOPES if has_slopes else None


def make_mask(b, sq, sk):
    mask = torch.rand(b, 1, sq, sk) < 0.3
    mask[0, 0, 2] = True  # a row whose every key is hidden
    return mask


def padding(b, sq, sk):
    """Samples of different lengths; in the last one everything is hidden."""
    lengths = torch.linspace(sk, 0, b).long()
    return (torch.arange(sk) >= lengths.view(-1, 1)).view(b, 1, 1, sk).expand(b, 1, sq, sk)


# Masks are made when the module is imported, before any test is seeded.
_random = torch.Generator().manual_seed(1234)

# sq, sk, b, heads, groups, d, causal, mask
CASES = {
    "causal": (65, 65, 2, 4, 4, 64, True, None),
    "several blocks": (700, 700, 1, 3, 3, 16, True, None),
    "full": (33, 33, 2, 2, 2, 32, False, None),
    "grouped queries": (40, 40, 2, 6, 2, 16, True, None),
    "one group": (24, 24, 1, 4, 1, 128, True, None),
    "fewer queries than keys": (5, 37, 2, 2, 2, 16, True, None),
    "cross attention": (37, 11, 2, 2, 2, 16, False, None),
    "one token": (1, 1, 1, 1, 1, 8, True, None),
    "padding": (20, 20, 3, 2, 2, 16, False, padding(3, 20, 20)),
    "padding for all rows": (20, 20, 3, 4, 2, 16, False, padding(3, 1, 20)),
    "a mask per head": (20, 20, 1, 4, 4, 16, False, torch.rand(1, 4, 20, 20, generator=_random) < 0.3),
    "a mask on top of causal": (20, 20, 2, 4, 2, 16, True, torch.rand(2, 1, 20, 20, generator=_random).tril() > 0.7),
    "wide heads": (17, 17, 1, 2, 1, 256, True, None),
}

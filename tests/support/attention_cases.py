"""What the tests of attention share: shapes and masks, settings, and unfused attention to hold results against."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

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
        # Hidden keys give none of its gradient, whatever their rows get.
        scores = scores + (bias if mask is None else torch.where(mask, bias.detach(), bias))
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
# causal, window_size, whether there is a mask, what the rows are whose keys it hides.
SEEN = {
    "all": (False, None, False, "uniform"),
    "causal": (True, None, False, "uniform"),
    "window": (False, (5, 2), False, "uniform"),
    "mask": (True, None, True, "uniform"),
    "mask that is added": (True, None, True, "added"),
    "mask that is added in windows": (False, (4, 3), True, "added"),
    "mask with rows of zeros": (True, (9, 0), True, "zero"),
}


def make_change(change, b, a, sq, sk):
    """The sink, the bias, the softcap and ALiBi's slopes of one of CHANGES."""
    has_sink, softcap, has_slopes, has_sizes = change
    sizes = has_sizes and [size if has_size else 1 for size, has_size in zip((b, a, sq), has_sizes, strict=True)]
    bias = None if sizes is None else torch.randn(*sizes, sk)
    return torch.randn(a) if has_sink else None, bias, softcap, SLOPES[:a] if has_slopes else None


def make_mask(b, sq, sk):
    mask = torch.rand(b, 1, sq, sk) < 0.3
    mask[0, 0, 2] = True  # a row whose every key is hidden
    return mask


def pad(*lengths, sk=70):
    """Samples of these lengths."""
    return torch.arange(sk) >= torch.tensor(lengths).view(-1, 1, 1, 1)


class Place(NamedTuple):
    """Sizes, and which keys a query sees: maybe of parts of a longer sequence."""

    sq: int
    sk: int
    b: int = 1
    a: int = 2
    g: int = 1
    d: int = 32
    dv: int | None = None
    causal: bool = True
    window_size: tuple[int, int] | None = None
    first_row: int = 0
    first_column: int | None = None
    make_mask: Callable[[], Tensor] | None = None

    def settings(self, p, **more):
        seen = {"window_size": self.window_size, "first_row": self.first_row, "first_column": self.first_column}
        return settings(self.causal, p, **seen, **more)

    def make_inputs(self, dtype=torch.float32, device="cpu"):
        """q, k and v, as slices of one tensor where they can be, as Megatron has them, and grad."""
        sizes = [self.d, self.d, self.dv or self.d]
        grad = torch.randn(self.sq, self.b, self.a, sizes[2], device=device).to(dtype)
        if self.sq == self.sk and self.a == self.g:
            return *torch.randn(self.sq, self.b, self.a, sum(sizes), device=device).to(dtype).split(sizes, -1), grad
        lengths = (self.sq, self.a), (self.sk, self.g), (self.sk, self.g)
        return *(
            torch.randn(s, self.b, heads, size, device=device).to(dtype)
            for (s, heads), size in zip(lengths, sizes, strict=True)
        ), grad


PLACES = {
    "one token": Place(1, 1, a=1, g=1),
    "odd": Place(37, 37, 2, 3, 3),
    "blocks": Place(128, 128, 1, 2, 2, 64),
    "a block and a bit": Place(130, 130, 1, 1, 1, 64),
    "head_dim 80": Place(70, 70, 1, 2, 2, 80),
    "head_dim 36": Place(20, 20, 1, 2, 2, 36),
    "head_dim 128": Place(140, 140, 1, 1, 1, 128),
    "head_dim 256": Place(66, 66, 1, 1, 1, 256),
    "grouped": Place(130, 130, 1, 4, 2),
    "one group": Place(65, 65, 1, 4, 1, 40),
    "few queries": Place(5, 150, d=64),
    "one query": Place(1, 129, 1, 2, 1, 64),
    "no query": Place(0, 4),
    "no sample": Place(6, 6, 0),
    "all keys": Place(70, 150, d=64, causal=False),
    "more queries than keys": Place(150, 11, d=64, causal=False),
    "queries without a key": Place(150, 20, causal=False, window_size=(2, 0)),
    **{f"window {size}": Place(150, 150, causal=False, window_size=size) for size in ((5, 0), (100, 0), (3, 4))},
    **{
        f"window {size}": Place(40, 200, causal=False, window_size=size)
        for size in ((-1, 2), (7, -1), (3, 40), (0, 0), (-1, 0), (-1, -1))
    },
    "narrow values": Place(70, 70, d=96, dv=64),
    "wide values": Place(40, 70, d=24, dv=40, causal=False),
    "queries behind keys": Place(40, 140, first_row=100),
    "the last keys": Place(130, 40, dv=16, first_row=3, first_column=16),
    "a window of later keys": Place(40, 70, causal=False, window_size=(20, 3), first_row=100, first_column=64),
    "keys that nobody sees": Place(20, 20, first_column=40),
    "padding": Place(70, 70, 3, causal=False, make_mask=lambda: pad(70, 40, 0)),
    "a mask per row": Place(70, 70, 2, make_mask=lambda: torch.rand(2, 1, 70, 70) < 0.4),
    "a mask per head": Place(70, 70, causal=False, make_mask=lambda: torch.rand(1, 2, 70, 70) < 0.4),
    "rows that see nothing": Place(70, 70, 2, make_mask=lambda: (torch.rand(2, 2, 70, 1) < 0.5).expand(2, 2, 70, 70)),
}

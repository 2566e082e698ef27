"""Attention over a part of the keys at a time, for ring attention: the parts are merged by their logsumexps.

The algorithm is Ring Attention (Liu et al., arXiv 2310.01889). Every rank holds a part of the keys, and the parts go
around. The out and logsumexp of the parts seen so far are merged with the next part's. Backward takes the logsumexp of
the whole row, so that a part's probabilities and gradients are the whole row's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tempo_kernels.attention import cpu
from tempo_kernels.attention.checks import check_settings, check_tensors
from tempo_kernels.attention.eager import sum_rows
from tempo_kernels.attention.settings import Gradients, Inputs, Kept, Settings
from tempo_kernels.backend import choose_backend

Result = tuple[Tensor, Tensor]


def attend_block(q: Tensor, k: Tensor, v: Tensor, *, first_row: int, first_column: int, **others: Any) -> Result:
    """Returns out and logsumexp of a part of the keys, without autograd.

    Args: as `attention`, for queries from position first_row on and keys from position first_column on. others are
        causal, softmax_scale, window_size, softcap, alibi_slopes and what dropout draws by.

    Returns:
        out: [sq, b, a, dv] in float32 (float64 for float64), softmax over these keys with dropout.
        logsumexp: [b, a, sq] of out's dtype; infinite where a query sees none of these keys, and out is 0 there.
    Raises: ValueError as `attention`.
    """
    inputs, settings = _check(q, k, v, first_row=first_row, first_column=first_column, **others)
    with torch.no_grad():
        found: Result = choose_backend(q, cpu).forward(inputs, settings, out_dtype=inputs.compute_dtype)
    return found


def differentiate_block(
    grad_out: Tensor, out: Tensor, logsumexp: Tensor, q: Tensor, k: Tensor, v: Tensor, *,
    first_row: int, first_column: int, **others: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns what a part of the keys adds to the gradients of q, k and v, in float32 (float64 for float64).

    Args: as `attend_block`, and
        grad_out, out: [sq, b, a, dv], of all keys, any floating-point dtype; grad_out is cast to q's.
        logsumexp: [b, a, sq], of all keys, and of the sink where there is one.

    Error: as of `attention` in 16 bits. In float32 and float64 the logsumexp's rounding stays in the probabilities: at
        most 8 eps of the largest gradient for scores of an ordinary size.
    Raises: ValueError as `attend_block`.
    """
    inputs, settings = _check(q, k, v, first_row=first_row, first_column=first_column, **others)
    kept = Kept(out.contiguous(), logsumexp.contiguous(), is_part=True)
    with torch.no_grad():
        grads: Gradients = choose_backend(q, cpu).backward(grad_out.to(q.dtype), inputs, kept, settings)
    return grads.q, grads.k, grads.v


def _check(
    q: Tensor, k: Tensor, v: Tensor, *, alibi_slopes: Tensor | None = None, **numbers: Any
) -> tuple[Inputs, Settings]:
    inputs, settings = Inputs(q, k, v, alibi_slopes=alibi_slopes), Settings(**numbers)
    check_tensors(inputs, settings)
    check_settings(q, settings, "flash")
    return inputs, settings


def merge_blocks(first: Result, second: Result) -> Result:
    """Returns out and logsumexp of two parts of the keys together. A row that saw no key in a part takes the other's.

    Args:
        first, second: (out [sq, b, a, dv], logsumexp [b, a, sq]), as `attend_block` returns them.
    """
    sums = torch.stack((first[1], second[1]))
    sums = sums.masked_fill(sums.isposinf(), float("-inf"))
    logsumexp = sums.logsumexp(0)
    # A softmax, and not exp(sums - logsumexp): the weights of a row then add up to 1 whatever its logsumexp's rounding
    # is, which would grow with every part. Of a row without keys both are 0.
    weights = sums.softmax(0).masked_fill(logsumexp.isneginf(), 0.0).permute(0, 3, 1, 2).unsqueeze(-1)
    logsumexp = logsumexp.masked_fill(logsumexp.isneginf(), float("inf"))
    return first[0] * weights[0] + second[0] * weights[1], logsumexp


def add_sink(out: Tensor, logsumexp: Tensor, sink: Tensor) -> Result:
    """Returns out and logsumexp of all keys and a sink: what `attention` with this sink returns and keeps.

    To be called once, when all parts are merged. Autograd goes through it; in an autograd.Function of parts, backward
    takes the new out and logsumexp, for `differentiate_block` and for `differentiate_sink`.

    Args:
        out, logsumexp: [sq, b, a, dv] and [b, a, sq], as `merge_blocks` returns them.
        sink: [a], the logit of each head's sink.
    """
    sink = sink.to(logsumexp.dtype).view(-1, 1)
    sums = logsumexp.masked_fill(logsumexp.isposinf(), float("-inf"))
    share = torch.sigmoid(sums - sink).permute(2, 0, 1).unsqueeze(-1)
    return out * share.to(out.dtype), torch.logaddexp(sums, sink)


def differentiate_sink(grad_out: Tensor, out: Tensor, logsumexp: Tensor, sink: Tensor) -> Tensor:
    """Returns the gradient of the sink [a] in its dtype: minus the sum over rows of
    exp(sink - logsumexp) * (grad_out . out).

    Args:
        grad_out, out: [sq, b, a, dv], any floating-point dtype.
        logsumexp: [b, a, sq]; it and out are those that `add_sink` returned, or `attention`'s.
    """
    sums = sum_rows(grad_out, Kept(out, logsumexp))
    return ((sink.to(sums.dtype).view(-1, 1) - logsumexp).exp() * sums).sum((0, 2)).neg().to(sink.dtype)

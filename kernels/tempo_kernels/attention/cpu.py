"""Computes attention on a CPU: by torch's own flash attention where that computes the same, else by the blocks of
eager.py. Documents of a packed row are computed one after the other, each as a row of its own. The softmax form uses
this file on a GPU too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from tempo_kernels.attention import eager
from tempo_kernels.attention.settings import Gradients, Inputs, Kept, Settings

# exp(score - logsumexp) inherits the logsumexp's rounding error, below this limit 4e-6: little against 16 bits.
LARGEST_LOGSUMEXP = 64.0

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(
    inputs: Inputs, settings: Settings, probabilities_out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """As in eager.py. Of a packed row, a token of no document gets an out of 0 and an infinite logsumexp."""
    q = inputs.q
    if inputs.cu_seqlens is not None:
        out = torch.zeros(*q.shape[:-1], inputs.v.size(-1), dtype=q.dtype, device=q.device)
        sums_shape = (1, q.size(2), q.size(0))
        logsumexp = torch.full(sums_shape, float("inf"), dtype=inputs.compute_dtype, device=q.device)
        for queries, keys, own, chosen in _split(inputs, settings):
            probabilities = None if probabilities_out is None else probabilities_out[:, :, queries, keys]
            out[queries], logsumexp[:, :, queries] = forward(own, chosen, probabilities)
        return out, logsumexp
    if probabilities_out is None and out_dtype in (None, q.dtype) and _can_run_flash(inputs, settings):
        out, logsumexp = _flash_forward(
            *_repeat_heads(inputs), 0.0, _is_causal(inputs, settings), scale=settings.softmax_scale
        )
        out, logsumexp = out.permute(2, 0, 1, 3).contiguous(), logsumexp.contiguous()
        if _is_small(logsumexp):
            return out, logsumexp
        del out, logsumexp  # the rounding of such logsumexps would cost too much
    return eager.forward(inputs, settings, probabilities_out, out_dtype)


def backward(
    grad_out: Tensor, inputs: Inputs, kept: Kept, settings: Settings, needs_grad_bias: bool = False
) -> Gradients:
    """As in eager.py; `kept.out` is there where `keeps_out`, and with is_part. A token of no document gets 0."""
    if inputs.cu_seqlens is not None:
        sink = inputs.sink
        grad_sink = None if sink is None else torch.zeros_like(sink, dtype=inputs.compute_dtype)
        grads = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in inputs[:3]]
        for queries, keys, own, chosen in _split(inputs, settings):
            kept_here = Kept(
                None if kept.out is None else kept.out[queries],
                None if kept.logsumexp is None else kept.logsumexp[:, :, queries],
                None if kept.probabilities is None else kept.probabilities[:, :, queries, keys],
            )
            found = backward(grad_out[queries], own, kept_here, chosen)
            for grad, part, where in zip(grads, found[:3], (queries, keys, keys), strict=True):
                grad[where] = part
            if grad_sink is not None and found.sink is not None:
                grad_sink += found.sink
        grad_sink = None if sink is None or grad_sink is None else grad_sink.to(sink.dtype)
        return Gradients(grads[0], grads[1], grads[2], sink=grad_sink)
    if not kept.is_part and kept.probabilities is None and keeps_out(inputs, settings):
        assert kept.logsumexp is not None
        if _is_small(kept.logsumexp):
            return _backward_by_flash(grad_out, inputs, kept, settings)
    return eager.backward(grad_out, inputs, kept, settings, needs_grad_bias)


def keeps_out(inputs: Inputs, settings: Settings) -> bool:
    """Whether torch may compute the gradients, for which it needs the output; of a packed row those of some document.
    In float32 our blocks are three times as exact."""
    if inputs.q.dtype not in (torch.bfloat16, torch.float16):
        return False
    return settings.is_plain(inputs) if inputs.cu_seqlens is not None else _can_run_flash(inputs, settings)


def _split(inputs: Inputs, settings: Settings) -> Iterator[tuple[slice, slice, Inputs, Settings]]:
    """Yields the documents that have queries and keys: where these stand, and the arguments of each as a row of its
    own. Reads their boundaries, for which a GPU is waited for."""
    assert inputs.cu_seqlens is not None
    boundaries = inputs.cu_seqlens.tolist()
    key_boundaries = boundaries if inputs.cu_seqlens_k is None else inputs.cu_seqlens_k.tolist()
    samples = None if inputs.document_samples is None else inputs.document_samples.tolist()
    for number, place in enumerate(zip(pairwise(boundaries), pairwise(key_boundaries), strict=True)):
        queries, keys = (slice(*ends) for ends in place)
        if queries.start == queries.stop or keys.start == keys.stop:
            continue
        parts = inputs.q[queries], inputs.k[keys], inputs.v[keys]
        chosen = settings
        if samples is not None:
            chosen = dataclasses.replace(settings, first_sample=samples[number])
        elif settings.dropout_p:
            chosen = dataclasses.replace(settings, first_row=queries.start, first_column=keys.start)
        yield queries, keys, Inputs(*parts, alibi_slopes=inputs.alibi_slopes, sink=inputs.sink), chosen


def _can_run_flash(inputs: Inputs, settings: Settings) -> bool:
    """Whether torch computes this call: on a CPU, plain, and a query sees every key or those up to itself."""
    q, k, v = inputs[:3]
    is_plain = q.device.type == "cpu" and settings.is_plain(inputs)
    # Its causal mask starts at the first key.
    fits = settings.compute_window(q.size(0), k.size(0)) in ((None, None), (None, 0))
    return is_plain and fits and q.size(-1) == v.size(-1) and 0 not in (q.numel(), k.numel())


def _is_small(logsumexp: Tensor) -> bool:
    """Whether the rounding of these logsumexps costs nothing; fake tensors, which have no numbers, count as small."""
    return type(logsumexp) is not Tensor or bool(logsumexp.abs().amax() <= LARGEST_LOGSUMEXP)


def _backward_by_flash(grad_out: Tensor, inputs: Inputs, kept: Kept, settings: Settings) -> Gradients:
    assert kept.out is not None
    grad_out, out = (t.permute(1, 2, 0, 3) for t in (grad_out, kept.out))
    operands = (grad_out, *_repeat_heads(inputs), out, kept.logsumexp, 0.0, _is_causal(inputs, settings))
    grads = _flash_backward(*operands, scale=settings.softmax_scale)
    grad_q, grad_k, grad_v = (_sum_heads(*pair) for pair in zip(grads, inputs[:3], strict=True))
    return Gradients(grad_q, grad_k, grad_v)


def _is_causal(inputs: Inputs, settings: Settings) -> bool:
    """Whether a query sees keys up to itself, be it by `causal` or by a window without a left end."""
    return settings.compute_window(inputs.q.size(0), inputs.k.size(0))[1] is not None


def _repeat_heads(inputs: Inputs) -> tuple[Tensor, ...]:
    """Returns q, k and v as [b, a, s, d], each group once per head that reads it; torch assumes that d has stride 1."""
    heads = inputs.q.size(2)
    ordered = ((t if t.stride(3) == 1 else t.contiguous()).permute(1, 2, 0, 3) for t in inputs[:3])
    return tuple(t if t.size(1) == heads else t.repeat_interleave(heads // t.size(1), dim=1) for t in ordered)


def _sum_heads(grad: Tensor, t: Tensor) -> Tensor:
    """Returns [s, b, g, d] as t of grad [b, a, s, d], summed over the heads of a group."""
    if grad.size(1) != t.size(2):
        grad = grad.unflatten(1, (t.size(2), -1)).sum(2)
    return grad.permute(2, 0, 1, 3).contiguous()

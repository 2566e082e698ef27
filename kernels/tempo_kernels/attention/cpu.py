"""Computes attention on a CPU in blocks of queries whose scores stay in the cache; eager.py is the specification.

The algorithm is FlashAttention-2's (Dao, arXiv 2307.08691), but a block of queries takes all its keys at once, so that
the softmax needs no running maximum. Backward computes the scores again, or reads the probabilities that forward kept.
A causal or windowed block ends at the last key that its queries see. Without dropout, torch's own flash attention runs
where it computes the same. Documents of a packed row are computed one after the other, each as a row of its own. The
softmax form uses this file on a GPU too.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tempo_kernels.attention.cpu_blocks import LOG2_E, Block, BlockSums
from tempo_kernels.attention.eager import sum_rows
from tempo_kernels.attention.settings import Documents, Gradients, Inputs, Kept, Settings
from tempo_kernels.opaque import skip_alike
from tempo_kernels.philox import drop_

BLOCK_ELEMENTS = 1 << 19
GPU_BLOCK_ELEMENTS = 1 << 26
MIN_BLOCK_ROWS = 64
_LOWEST = torch.finfo(torch.float32).min
# exp(score - logsumexp) inherits the logsumexp's rounding error, below this limit 4e-6: little against 16 bits.
LARGEST_LOGSUMEXP = 64.0
_has_gpu_blocks = False

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@contextlib.contextmanager
def use_gpu_blocks() -> Iterator[None]:
    """Makes blocks as large as on a GPU on every device inside the context."""
    global _has_gpu_blocks
    before, _has_gpu_blocks = _has_gpu_blocks, True
    try:
        yield
    finally:
        _has_gpu_blocks = before


def forward(
    inputs: Inputs,
    settings: Settings,
    probabilities_out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    documents: Documents | None = None,
) -> tuple[Tensor, Tensor]:
    """As in eager.py. Of a packed row, a token of no document gets an out of 0 and an infinite logsumexp."""
    if documents is None:
        return _forward_row(inputs, settings, probabilities_out, out_dtype)
    q = inputs.q
    out = torch.zeros(*q.shape[:-1], inputs.v.size(-1), dtype=q.dtype, device=q.device)
    dtype = torch.promote_types(q.dtype, torch.float32)
    logsumexp = torch.full((1, q.size(2), q.size(0)), float("inf"), dtype=dtype, device=q.device)
    for queries, keys, own, chosen in _split(inputs, documents, settings):
        probabilities = None if probabilities_out is None else probabilities_out[:, :, queries, keys]
        out[queries], logsumexp[:, :, queries] = _forward_row(own, chosen, probabilities)
    return out, logsumexp


def backward(
    grad_out: Tensor,
    inputs: Inputs,
    kept: Kept,
    settings: Settings,
    documents: Documents | None = None,
    needs_grad_bias: bool = False,
) -> Gradients:
    """As in eager.py; `kept.out` is there where `keeps_out`, and with is_part. A token of no document gets 0."""
    if documents is None:
        return _backward_row(grad_out, inputs, kept, settings, needs_grad_bias)
    sink, sink_dtype = inputs.sink, torch.promote_types(inputs.q.dtype, torch.float32)
    grad_sink = None if sink is None else torch.zeros_like(sink, dtype=sink_dtype)
    grads = tuple(torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in inputs[:3])
    for queries, keys, own, chosen in _split(inputs, documents, settings):
        kept_here = Kept(
            None if kept.out is None else kept.out[queries],
            None if kept.logsumexp is None else kept.logsumexp[:, :, queries],
            None if kept.probabilities is None else kept.probabilities[:, :, queries, keys],
        )
        found = _backward_row(grad_out[queries], own, kept_here, chosen)
        for grad, part, where in zip(grads, found[:3], (queries, keys, keys), strict=True):
            grad[where] = part
        if grad_sink is not None and found.sink is not None:
            grad_sink += found.sink
    grad_sink = None if sink is None or grad_sink is None else grad_sink.to(sink.dtype)
    return Gradients(grads[0], grads[1], grads[2], sink=grad_sink)


def keeps_out(inputs: Inputs, settings: Settings, documents: Documents | None = None) -> bool:
    """Whether torch may compute the gradients, for which it needs the output; of a packed row those of some document.
    In float32 our blocks are three times as exact."""
    if inputs.q.dtype not in (torch.bfloat16, torch.float16):
        return False
    return settings.is_plain(inputs) if documents is not None else _can_run_flash(inputs, settings)


def _forward_row(
    inputs: Inputs, settings: Settings, probabilities_out: Tensor | None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    dtype = out_dtype or inputs.q.dtype
    if probabilities_out is None and dtype == inputs.q.dtype and _can_run_flash(inputs, settings):
        out, logsumexp = _forward_by_flash(inputs, settings)
        if _is_small(logsumexp):
            return out, logsumexp
    q, v = inputs.q, inputs.v
    num_rows, batch, heads, _ = q.shape
    out = torch.empty(*q.shape[:-1], v.size(-1), dtype=dtype, device=q.device)
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    logsumexp = torch.empty(batch, heads, num_rows, dtype=compute_dtype, device=q.device)
    rows_per_block, samples_per_block = _choose_block(inputs, settings)
    for samples in skip_alike(_cut(batch, samples_per_block), q):
        q_heads, k_heads, v_heads = (_order_heads(t, samples) for t in inputs[:3])
        for rows in _cut(num_rows, rows_per_block):
            block = Block(samples, rows, inputs, settings)
            if block.num_keys == 0:
                nothing = float("inf") if inputs.sink is None else inputs.sink.to(compute_dtype).unsqueeze(-1)
                out[rows, samples], logsumexp[samples, :, rows] = 0.0, nothing
                continue
            scores = block.compute_scores(q_heads, k_heads)
            top = scores.amax(-1, keepdim=True).clamp_min_(_LOWEST)
            sink = block.get_sink()
            if sink is not None:
                top = torch.maximum(top, sink)
            probabilities = scores.sub_(top).exp2_()
            total = probabilities.sum(-1, keepdim=True)
            if sink is not None:
                total.add_((sink - top).exp2_())
            # Infinite where there is nothing to normalise: it divides to 0, and backward finds probabilities of 0.
            total.masked_fill_(total == 0.0, float("inf"))
            logsumexp[samples, :, rows] = block.split_heads(top.add_(total.log2()).div_(LOG2_E)).squeeze(-1)
            if probabilities_out is not None:
                probabilities_out[samples, :, rows, block.keys] = block.split_heads(probabilities / total)
            if settings.dropout_p > 0:
                drop_(probabilities, block.draw_keep_bits())
            context = torch.bmm(probabilities.to(q.dtype), v_heads[:, block.keys])
            context = context.to(compute_dtype).div_(total).mul_(settings.keep_scale)
            out[rows, samples] = block.split_heads(context).permute(2, 0, 1, 3).to(dtype)
    return out, logsumexp


def _backward_row(
    grad_out: Tensor, inputs: Inputs, kept: Kept, settings: Settings, needs_grad_bias: bool = False
) -> Gradients:
    if not kept.is_part and kept.probabilities is None and keeps_out(inputs, settings):
        assert kept.logsumexp is not None
        if _is_small(kept.logsumexp):
            return _backward_by_flash(grad_out, inputs, kept, settings)
    q = inputs.q
    num_rows, batch = q.shape[:2]
    dtype = torch.promote_types(q.dtype, torch.float32) if kept.is_part else q.dtype
    row_sums = sum_rows(grad_out, kept) if kept.is_part else None
    grads = tuple(torch.empty(t.shape, dtype=dtype, device=t.device) for t in inputs[:3])
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    grad_bias, grad_sink = (
        None if t is None or not is_needed else torch.zeros(t.shape, dtype=compute_dtype, device=t.device)
        for t, is_needed in ((inputs.bias, needs_grad_bias), (inputs.sink, True))
    )
    rows_per_block, samples_per_block = _choose_block(inputs, settings)
    for samples in skip_alike(_cut(batch, samples_per_block), q):
        q_heads, k_heads, v_heads = (_order_heads(t, samples) for t in inputs[:3])
        sums = BlockSums(q_heads, k_heads, v_heads, _order_heads(grad_out, samples))
        for rows in _cut(num_rows, rows_per_block):
            sums.add_block(Block(samples, rows, inputs, settings), kept, row_sums, grad_bias, grad_sink)
        for grad, found in zip(grads, sums.compute_sums(), strict=True):
            grad[:, samples] = found.unflatten(0, (-1, grad.size(2))).permute(2, 0, 1, 3)
    if inputs.bias is not None and grad_bias is not None:
        grad_bias = grad_bias.to(inputs.bias.dtype)
    if inputs.sink is not None and grad_sink is not None:
        grad_sink = grad_sink.to(inputs.sink.dtype)
    return Gradients(grads[0], grads[1], grads[2], grad_bias, grad_sink)


class _Part(NamedTuple):
    """One document: where its queries and keys stand, and its own arguments."""

    queries: slice
    keys: slice
    inputs: Inputs
    settings: Settings


def _split(inputs: Inputs, documents: Documents, settings: Settings) -> Iterator[_Part]:
    """Yields the documents that have queries and keys. Reads their boundaries, for which a GPU is waited for."""
    assert documents.cu_seqlens is not None
    boundaries = documents.cu_seqlens.tolist()
    key_boundaries = boundaries if documents.cu_seqlens_k is None else documents.cu_seqlens_k.tolist()
    samples = None if documents.samples is None else documents.samples.tolist()
    for number, place in enumerate(zip(pairwise(boundaries), pairwise(key_boundaries), strict=True)):
        queries, keys = (slice(*ends) for ends in place)
        if queries.start == queries.stop or keys.start == keys.stop:
            continue
        own = inputs._replace(q=inputs.q[queries], k=inputs.k[keys], v=inputs.v[keys])
        if samples is not None:
            chosen = dataclasses.replace(settings, first_sample=samples[number])
        elif settings.dropout_p:
            chosen = dataclasses.replace(settings, first_row=queries.start, first_column=keys.start)
        else:
            chosen = settings
        yield _Part(queries, keys, own, chosen)


def _choose_block(inputs: Inputs, settings: Settings) -> tuple[int, int]:
    """Returns how many queries and samples make a block: few enough that its scores stay in the cache and causal blocks
    end early, many enough that matrix products are fast and calls are worth their overhead."""
    q, k = inputs.q, inputs.k
    elements = BLOCK_ELEMENTS if q.device.type == "cpu" and not _has_gpu_blocks else GPU_BLOCK_ELEMENTS
    elements_per_row = max(1, q.size(2) * k.size(0))
    rows = elements // elements_per_row
    if settings.compute_window(q.size(0), k.size(0)) != (None, None):
        rows = min(rows, k.size(0) // 4)
    rows = max(MIN_BLOCK_ROWS, rows // 16 * 16)
    # Samples of different lengths see different keys.
    together = 1 if inputs.key_lengths is not None else elements // (elements_per_row * min(rows, max(1, q.size(0))))
    return rows, max(1, together)


def _cut(size: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def _order_heads(t: Tensor, samples: slice) -> Tensor:
    """Returns [n * a, s, d] of t [s, b, a, d]."""
    return t[:, samples].permute(1, 2, 0, 3).flatten(0, 1).contiguous()


def _can_run_flash(inputs: Inputs, settings: Settings) -> bool:
    """Whether torch computes this call: on a CPU, plain, and a query sees every key or those up to itself."""
    q, k, v = inputs[:3]
    is_plain = q.device.type == "cpu" and settings.is_plain(inputs)
    # Its causal mask starts at the first key.
    fits = settings.compute_window(q.size(0), k.size(0)) in ((None, None), (None, 0))
    return is_plain and fits and q.size(-1) == v.size(-1) and 0 not in (q.numel(), k.numel())


def _forward_by_flash(inputs: Inputs, settings: Settings) -> tuple[Tensor, Tensor]:
    """As in eager.py."""
    out, logsumexp = _flash_forward(
        *_repeat_heads(inputs), 0.0, _is_causal(inputs, settings), scale=settings.softmax_scale
    )
    return out.permute(2, 0, 1, 3).contiguous(), logsumexp.contiguous()


def _is_small(logsumexp: Tensor) -> bool:
    """Whether the rounding of these logsumexps costs nothing; fake tensors, which have no numbers, count as small."""
    return type(logsumexp) is not Tensor or bool(logsumexp.abs().amax() <= LARGEST_LOGSUMEXP)


def _backward_by_flash(grad_out: Tensor, inputs: Inputs, kept: Kept, settings: Settings) -> Gradients:
    """Returns the gradients of q, k and v."""
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

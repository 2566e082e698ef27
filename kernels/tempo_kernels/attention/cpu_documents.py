"""Attention within the documents of a packed row: one document after the other, each as a row of its own.

This is the specification, and what runs on a CPU and in the softmax form; kernel_program.py does it on a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tempo_kernels.attention import cpu
from tempo_kernels.attention.settings import Documents, Gradients, Inputs, Kept, Settings


class _Part(NamedTuple):
    """One document: where its queries and keys stand, and its own arguments."""

    queries: slice
    keys: slice
    inputs: Inputs
    settings: Settings


def keeps_out(inputs: Inputs, settings: Settings) -> bool:
    """Whether torch may compute the gradients of some document, for which it needs the output."""
    is_plain = settings.dropout_p == 0 and settings.softcap is None and not inputs.changes_scores
    return is_plain and inputs.q.dtype in (torch.float16, torch.bfloat16)


def forward(
    inputs: Inputs, documents: Documents, settings: Settings, probabilities_out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns out [sq, 1, a, dv] and logsumexp [1, a, sq] as in eager.py: 0 and infinite for a token of no
    document, which has no sink either."""
    q, v = inputs.q, inputs.v
    out = torch.zeros(*q.shape[:-1], v.size(-1), dtype=q.dtype, device=q.device)
    dtype = torch.promote_types(q.dtype, torch.float32)
    logsumexp = torch.full((1, q.size(2), q.size(0)), float("inf"), dtype=dtype, device=q.device)
    for queries, keys, own, chosen in _split(inputs, documents, settings):
        kept = None if probabilities_out is None else probabilities_out[:, :, queries, keys]
        out[queries], logsumexp[:, :, queries] = cpu.forward(own, chosen, kept)
    return out, logsumexp


def backward(grad_out: Tensor, inputs: Inputs, documents: Documents, kept: Kept, settings: Settings) -> Gradients:
    """Returns the gradients in the shapes of q, k and v: 0 for a token of no document."""
    grad_sink = (
        None
        if inputs.sink is None
        else torch.zeros_like(inputs.sink, dtype=torch.promote_types(inputs.q.dtype, torch.float32))
    )
    grads = tuple(torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in inputs[:3])
    for queries, keys, own, chosen in _split(inputs, documents, settings):
        kept_here = Kept(
            None if kept.out is None else kept.out[queries],
            None if kept.logsumexp is None else kept.logsumexp[:, :, queries],
            None if kept.probabilities is None else kept.probabilities[:, :, queries, keys],
        )
        found = cpu.backward(grad_out[queries], own, kept_here, chosen)
        for grad, part, where in zip(grads, found[:3], (queries, keys, keys), strict=True):
            grad[where] = part
        if grad_sink is not None and found.sink is not None:
            grad_sink += found.sink
    if inputs.sink is not None and grad_sink is not None:
        grad_sink = grad_sink.to(inputs.sink.dtype)
    return Gradients(grads[0], grads[1], grads[2], sink=grad_sink)


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

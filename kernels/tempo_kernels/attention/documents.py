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
from tempo_kernels.attention.settings import Gradients, Inputs, Kept, Settings
from tempo_kernels.opaque import is_traced


class Documents(NamedTuple):
    """Where the documents of a packed row begin and end, as in `attention`; without tensors the row is not packed."""

    cu_seqlens: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    samples: Tensor | None = None


class _Part(NamedTuple):
    """One document: where its queries and keys stand, and its own arguments."""

    queries: slice
    keys: slice
    inputs: Inputs
    settings: Settings


def check_documents(documents: Documents, inputs: Inputs, settings: Settings) -> None:
    """Raises ValueError where documents are given that do not fit q and k, or with what they exclude."""
    cu_seqlens, cu_seqlens_k, samples = documents
    if cu_seqlens is None:
        if cu_seqlens_k is not None or samples is not None:
            raise ValueError("cu_seqlens_k or document_samples is given without cu_seqlens; give cu_seqlens too")
        return
    excluded = {
        "mask": inputs.mask is not None,
        "bias": inputs.bias is not None,
        "key_lengths": inputs.key_lengths is not None,
        "first_row": settings.first_row != 0,
        "first_column": settings.first_column is not None,
    }
    if found := [name for name, is_given in excluded.items() if is_given]:
        raise ValueError(
            f"{found[0]} is given beside cu_seqlens; expected one of them, for documents have their own rows"
        )
    q = inputs.q
    if q.size(1) != 1:
        raise ValueError(
            f"q has {q.size(1)} samples beside cu_seqlens; expected 1, the packed row; view q as [t, 1, a, d]"
        )
    number = max(0, cu_seqlens.numel() - 1)
    wanted = {
        "cu_seqlens": (cu_seqlens, torch.int32, [number + 1]),
        "cu_seqlens_k": (cu_seqlens_k, torch.int32, [number + 1]),
        "document_samples": (samples, torch.int64, [number]),
    }
    for name, (tensor, dtype, shape) in wanted.items():
        if tensor is not None and (tensor.dtype, list(tensor.shape), tensor.device) != (dtype, shape, q.device):
            raise ValueError(
                f"{name} is {tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}; expected {dtype} of shape "
                f"{shape} on {q.device}, for {number} documents"
            )
    is_ordered = settings.causal or settings.window_size is not None
    if cu_seqlens_k is not None and samples is None and settings.dropout_p and is_ordered:
        raise ValueError(
            "cu_seqlens_k is given without document_samples to causal or windowed attention with dropout, whose "
            "queries and keys then have no common positions; give document_samples"
        )
    # Only on a CPU: reading numbers from a GPU would wait for it.
    if q.device.type == "cpu" and not is_traced(q):
        _check_boundaries("cu_seqlens", cu_seqlens, q.size(0), "q")
        _check_boundaries("cu_seqlens_k", cu_seqlens if cu_seqlens_k is None else cu_seqlens_k, inputs.k.size(0), "k")
        if cu_seqlens_k is not None and settings.causal and bool((cu_seqlens.diff() > cu_seqlens_k.diff()).any()):
            raise ValueError(
                "cu_seqlens and cu_seqlens_k: a document of causal attention has more queries than keys; expected at "
                "least as many keys; give causal=False"
            )


def _check_boundaries(name: str, boundaries: Tensor, num_tokens: int, of: str) -> None:
    numbers = boundaries.tolist()
    if (
        not numbers
        or numbers[0] < 0
        or numbers[-1] > num_tokens
        or any(end < start for start, end in pairwise(numbers))
    ):
        raise ValueError(
            f"{name} is {numbers}; expected at least one number, growing from 0 or more to at most {num_tokens}, the "
            f"tokens of {of}"
        )


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

"""Checks the arguments of `attention`. Every error says what was given, what is expected and what to do."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from tempo_kernels.attention.settings import MASKED_SCORES, Inputs, Settings
from tempo_kernels.opaque import is_traced
from tempo_kernels.philox import check_drawn_from, check_place, effective_probability


def _say(name: str, t: Tensor) -> str:
    return f"{name} is {t.dtype} of shape {list(t.shape)} on {t.device}"


def check_tensors(inputs: Inputs, settings: Settings) -> None:
    """Raises ValueError unless the shapes, dtypes and devices of all tensors but a packed row's agree."""
    q, k, v = inputs[:3]
    q_shape, k_shape = q.shape, k.shape
    if len(q_shape) != 4 or len(k_shape) != 4 or v.dim() != 4:
        raise ValueError(f"q, k, v have {q.dim()}, {k.dim()}, {v.dim()} dimensions; expected [s, b, heads, d] for each")
    if not q.is_floating_point() or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; expected one floating-point dtype; cast them")
    (num_queries, batch, heads, head_dim), (num_keys, k_batch, groups, k_dim) = q_shape, k_shape
    is_empty = not (heads and groups and head_dim and v.shape[3])
    if k_shape[:3] != v.shape[:3] or k_batch != batch or k_dim != head_dim or is_empty or heads % groups:
        raise ValueError(
            f"q, k, v have shapes {list(q_shape)}, {list(k_shape)}, {list(v.shape)}; expected [sq, b, a, d], "
            "[sk, b, g, d] and [sk, b, g, dv] with g a divisor of a, and none of a, g, d and dv 0"
        )
    if num_keys == 0 and num_queries > 0:
        raise ValueError("k and v are empty; expected at least one key")
    if settings.causal and settings.first_column is None and inputs.cu_seqlens is None and num_queries > num_keys:
        raise ValueError(
            f"causal attention of {num_queries} queries over {num_keys} keys: the first queries would see no key; "
            "give at least as many keys, first_row and first_column, or causal=False"
        )
    _check_what_changes_scores(inputs, [batch, heads, num_queries, num_keys])


def _check_what_changes_scores(inputs: Inputs, shape: list[int]) -> None:
    q, mask, bias, slopes, sink = inputs.q, inputs.mask, inputs.bias, inputs.alibi_slopes, inputs.sink
    if mask is not None and not (mask.dtype == torch.bool and _fits_scores(mask, shape)):
        raise ValueError(
            f"{_say('mask', mask)}; expected bool, True where hidden, broadcastable to {shape} with all keys"
        )
    if bias is not None and not (bias.is_floating_point() and _fits_scores(bias, shape) and bias.device == q.device):
        raise ValueError(
            f"{_say('bias', bias)}; expected a floating-point dtype, broadcastable to {shape} with all keys, on "
            f"{q.device}, as q"
        )
    heads = shape[1]
    for name, vector, dtypes in (("alibi_slopes", slopes, {torch.float32}), ("sink", sink, {torch.float32, q.dtype})):
        if vector is None or (vector.dtype in dtypes and list(vector.shape) == [heads] and vector.device == q.device):
            continue
        raise ValueError(
            f"{_say(name, vector)}; expected {' or '.join(sorted(map(str, dtypes)))} of shape [{heads}] on {q.device}, "
            "a number for each head of q"
        )
    if slopes is not None and slopes.requires_grad:
        raise ValueError(
            "alibi_slopes requires a gradient, which attention does not compute; expected constants; give "
            "alibi_slopes.detach()"
        )


def _fits_scores(t: Tensor, shape: list[int]) -> bool:
    """Whether a tensor is broadcast to scores of this shape, and has all keys."""
    fits = t.dim() == 4 and t.size(-1) == shape[-1]
    return fits and all(size in (1, whole) for size, whole in zip(t.shape[:-1], shape[:-1], strict=True))


def check_settings(q: Tensor, settings: Settings, form: str) -> None:
    """Raises ValueError where a number is out of range or does not fit q."""
    if effective_probability(settings.dropout_p):
        num_rows, num_samples, num_heads, _ = q.shape
        check_place(
            key=settings.dropout_key,
            first_sample=settings.first_sample if isinstance(settings.first_sample, int) else 0,
            num_samples=num_samples,
            first_head=settings.first_head,
            num_heads=num_heads,
            first_row=settings.first_row,
            num_rows=num_rows,
        )
    for name, first in (("first_row", settings.first_row), ("first_column", settings.first_column)):
        if first is not None and first < 0:
            raise ValueError(f"{name} is {first}; expected a position in the sequence, 0 or more")
    if form not in ("flash", "softmax"):
        raise ValueError(f'form is {form!r}; expected "flash" or "softmax"')
    if settings.hidden_rows not in MASKED_SCORES:
        raise ValueError(f'hidden_rows is {settings.hidden_rows!r}; expected "uniform", "added" or "zero"')
    if not 0.0 < settings.softmax_scale < math.inf:
        raise ValueError(f"softmax_scale is {settings.softmax_scale}; expected a positive number; negate q instead")
    if settings.softcap is not None and not 0.0 < settings.softcap < math.inf:
        raise ValueError(f"softcap is {settings.softcap}; expected a positive number, or None for scores without a cap")
    window_size = settings.window_size
    if window_size is not None and (len(window_size) != 2 or any(size < -1 for size in window_size)):
        raise ValueError(f"window_size is {window_size}; expected (left, right), each at least 0, or -1 for no limit")
    check_drawn_from(q.device, dropout_key=settings.dropout_key, first_sample=settings.first_sample)


def check_documents(inputs: Inputs, settings: Settings) -> None:
    """Raises ValueError where documents are given that do not fit q and k, or with what they exclude."""
    cu_seqlens, cu_seqlens_k, samples = inputs.cu_seqlens, inputs.cu_seqlens_k, inputs.document_samples
    if cu_seqlens is None:
        if cu_seqlens_k is not None or samples is not None:
            raise ValueError("cu_seqlens_k or document_samples is given without cu_seqlens; give cu_seqlens too")
        return
    excluded = {"mask": inputs.mask, "bias": inputs.bias, "first_row": settings.first_row or None}
    for name, given in (*excluded.items(), ("first_column", settings.first_column)):
        if given is not None:
            raise ValueError(
                f"{name} is given together with cu_seqlens; expected one of them, for documents have their own rows"
            )
    q = inputs.q
    if q.size(1) != 1:
        raise ValueError(
            f"q has {q.size(1)} samples and cu_seqlens is given; expected 1, the packed row; view q as [t, 1, a, d]"
        )
    number = max(0, cu_seqlens.numel() - 1)
    for name, t, dtype, size in (
        ("cu_seqlens", cu_seqlens, torch.int32, number + 1),
        ("cu_seqlens_k", cu_seqlens_k, torch.int32, number + 1),
        ("document_samples", samples, torch.int64, number),
    ):
        if t is not None and (t.dtype, list(t.shape), t.device) != (dtype, [size], q.device):
            raise ValueError(
                f"{_say(name, t)}; expected {dtype} of shape [{size}] on {q.device}, for {number} documents"
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
    if numbers[0] < 0 or numbers[-1] > num_tokens or any(end < start for start, end in pairwise(numbers)):
        raise ValueError(
            f"{name} is {numbers}; expected numbers growing from 0 or more to at most {num_tokens}, the tokens of {of}"
        )

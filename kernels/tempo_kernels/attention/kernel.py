"""Computes attention on a GPU in Triton: chooses tile sizes and launches the passes; eager.py is the specification.

The algorithm is FlashAttention-2's (Dao, arXiv 2307.08691). Forward and the gradient of q walk over keys
(kernel_rows.py). The gradients of k and v walk over queries (kernel_columns.py). With enough heads one walk finds all
three gradients (kernel_heads.py). The gradient of a bias takes a pass of its own (kernel_bias.py). Of a packed row each
program has a block of one document (kernel_documents.py). The passes share the code for one tile (kernel_tile.py) and
take their launch arguments from kernel_plan.py. Scores and masks live in registers only: backward computes the
probabilities again from the logsumexp, and Philox draws the same bits again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tempo_kernels.attention import kernel_bias, walks
from tempo_kernels.attention import kernel_columns as columns
from tempo_kernels.attention import kernel_heads as whole_heads
from tempo_kernels.attention import kernel_rows as rows
from tempo_kernels.attention.documents import Documents
from tempo_kernels.attention.kernel_plan import (
    Form,
    plan_forward,
    plan_grad_bias,
    plan_one_walk,
    plan_two_walks,
)
from tempo_kernels.attention.settings import MASKED_SCORE, Gradients, Inputs, Kept, Settings
from tempo_kernels.attention.walks import PASSES, SHAPES, Shape
from tempo_kernels.kernel_launch import count_multiprocessors
from tempo_kernels.philox.kernel import LANES, key_words

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
MAX_ROW_ELEMENTS = 1 << 24  # so that offsets inside a block of 128 rows fit into 32 bits

# float32 stays off the tensor cores, which would round its products to TF32.
FLOAT32_SHAPES = {
    128: (Shape(32, 32, 8, 1, False),) * 3,
    256: (Shape(16, 32, 8, 1, False),) * 3,
}

# The gradient of a bias, on any GPU: {head_dim up to: shape}. Larger tiles spill on sm_80.
SHAPES_OF_BIAS = {
    64: Shape(64, 32, 4, 2, False),
    128: Shape(64, 32, 8, 1, False),
    256: Shape(32, 64, 8, 1, False),
}


@functools.cache
def find_architecture(device: torch.device) -> int:
    """Returns the key of SHAPES for a device."""
    return walks.name_architecture(torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9)


def choose_shapes(q: Tensor, v: Tensor) -> tuple[Shape, ...]:
    """Returns the shapes of the passes (forward, grad_q, grad_kv)."""
    architecture = None if q.dtype == torch.float32 else find_architecture(q.device)
    return _find_shapes(architecture, max(q.size(-1), v.size(-1)))


@functools.cache
def _find_shapes(architecture: int | None, head_dim: int) -> tuple[Shape, ...]:
    if architecture is None:
        return next(shapes for largest, shapes in FLOAT32_SHAPES.items() if head_dim <= largest)
    passes = [SHAPES[architecture][name] for name in PASSES[:3]]
    return tuple(next(shape for largest, shape in rows.items() if head_dim <= largest) for rows in passes)


def forward(
    inputs: Inputs, settings: Settings, out_dtype: torch.dtype | None = None, documents: Documents | None = None
) -> tuple[Tensor, Tensor]:
    """Returns out [sq, b, a, dv] and the logsumexp [b, a, sq] (float32) in units of the unscaled scores.

    The logsumexp is infinite where a query sees no key. Where every score is masked, it is relative to the masked
    score, and its last bit is 1. Where an out_dtype is given, out has it, and the logsumexp is that of eager.py.
    Of a packed row they are those of documents.py.
    """
    q, v = inputs.q, inputs.v
    _check(inputs, settings)
    num_queries, batch, heads, _ = q.shape
    out = torch.empty(num_queries, batch, heads, v.size(-1), dtype=out_dtype or q.dtype, device=q.device)
    logsumexp = torch.empty(batch, heads, num_queries, dtype=torch.float32, device=q.device)
    if documents is not None:
        # A token of no document has no program.
        out.zero_()
        logsumexp.fill_(float("inf"))
    if q.numel() == 0 or _count_documents(documents) == 0:
        return out, logsumexp
    call = _prepare(inputs, settings, documents=documents)
    shape = choose_shapes(q, v)[0]
    head_dim = max(q.size(-1), v.size(-1))
    if head_dim > 64:
        # A document's own numbers and a tile of the bias or the mask lie in registers, of which so many keys leave too
        # few.
        if documents is not None:
            shape = shape._replace(keys=min(shape.keys, 64 if head_dim <= 128 else 32))
        if inputs.bias is not None or (inputs.mask is not None and head_dim > 128):
            shape = shape._replace(keys=max(shape.keys // 2, 32))
    plan = plan_forward(call.form, shape)
    rows.launch_forward(plan, (*call.tensors, out, logsumexp, *call.optional), call.drawn)
    return out, logsumexp if out_dtype is None else logsumexp.mul_(settings.softmax_scale)


def backward(
    grad_out: Tensor,
    inputs: Inputs,
    kept: Kept,
    settings: Settings,
    documents: Documents | None = None,
    needs_grad_bias: bool = False,
) -> Gradients:
    """Returns the gradients of q, k, v, the sink, and of the bias if it is needed; the same bits every time on the same
    GPU.

    With `kept.is_part` they are float32, out may be of any dtype, and the logsumexp is that of eager.py.

    While it runs it holds what walks.list_workspaces lists: 8 bytes per query and head, and in one walk float32 sums.
    """
    q = inputs.q
    dtype = torch.float32 if kept.is_part else q.dtype
    grad_q, grad_k, grad_v = [
        torch.empty_like(t, dtype=dtype, memory_format=torch.contiguous_format) for t in inputs[:3]
    ]
    if documents is not None:
        for grad in (grad_q, grad_k, grad_v):
            grad.zero_()
    if kept.is_part:
        assert kept.logsumexp is not None
        kept = kept._replace(logsumexp=kept.logsumexp / settings.softmax_scale)
    grads = grad_q, grad_k, grad_v
    grad_bias = None
    if inputs.bias is not None and needs_grad_bias:
        grad_bias = torch.empty(inputs.bias.shape, dtype=inputs.bias.dtype, device=q.device)
    if q.numel() == 0 or _count_documents(documents) == 0:
        grad_sink = None if inputs.sink is None else torch.zeros_like(inputs.sink)
        return Gradients(
            grad_q, grad_k.zero_(), grad_v.zero_(), None if grad_bias is None else grad_bias.zero_(), grad_sink
        )
    call = _prepare(inputs, settings, grad_out, kept.is_part, documents)
    # The documents of a packed row have any length: a program per block shares them out, one per head does not.
    splits = None if documents is not None else choose_splits(inputs)
    if splits is not None:
        statistics, norm = _walk_once(splits, grads, call, kept), None
    else:
        statistics, norm = _walk_twice(grads, call, kept)
    if grad_bias is not None:
        plan = plan_grad_bias(call.form, _choose_shape_of_bias(q, inputs.v), grad_bias.shape)
        tensors = (*call.tensors, statistics, norm, grad_bias, *call.optional)
        kernel_bias.launch_grad_bias(plan, tensors, call.drawn)
    return Gradients(*grads, grad_bias, _find_grad_sink(inputs, settings, kept, statistics[1], norm))


def _find_grad_sink(
    inputs: Inputs, settings: Settings, kept: Kept, delta: Tensor, norm: Tensor | None
) -> Tensor | None:
    """Minus the sum over rows of the sink's probability times the row's sum of out * grad_out, which is delta [b, a, sq
    or more] times dropout's scale; norm [b, a, sq] multiplies probabilities."""
    if inputs.sink is None:
        return None
    assert kept.logsumexp is not None
    sink = inputs.sink.float().view(-1, 1)
    if inputs.mask is not None:
        # Where every score is masked, the logsumexp is relative to the masked score.
        is_relative = (kept.logsumexp.view(torch.int32) & 1).bool()
        sink = torch.where(is_relative, sink - MASKED_SCORE, sink)
    probabilities = (sink - kept.logsumexp * settings.softmax_scale).exp()
    if norm is not None:
        probabilities = torch.where(kept.logsumexp.isinf(), 0.0, probabilities * norm)
    delta = torch.where(kept.logsumexp.isinf(), 0.0, delta[..., : inputs.q.size(0)])
    return ((probabilities * delta).sum((0, 2)) * -settings.keep_scale).to(inputs.sink.dtype)


def _count_documents(documents: Documents | None) -> int | None:
    if documents is None or documents.cu_seqlens is None:
        return None
    return max(0, documents.cu_seqlens.numel() - 1)


def choose_splits(inputs: Inputs) -> walks.Splits | None:
    """Returns how many programs share a key-value head in one walk, or None for two walks; see walks.py."""
    if not whole_heads.IS_SUPPORTED:
        return None
    q, device = inputs.q, inputs.q.device
    gpu = find_architecture(device), count_multiprocessors(device)
    return walks.choose_splits(q.shape, inputs.k.shape, inputs.v.size(-1), q.dtype, *gpu)


def _choose_shape_of_bias(q: Tensor, v: Tensor) -> Shape:
    if q.dtype == torch.float32:
        return choose_shapes(q, v)[1]
    head_dim = max(q.size(-1), v.size(-1))
    return next(shape for largest, shape in SHAPES_OF_BIAS.items() if head_dim <= largest)


class _Call(NamedTuple):
    """The arguments of a call's launches."""

    form: Form
    tensors: tuple[Tensor, ...]
    """q, k, v and, in backward, grad_out, as kernels can read them."""
    optional: tuple[Tensor | None, ...]
    """mask, key_lengths, dropout_key, first_sample, bias, alibi_slopes, sink, cu_seqlens, cu_seqlens_k and
    document_samples, where they are tensors."""
    drawn: tuple[int, ...]
    """The numbers that DRAWN names."""


def _prepare(
    inputs: Inputs,
    settings: Settings,
    grad_out: Tensor | None = None,
    is_part: bool = False,
    documents: Documents | None = None,
) -> _Call:
    q, k, v, mask, lengths, bias, slopes, sink = inputs
    tensors, strides = _read((q, k, v) if grad_out is None else (q, k, v, grad_out))
    if mask is not None:
        mask = mask.view(torch.uint8).expand(q.size(1), q.size(2), q.size(0), k.size(0))
    if bias is not None:
        bias = bias.expand(q.size(1), q.size(2), q.size(0), k.size(0))
    lengths, slopes, sink = [None if t is None else t.contiguous() for t in (lengths, slopes, sink)]
    boundaries = key_boundaries = samples = None
    if documents is not None:
        boundaries, key_boundaries, samples = [None if t is None else t.contiguous() for t in documents]
        key_boundaries = boundaries if key_boundaries is None else key_boundaries
    numbers, (key, first_sample) = settings.split()
    form = Form(
        q.shape,
        k.shape,
        v.shape,
        strides,
        None if mask is None else mask.stride(),
        lengths is not None,
        key is not None,
        first_sample is not None,
        # A part of a row has no sum to normalise by.
        q.dtype == torch.float32 and not is_part,
        settings.causal,
        float(settings.softmax_scale),
        float(settings.dropout_p),
        settings.window_size and tuple(settings.window_size),  # type: ignore[arg-type]
        settings.first_row,
        settings.first_column,
        settings.softcap,
        settings.hidden_rows,
        None if bias is None else bias.stride(),
        slopes is not None,
        sink is not None,
        _count_documents(documents),
        samples is not None and settings.dropout_p > 0,
    )
    words = key_words(numbers.dropout_key or 0)  # type: ignore[arg-type]  # the tensors are split off
    drawn = (*words, numbers.first_sample or 0, settings.first_head)
    optional = (mask, lengths, key, first_sample, bias, slopes, sink, boundaries, key_boundaries, samples)
    return _Call(form, tensors, optional, drawn)  # type: ignore[arg-type]


def _walk_once(splits: walks.Splits, grads: tuple[Tensor, ...], call: _Call, kept: Kept) -> Tensor:
    """Fills the gradients of q, k and v, and returns the statistics."""
    q, k, v, grad_out = call.tensors
    assert kept.out is not None and kept.logsumexp is not None
    plans = plan_one_walk(call.form, walks.choose_shape_of_heads(max(q.size(-1), v.size(-1)))[0], splits)
    statistics = torch.empty(*plans.statistics_shape, dtype=torch.float32, device=q.device)
    sums = torch.empty(*plans.sums_shape, dtype=torch.float32, device=q.device)
    shapes = walks.shape_parts(k.shape, v.size(-1), splits)
    parts = [torch.empty(shape, dtype=torch.float32, device=q.device) for shape in shapes]
    whole_heads.launch_prepare(plans.launches.prepare, (kept.out, grad_out, kept.logsumexp, statistics))
    tensors = (q, k, v, grad_out, statistics, sums, *(parts or grads[1:]), *call.optional)
    whole_heads.launch_walk(plans.launches.walk, tensors, call.drawn)
    whole_heads.launch_finish(plans.launches.finish, (sums, grads[0], *(parts or (None, None)), *grads[1:]))
    return statistics


def _walk_twice(grads: tuple[Tensor, ...], call: _Call, kept: Kept) -> tuple[Tensor, Tensor | None]:
    """Fills the gradients of q, k and v, and returns the statistics and, in float32, the norm."""
    q, k, v, grad_out = call.tensors
    grad_q, grad_k, grad_v = grads
    assert kept.logsumexp is not None
    is_precise = call.form.is_precise
    keeps_apart = q.dtype != torch.float32 and find_architecture(q.device) == 90
    plans = plan_two_walks(call.form, *choose_shapes(q, v)[1:], keeps_apart)
    statistics = torch.empty(*plans.statistics_shape, dtype=torch.float32, device=q.device)
    norm = torch.empty_like(kept.logsumexp) if is_precise else None
    tensors = (q, k, v, kept.out, grad_out, kept.logsumexp, statistics, norm, grad_q, *call.optional)
    rows.launch_grad_q(plans.grad_q, tensors, call.drawn)
    tensors = (q, k, v, grad_out, statistics, norm, grad_k, grad_v, *call.optional)
    columns.launch_grad_kv(plans.grad_kv, tensors, call.drawn)
    return statistics, norm


def _read(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[tuple[int, ...], ...]]:
    """Returns the tensors as kernels can read them (d contiguous, row strides within 32 bits), and their strides."""
    strides = tuple([t.stride() for t in tensors])
    for stride in strides:
        if stride[3] != 1 or stride[0] >= MAX_ROW_ELEMENTS:
            tensors = [
                t if s[3] == 1 and s[0] < MAX_ROW_ELEMENTS else t.contiguous()
                for t, s in zip(tensors, strides, strict=True)
            ]
            return tuple(tensors), tuple([t.stride() for t in tensors])
    return tuple(tensors), strides


def _check(inputs: Inputs, settings: Settings) -> None:
    q, v = inputs.q, inputs.v
    # Offsets within a tile of the bias have 32 bits.
    if inputs.bias is not None and max(inputs.bias.stride()[2:]) >= MAX_ROW_ELEMENTS // 2:
        raise ValueError(
            f"attention: bias has strides {inputs.bias.stride()}; expected fewer than {MAX_ROW_ELEMENTS // 2} elements "
            "from query to query and from key to key on a GPU; give bias.contiguous()"
        )
    if inputs.bias is not None and inputs.bias.dtype not in DTYPES:
        raise ValueError(
            f"attention: bias is {inputs.bias.dtype}; expected float32, float16 or bfloat16 on a GPU; cast it"
        )
    head_dim = max(q.size(-1), v.size(-1))
    if q.dtype not in DTYPES or head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"attention: q is {q.dtype} with head_dim {head_dim}; expected float32, float16 or bfloat16 with at most "
            f"{MAX_HEAD_DIM} on a GPU; cast it"
        )
    if q.shape[0] and math.prod(q.shape[1:]) >= MAX_ROW_ELEMENTS:
        raise ValueError(
            f"attention: q is {list(q.shape)}; expected fewer than {MAX_ROW_ELEMENTS} elements per position; "
            "split the micro batch"
        )
    lanes = LANES.value
    if (settings.first_column or 0) % lanes and settings.dropout_p:
        raise ValueError(
            f"attention: first_column is {settings.first_column}; expected a multiple of {lanes} on a GPU, as a call "
            "of Philox draws the masks of so many keys; cut the sequence there"
        )

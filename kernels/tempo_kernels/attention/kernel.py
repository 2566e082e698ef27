"""Attention on a GPU, in Triton; eager.py is the specification.

The algorithm is FlashAttention-2's (Dao, arXiv 2307.08691). Forward and the gradient of q walk over keys
(kernel_rows.py); the gradients of k and v walk over queries (kernel_columns.py); kernel_tile.py holds what both do with
one tile. Scores and masks live in registers only: backward computes the probabilities again from the logsumexp, and
Philox draws the same bits again. This file launches the passes and chooses the tile sizes.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tempo_kernels.attention import kernel_columns as columns
from tempo_kernels.attention import kernel_rows as rows
from tempo_kernels.attention.kernel_tile import PADDING
from tempo_kernels.attention.settings import MASKED_SCORE, Inputs, Kept, Settings
from tempo_kernels.philox import effective_probability
from tempo_kernels.philox.kernel import key_words

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
PIPELINES_BRANCHES = not triton.__version__.startswith("3.2.")  # triton 3.2 cannot order loads around branches
MAX_ROW_ELEMENTS = 1 << 24  # offsets inside of a block of 128 rows are 32-bit numbers


class Shape(NamedTuple):
    """How a pass is cut into programs."""

    queries: int
    keys: int
    warps: int
    stages: int
    # Whether a tile that every query sees whole jumps over the code that limits it. Before sm_90 the tensor cores' own
    # layout has to be kept from one product to the next; the compiler loses it at the jump, at a higher price.
    branches: bool


# {architecture: {head_dim up to: (forward, grad_q, grad_kv)}} for 16-bit types. These are the largest tiles that do not
# spill registers and fit into shared memory (163 KiB on sm_80, 227 KiB from sm_90 on). Which are fastest has not been
# measured yet. TMA and warp specialisation are not used: triton 3.2 has no tensor descriptors in kernels, and tl.range
# takes warp_specialize from 3.3 on only.
SHAPES = {
    80: {
        64: (Shape(128, 64, 8, 2, False), Shape(128, 64, 8, 2, False), Shape(32, 128, 8, 2, False)),
        128: (Shape(128, 64, 8, 2, False), Shape(64, 64, 8, 2, False), Shape(16, 64, 4, 2, False)),
        256: (Shape(64, 32, 4, 1, False), Shape(64, 32, 8, 1, False), Shape(16, 64, 8, 1, False)),
    },
    90: {
        64: (Shape(128, 64, 8, 3, True), Shape(128, 64, 8, 2, True), Shape(64, 128, 8, 2, True)),
        128: (Shape(128, 64, 8, 3, True), Shape(128, 64, 8, 2, True), Shape(32, 128, 8, 2, True)),
        256: (Shape(128, 32, 8, 2, True), Shape(64, 32, 8, 2, True), Shape(16, 64, 8, 1, True)),
    },
    100: {
        64: (Shape(128, 64, 8, 3, True), Shape(128, 64, 8, 2, True), Shape(32, 128, 8, 2, True)),
        128: (Shape(128, 64, 8, 3, True), Shape(128, 64, 8, 2, True), Shape(32, 128, 8, 2, True)),
        256: (Shape(128, 32, 8, 2, True), Shape(64, 32, 8, 2, True), Shape(32, 64, 8, 1, True)),
    },
}
# float32 does not use tensor cores, which would round its products.
FLOAT32_SHAPES = {
    128: (Shape(32, 32, 8, 1, False),) * 3,
    256: (Shape(16, 32, 8, 1, False),) * 3,
}


@functools.cache
def find_architecture(device: torch.device) -> int:
    """The key of SHAPES for a device."""
    # Consumer Blackwell (12) has neither sm_90's nor sm_100's matrix instructions.
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
    return {9: 90, 10: 100}.get(major, 80)


def choose_shapes(q: Tensor) -> tuple[Shape, ...]:
    """(forward, grad_q, grad_kv)"""
    table = FLOAT32_SHAPES if q.dtype == torch.float32 else SHAPES[find_architecture(q.device)]
    return next(shapes for head_dim, shapes in table.items() if q.size(-1) <= head_dim)


def forward(inputs: Inputs, settings: Settings) -> tuple[Tensor, Tensor]:
    """out [sq, b, a, d] and the logsumexp [b, a, sq] (float32) in units of the unscaled scores.

    The logsumexp is infinite where a query sees no key. Where every score is masked, it is relative to the masked
    score, and its last bit is 1.
    """
    q = inputs.q
    _check(q)
    num_queries, batch, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    logsumexp = torch.empty(batch, heads, num_queries, dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return out, logsumexp
    shape = choose_shapes(q)[0]
    with torch.cuda.device_of(q):
        rows.launch_forward(
            -(-num_queries // shape.queries) * batch * heads,
            out_ptr=out,
            logsumexp_ptr=logsumexp,
            **_collect_arguments(inputs, settings, shape),
        )
    return out, logsumexp


def backward(grad_out: Tensor, inputs: Inputs, kept: Kept, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """grad_q, grad_k, grad_v in the shapes of q, k, v; the same bits every time on the same GPU."""
    q, k, v, _, _ = inputs
    num_queries, batch, heads, _ = q.shape
    grad_q, grad_k, grad_v = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    if q.numel() == 0:
        return grad_q, grad_k.zero_(), grad_v.zero_()
    out, logsumexp, _ = kept
    assert logsumexp is not None
    padded = -(-num_queries // PADDING.value) * PADDING.value
    shared = {
        "statistics_ptr": torch.empty(2, batch, heads, padded, dtype=torch.float32, device=q.device),
        "norm_ptr": torch.empty_like(logsumexp) if q.dtype == torch.float32 else None,
        "softmax_scale": settings.softmax_scale,
    }
    _, shape, kv_shape = choose_shapes(q)
    with torch.cuda.device_of(q):
        rows.launch_grad_q(
            -(-num_queries // shape.queries) * batch * heads,
            out_ptr=out,
            logsumexp_ptr=logsumexp,
            grad_q_ptr=grad_q,
            **shared,
            **_collect_arguments(inputs, settings, shape, grad_out),
        )
        columns.launch_grad_kv(
            -(-k.size(0) // kv_shape.keys) * batch * k.size(2),
            grad_k_ptr=grad_k,
            grad_v_ptr=grad_v,
            KEEPS_APART=q.dtype != torch.float32 and find_architecture(q.device) == 90,
            **shared,
            **_collect_arguments(inputs, settings, kv_shape, grad_out),
        )
    return grad_q, grad_k, grad_v


def _collect_arguments(
    inputs: Inputs, settings: Settings, shape: Shape, grad_out: Tensor | None = None
) -> dict[str, Any]:
    """The launch arguments that every pass has; forward has no grad_out."""
    q, k, v, mask, key_lengths = inputs
    named = {"q": q, "k": k, "v": v} | ({} if grad_out is None else {"grad": grad_out})
    readable = {name: t if _is_readable(t) else t.contiguous() for name, t in named.items()}
    head_dim = q.size(-1)
    strides = {
        f"{name}_{axis}": t.stride(dim) if t.size(dim) > 1 else 0
        for name, t in readable.items()
        for dim, axis in enumerate(("row", "sample", "head"))
    }
    # In units of 8 elements, so that the compiler knows them for multiples.
    unit = 8 if all(stride % 8 == 0 for stride in strides.values()) else 1
    arguments: dict[str, Any] = {f"{name}_ptr" if name != "grad" else "grad_out_ptr": t for name, t in readable.items()}
    arguments |= {name: stride // unit for name, stride in strides.items()}
    if mask is not None:
        mask = mask.view(torch.uint8).expand(q.size(1), q.size(2), q.size(0), k.size(0))
    mask_strides = (0, 0, 0, 0) if mask is None else mask.stride()
    arguments |= zip(("mask_sample", "mask_head", "mask_row", "mask_column"), mask_strides, strict=True)
    first, last = settings.find_window(q.size(0), k.size(0))
    return (
        arguments
        | _collect_draw(settings)
        | {
            "mask_ptr": mask,
            "lengths_ptr": None if key_lengths is None else key_lengths.contiguous(),
            "num_queries": q.size(0),
            "num_keys": k.size(0),
            "batch": q.size(1),
            "num_heads": q.size(2),
            "group_size": q.size(2) // k.size(2),
            "first_offset": first or 0,
            "last_offset": last or 0,
            "scale": settings.softmax_scale * math.log2(math.e),
            "masked_score": MASKED_SCORE / settings.softmax_scale,
            "UNIT": unit,
            "LIMITS_LEFT": first is not None,
            "LIMITS_RIGHT": last is not None,
            "HAS_MASK": mask is not None,
            "HAS_LENGTHS": key_lengths is not None,
            "PRECISE": q.dtype == torch.float32,
            "HEAD_DIM": head_dim,
            "BLOCK_DIM": max(16, 1 << (head_dim - 1).bit_length()),
            "BLOCK_QUERIES": shape.queries,
            "BLOCK_KEYS": shape.keys,
            "BRANCHES": shape.branches and PIPELINES_BRANCHES,
            "num_warps": shape.warps,
            "num_stages": shape.stages,
            "enable_fp_fusion": True,
        }
    )


def _collect_draw(settings: Settings) -> dict[str, Any]:
    """The launch arguments of dropout."""
    key, first_sample = settings.dropout_key, settings.first_sample
    loads_key, loads_sample = isinstance(key, Tensor), isinstance(first_sample, Tensor)
    key_low, key_high = (0, 0) if key is None or isinstance(key, Tensor) else key_words(key)
    p = effective_probability(settings.dropout_p)
    return {
        "key_ptr": key if loads_key else None,
        "first_sample_ptr": first_sample if loads_sample else None,
        "key_low": key_low,
        "key_high": key_high,
        "first_sample": 0 if loads_sample else first_sample,
        "first_head": settings.first_head,
        "limit": round(p * 65536),
        "keep_scale": 1.0 / (1.0 - p),
        "DRAWS": p > 0,
        "LOADS_KEY": loads_key,
        "LOADS_SAMPLE": loads_sample,
    }


def _is_readable(t: Tensor) -> bool:
    """Whether kernels can read t as it is."""
    return t.stride(-1) == 1 and t.stride(0) < MAX_ROW_ELEMENTS


def _check(q: Tensor) -> None:
    if q.dtype not in DTYPES or q.size(-1) > MAX_HEAD_DIM:
        raise ValueError(
            f"attention: q is {q.dtype} with head_dim {q.size(-1)}; expected float32, float16 or bfloat16 with at most "
            f"{MAX_HEAD_DIM} on a GPU; cast it"
        )
    if q[0:1].numel() >= MAX_ROW_ELEMENTS:
        raise ValueError(
            f"attention: q is {list(q.shape)}; expected fewer than {MAX_ROW_ELEMENTS} numbers per position; "
            "split the micro batch"
        )

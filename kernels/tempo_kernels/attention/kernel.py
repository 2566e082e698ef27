"""Attention on a GPU, in Triton; eager.py is the specification.

FlashAttention-2 (Dao, arXiv 2307.08691): forward and the gradient of q walk over keys in kernel_rows.py, the gradients
of k and v over queries in kernel_columns.py, and kernel_tile.py is what they do with one tile. Scores and masks live
in registers only: from the logsumexp, backward computes the probabilities again, and Philox draws the same bits again.
Here are the launches, and the tile sizes for each architecture and head dimension.
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
from tempo_kernels.attention.settings import MASKED_SCORE, Settings
from tempo_kernels.philox import effective_probability
from tempo_kernels.philox.kernel import key_words

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
PIPELINES_BRANCHES = not triton.__version__.startswith("3.2.")  # which cannot order loads around them
MAX_ROW_ELEMENTS = 1 << 24  # offsets inside of a block of 128 rows are 32-bit numbers


class Shape(NamedTuple):
    """How a pass is cut into programs."""

    queries: int
    keys: int
    warps: int
    stages: int
    # Whether tiles that are seen whole jump over their limits. Where the tensor cores' own layout has to be kept from
    # one product to the next (before sm_90), the compiler loses it at the jump, which costs more than it saves.
    branches: bool


# {architecture: {head_dim up to: (forward, grad_q, grad_kv)}}, 16-bit types. The largest tiles that keep to registers
# and to shared memory (163 KiB on sm_80, 227 KiB from sm_90 on), by compiling; which is fastest is not measured yet.
# Without TMA and warp specialisation: triton 3.2 has no tensor descriptors in kernels, and tl.range has
# warp_specialize only from 3.3 on.
SHAPES = {
    80: {
        64: (Shape(128, 64, 8, 2, False), Shape(128, 64, 8, 2, False), Shape(32, 128, 8, 2, False)),
        128: (Shape(128, 64, 8, 2, False), Shape(64, 32, 4, 2, False), Shape(16, 64, 4, 2, False)),
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
# float32 goes without tensor cores, for its products to be exact ones.
FLOAT32_SHAPES = {
    128: (Shape(32, 32, 8, 1, False),) * 3,
    256: (Shape(16, 32, 8, 1, False),) * 3,
}


@functools.cache
def architecture(device: torch.device) -> int:
    """The key of SHAPES for a device."""
    # Consumer Blackwell (12) has neither sm_90's nor sm_100's matrix instructions.
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
    return {9: 90, 10: 100}.get(major, 80)


def shapes_of(q: Tensor) -> tuple[Shape, ...]:
    """(forward, grad_q, grad_kv)"""
    table = FLOAT32_SHAPES if q.dtype == torch.float32 else SHAPES[architecture(q.device)]
    return next(shapes for head_dim, shapes in table.items() if q.size(-1) <= head_dim)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, key_lengths: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor]:
    """out [sq, b, a, d] and the logsumexp [b, a, sq] (float32) in units of the unscaled scores.

    Infinite where no key is seen; where every score is masked, it is counted from those, and its last bit is 1.
    """
    _check(q)
    num_queries, batch, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    logsumexp = torch.empty(batch, heads, num_queries, dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return out, logsumexp
    shape = shapes_of(q)[0]
    with torch.cuda.device_of(q):
        rows.forward(
            -(-num_queries // shape.queries) * batch * heads,
            out_ptr=out,
            logsumexp_ptr=logsumexp,
            **_shared({"q": q, "k": k, "v": v}, mask, key_lengths, settings, shape),
        )
    return out, logsumexp


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    settings: Settings,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad_q, grad_k, grad_v in the shapes of q, k, v; the same bits every time on the same GPU."""
    num_queries, batch, heads, _ = q.shape
    grad_q, grad_k, grad_v = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    if q.numel() == 0:
        return grad_q, grad_k.zero_(), grad_v.zero_()
    delta = torch.empty_like(logsumexp)
    inputs = {"q": q, "k": k, "v": v, "grad": grad_out}
    shared = {
        "logsumexp_ptr": logsumexp,
        "delta_ptr": delta,
        "norm_ptr": torch.empty_like(logsumexp) if q.dtype == torch.float32 else None,
        "softmax_scale": settings.softmax_scale,
    }
    _, shape, kv_shape = shapes_of(q)
    with torch.cuda.device_of(q):
        rows.grad_q(
            -(-num_queries // shape.queries) * batch * heads,
            out_ptr=out,
            grad_q_ptr=grad_q,
            **shared,
            **_shared(inputs, mask, key_lengths, settings, shape),
        )
        columns.grad_kv(
            -(-k.size(0) // kv_shape.keys) * batch * k.size(2),
            grad_k_ptr=grad_k,
            grad_v_ptr=grad_v,
            **shared,
            **_shared(inputs, mask, key_lengths, settings, kv_shape),
        )
    return grad_q, grad_k, grad_v


def _shared(
    inputs: dict[str, Tensor], mask: Tensor | None, key_lengths: Tensor | None, settings: Settings, shape: Shape
) -> dict[str, Any]:
    """The launch arguments that every pass has."""
    inputs = {name: t if _is_readable(t) else t.contiguous() for name, t in inputs.items()}
    q, k = inputs["q"], inputs["k"]
    head_dim = q.size(-1)
    strides = {
        f"{name}_{axis}": t.stride(dim) if t.size(dim) > 1 else 0
        for name, t in inputs.items()
        for dim, axis in enumerate(("row", "sample", "head"))
    }
    # In units of 8 elements, so that the compiler knows them for multiples.
    unit = 8 if all(stride % 8 == 0 for stride in strides.values()) else 1
    arguments: dict[str, Any] = {f"{name}_ptr" if name != "grad" else "grad_out_ptr": t for name, t in inputs.items()}
    arguments |= {name: stride // unit for name, stride in strides.items()}
    if mask is not None:
        mask = mask.view(torch.uint8).expand(q.size(1), q.size(2), q.size(0), k.size(0))
    mask_strides = (0, 0, 0, 0) if mask is None else mask.stride()
    arguments |= zip(("mask_sample", "mask_head", "mask_row", "mask_column"), mask_strides, strict=True)
    left, right = settings.window(q.size(0), k.size(0))
    return (
        arguments
        | _drawn(settings)
        | {
            "mask_ptr": mask,
            "lengths_ptr": None if key_lengths is None else key_lengths.contiguous(),
            "num_queries": q.size(0),
            "num_keys": k.size(0),
            "batch": q.size(1),
            "num_heads": q.size(2),
            "group_size": q.size(2) // k.size(2),
            "first_offset": 0 if left is None else left,
            "last_offset": 0 if right is None else right,
            "scale": settings.softmax_scale * math.log2(math.e),
            "masked_score": MASKED_SCORE / settings.softmax_scale,
            "UNIT": unit,
            "LIMITS_LEFT": left is not None,
            "LIMITS_RIGHT": right is not None,
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


def _drawn(settings: Settings) -> dict[str, Any]:
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

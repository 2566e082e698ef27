"""Attention on a GPU, in Triton; eager.py is the specification.

The algorithm is FlashAttention-2's (Dao, arXiv 2307.08691). Forward and the gradient of q walk over keys
(kernel_rows.py); the gradients of k and v walk over queries (kernel_columns.py); where there are enough heads, one walk
finds all three gradients (kernel_heads.py). kernel_tile.py holds what they do with one tile. Scores and masks live in
registers only: backward computes the probabilities again from the logsumexp, and Philox draws the same bits again. This
file launches the passes and chooses the tile sizes.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tempo_kernels.attention import kernel_columns as columns
from tempo_kernels.attention import kernel_heads as whole_heads
from tempo_kernels.attention import kernel_rows as rows
from tempo_kernels.attention.kernel_tile import PADDING
from tempo_kernels.attention.settings import MASKED_SCORE, Inputs, Kept, Settings
from tempo_kernels.kernel_launch import cache_plans, count_multiprocessors
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
        64: (Shape(128, 128, 8, 2, True), Shape(128, 64, 8, 2, True), Shape(64, 128, 8, 2, True)),
        128: (Shape(128, 128, 8, 2, True), Shape(128, 64, 8, 2, True), Shape(32, 128, 8, 2, True)),
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

# One walk for all three gradients, on sm_90: {head_dim up to: (shape, how many programs share a multiprocessor)}.
SHAPES_OF_HEADS = {64: (Shape(64, 64, 4, 2, True), 2), 128: (Shape(128, 64, 8, 2, True), 1)}
MAX_SPLITS = 2  # each holds 4 bytes per number of q


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
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
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
    """grad_q, grad_k, grad_v in the shapes of q, k, v; the same bits every time on the same GPU.

    While it runs it holds 8 bytes per query and head, and where choose_splits says so 4 or 8 bytes per number of q.
    """
    q = inputs.q
    grad_q, grad_k, grad_v = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in inputs[:3])
    grads = grad_q, grad_k, grad_v
    if q.numel() == 0:
        return grad_q, grad_k.zero_(), grad_v.zero_()
    with torch.cuda.device_of(q):
        splits = choose_splits(inputs)
        if splits > 0:
            _walk_once(splits, grads, grad_out, inputs, kept, settings)
        else:
            _walk_twice(grads, grad_out, inputs, kept, settings)
    return grads


def choose_splits(inputs: Inputs) -> int:
    """How many programs share a key-value head in kernel_heads.py, or 0: two walks, each with a program for a block.

    By their instructions and products one walk takes about five eighths of the time of two. It is chosen where its few,
    long programs keep seven tenths of the GPU busy.
    """
    q, k = inputs.q, inputs.k
    is_compiled_for = q.dtype != torch.float32 and q.size(-1) <= max(SHAPES_OF_HEADS)
    if not is_compiled_for or find_architecture(q.device) != 90:
        return 0
    shape, programs = choose_shape_of_heads(q)
    for splits in range(1, min(MAX_SPLITS, -(-k.size(0) // shape.keys)) + 1):
        rounds = splits * k.size(1) * k.size(2) / (programs * count_multiprocessors(q.device))
        if rounds >= 0.7 * math.ceil(rounds):
            return splits
    return 0


def choose_shape_of_heads(q: Tensor) -> tuple[Shape, int]:
    """The entry of SHAPES_OF_HEADS."""
    return next(entry for head_dim, entry in SHAPES_OF_HEADS.items() if q.size(-1) <= head_dim)


def _walk_once(
    splits: int, grads: tuple[Tensor, ...], grad_out: Tensor, inputs: Inputs, kept: Kept, settings: Settings
) -> None:
    q, k, shape = inputs.q, inputs.k, choose_shape_of_heads(inputs.q)[0]
    batch, heads, padded = q.size(1), q.size(2), _pad(q.size(0))
    arguments = _collect_arguments(inputs, settings, shape, grad_out)
    whole_heads.launch(
        padded // shape.queries * batch * heads,
        batch * k.size(2),
        out_ptr=kept.out,
        logsumexp_ptr=kept.logsumexp,
        statistics_ptr=torch.empty(2, batch, heads, padded, dtype=torch.float32, device=q.device),
        sums_ptr=torch.empty(
            splits, batch, heads, padded, arguments["BLOCK_DIM"], dtype=torch.float32, device=q.device
        ),
        grad_q_ptr=grads[0],
        grad_k_ptr=grads[1],
        grad_v_ptr=grads[2],
        softmax_scale=settings.softmax_scale,
        NUM_SPLITS=splits,
        KEEPS_APART=True,
        **arguments,
    )


def _walk_twice(grads: tuple[Tensor, ...], grad_out: Tensor, inputs: Inputs, kept: Kept, settings: Settings) -> None:
    q, k = inputs.q, inputs.k
    num_queries, batch, heads, _ = q.shape
    assert kept.logsumexp is not None
    shared = {
        "statistics_ptr": torch.empty(2, batch, heads, _pad(num_queries), dtype=torch.float32, device=q.device),
        "norm_ptr": torch.empty_like(kept.logsumexp) if q.dtype == torch.float32 else None,
        "softmax_scale": settings.softmax_scale,
    }
    _, shape, kv_shape = choose_shapes(q)
    rows.launch_grad_q(
        -(-num_queries // shape.queries) * batch * heads,
        out_ptr=kept.out,
        logsumexp_ptr=kept.logsumexp,
        grad_q_ptr=grads[0],
        **shared,
        **_collect_arguments(inputs, settings, shape, grad_out),
    )
    columns.launch_grad_kv(
        -(-k.size(0) // kv_shape.keys) * batch * k.size(2),
        grad_k_ptr=grads[1],
        grad_v_ptr=grads[2],
        KEEPS_APART=q.dtype != torch.float32 and find_architecture(q.device) == 90,
        **shared,
        **_collect_arguments(inputs, settings, kv_shape, grad_out),
    )


def _pad(num_queries: int) -> int:
    """The rows of the statistics."""
    multiple: int = PADDING.value
    return -(-num_queries // multiple) * multiple


def _collect_arguments(
    inputs: Inputs, settings: Settings, shape: Shape, grad_out: Tensor | None = None
) -> dict[str, Any]:
    """The launch arguments that every pass has; forward has no grad_out."""
    q, k, v = (t if _is_readable(t) else t.contiguous() for t in inputs[:3])
    mask, key_lengths = inputs.mask, inputs.key_lengths
    if mask is not None:
        mask = mask.view(torch.uint8).expand(q.size(1), q.size(2), q.size(0), k.size(0))
    key, first_sample = settings.dropout_key, settings.first_sample
    loads_key, loads_sample = isinstance(key, Tensor), isinstance(first_sample, Tensor)
    key_low, key_high = (0, 0) if key is None or isinstance(key, Tensor) else key_words(key)
    tensors = {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "mask_ptr": mask,
        "lengths_ptr": None if key_lengths is None else key_lengths.contiguous(),
        "key_ptr": key if loads_key else None,
        "first_sample_ptr": first_sample if loads_sample else None,
        "key_low": key_low,
        "key_high": key_high,
        "first_sample": 0 if loads_sample else first_sample,
        "first_head": settings.first_head,
    }
    grad_strides = None
    if grad_out is not None:
        tensors["grad_out_ptr"] = grad_out = grad_out if _is_readable(grad_out) else grad_out.contiguous()
        grad_strides = grad_out.stride()
    window = None if settings.window_size is None else tuple(settings.window_size)
    numbers = _collect_numbers(
        (q.shape, k.shape),
        (q.stride(), k.stride(), v.stride(), grad_strides, None if mask is None else mask.stride()),
        (key_lengths is not None, loads_key, loads_sample, q.dtype == torch.float32),
        (settings.causal, settings.softmax_scale, settings.dropout_p, window),
        shape,
    )
    return numbers | tensors


@cache_plans
def _collect_numbers(
    shapes: tuple[torch.Size, torch.Size],
    strides: tuple[tuple[int, ...] | None, ...],
    flags: tuple[bool, ...],
    settings: tuple[bool, float, float, tuple[int, int] | None],
    shape: Shape,
) -> dict[str, Any]:
    """The launch arguments that are neither tensors nor of one call: of the shapes of q and k, the strides of q, k, v,
    grad_out and mask, the flags HAS_LENGTHS, LOADS_KEY, LOADS_SAMPLE and PRECISE, causal, softmax_scale, dropout_p and
    window_size."""
    (num_queries, batch, heads, head_dim), (num_keys, _, groups, _) = shapes
    has_lengths, loads_key, loads_sample, is_precise = flags
    causal, softmax_scale, dropout_p, window = settings
    *of_tensors, of_mask = strides
    named = zip("q k v grad".split(), (shapes[0], shapes[1], shapes[1], shapes[0]), of_tensors, strict=True)
    steps = {
        f"{name}_{axis}": stride if size > 1 else 0
        for name, sizes, of_tensor in named
        if of_tensor is not None
        for axis, size, stride in zip(("row", "sample", "head"), sizes[:3], of_tensor[:3], strict=True)
    }
    # In units of 8 elements, so that the compiler knows them for multiples.
    unit = 8 if all(step % 8 == 0 for step in steps.values()) else 1
    first, last = Settings(causal, softmax_scale, dropout_p, None, None, 0, window).find_window(num_queries, num_keys)
    p = effective_probability(dropout_p)
    mask_names = ("mask_sample", "mask_head", "mask_row", "mask_column")
    return {
        **{name: step // unit for name, step in steps.items()},
        **dict(zip(mask_names, of_mask or (0, 0, 0, 0), strict=True)),
        "num_queries": num_queries,
        "num_keys": num_keys,
        "batch": batch,
        "num_heads": heads,
        "group_size": heads // groups,
        "first_offset": first or 0,
        "last_offset": last or 0,
        "scale": softmax_scale * math.log2(math.e),
        "masked_score": MASKED_SCORE / softmax_scale,
        "limit": round(p * 65536),
        "keep_scale": 1.0 / (1.0 - p),
        "UNIT": unit,
        "LIMITS_LEFT": first is not None,
        "LIMITS_RIGHT": last is not None,
        "HAS_MASK": of_mask is not None,
        "HAS_LENGTHS": has_lengths,
        "DRAWS": p > 0,
        "LOADS_KEY": loads_key,
        "LOADS_SAMPLE": loads_sample,
        "PRECISE": is_precise,
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": max(16, 1 << (head_dim - 1).bit_length()),
        "BLOCK_QUERIES": shape.queries,
        "BLOCK_KEYS": shape.keys,
        "BRANCHES": shape.branches and PIPELINES_BRANCHES,
        "num_warps": shape.warps,
        "num_stages": shape.stages,
        "enable_fp_fusion": True,
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

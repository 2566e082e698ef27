"""Computes attention on a GPU in Triton: chooses tiles, plans and launches the passes; eager.py is the specification.

There is one pass forward (kernel_forward.py), one for the gradient of q, one for the gradients of k and v, and one for
a bias (kernel_backward.py). They share what a program owns (kernel_program.py) and the code for one tile
(kernel_scores.py). Scores and masks live in registers only.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.attention import kernel_backward, kernel_forward
from tempo_kernels.attention.kernel_program import VARYING
from tempo_kernels.attention.settings import (
    MASKED_SCORE,
    MASKED_SCORES,
    BiasSizes,
    Call,
    Draw,
    Extras,
    Gradients,
    Inputs,
    Kept,
    Places,
    Scores,
    ScoreStep,
    Settings,
    Sizes,
    Step,
    Steps,
)
from tempo_kernels.kernel_launch import Plan, cache_plans, launch
from tempo_kernels.kernel_numbers import DTYPES, check_dtype
from tempo_kernels.opaque import split_draw
from tempo_kernels.philox import effective_probability, threshold
from tempo_kernels.philox.kernel import LANES, key_words

MAX_HEAD_DIM = 256
MAX_ROW_ELEMENTS = 1 << 24  # so that offsets inside a block of 128 rows fit into 32 bits


class Tile(NamedTuple):
    queries: int
    keys: int
    num_warps: int
    num_stages: int


# By architecture, pass and head_dim up to. For 16-bit types these are the largest tiles that do not spill registers in
# their loops and fit into shared memory (163 KiB on sm_80, 227 KiB from sm_90 on); no GPU has measured them.
TILES = {
    80: {
        "forward": {64: Tile(128, 64, 8, 2), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 4, 1)},
        "grad_q": {64: Tile(128, 64, 8, 2), 128: Tile(64, 64, 8, 2), 256: Tile(64, 32, 8, 1)},
        "grad_kv": {64: Tile(32, 128, 8, 2), 128: Tile(16, 64, 4, 2), 256: Tile(16, 64, 8, 1)},
    },
    90: {
        "forward": {64: Tile(128, 64, 8, 2), 128: Tile(128, 64, 8, 2), 256: Tile(128, 64, 8, 2)},
        "grad_q": {64: Tile(64, 64, 4, 2), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2)},
        "grad_kv": {64: Tile(64, 64, 4, 2), 128: Tile(32, 64, 4, 2), 256: Tile(16, 64, 8, 1)},
    },
    100: {
        "forward": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(128, 32, 8, 2)},
        "grad_q": {64: Tile(128, 64, 8, 2), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2)},
        "grad_kv": {64: Tile(32, 128, 8, 2), 128: Tile(32, 128, 8, 2), 256: Tile(32, 64, 8, 1)},
    },
}
# Of 16-bit types on any GPU; larger ones spill on sm_80.
TILES_OF_BIAS = {64: Tile(64, 32, 4, 2), 128: Tile(64, 32, 8, 1), 256: Tile(32, 64, 8, 1)}
# float32 stays off the tensor cores, which would round its products to TF32.
FLOAT32_TILES = {128: Tile(32, 32, 8, 1), 256: Tile(16, 32, 8, 1)}


class Signature(NamedTuple):
    """All that a call's launches depend on, apart from its tensors and the numbers that VARYING names."""

    settings: Settings
    """Without a dropout key and a first sample."""
    architecture: int
    """80, 90 or 100; 0 for float32, which does not depend on it."""
    q_shape: torch.Size
    k_shape: torch.Size
    value_dim: int
    strides: tuple[tuple[int, ...], ...]
    """Of q, k, v and, in backward, grad_out."""
    mask_strides: tuple[int, ...] | None
    bias_strides: tuple[int, ...] | None
    num_documents: int | None
    """None where the row is not packed."""
    has_samples: bool

    def get_tile(self, name: str) -> Tile:
        """Returns the tile of a pass: "forward", "grad_q", "grad_kv" or "grad_bias"."""
        tiles = TILES_OF_BIAS if name == "grad_bias" else TILES[self.architecture or 90].get(name, {})
        tiles = tiles if self.architecture else FLOAT32_TILES
        head_dim = max(self.q_shape[3], self.value_dim)
        tile = next(tile for largest, tile in tiles.items() if head_dim <= largest)
        if head_dim > 64 and name != "grad_bias" and (self.mask_strides or self.bias_strides):
            # A tile of the mask or bias lies in registers, too, which leaves room for half of the rows passed over.
            rows = "queries" if name == "grad_kv" else "keys"
            tile = tile._replace(**{rows: max(16 if name == "grad_kv" else 32, getattr(tile, rows) // 2)})
        return tile


@functools.cache
def get_architecture(device: torch.device) -> int:
    """Returns the architecture whose kernels a GPU runs: 80, 90 or 100."""
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
    # Consumer Blackwell (12) has neither sm_90's nor sm_100's matrix instructions.
    return {9: 90, 10: 100}.get(major, 80)


def forward(inputs: Inputs, settings: Settings, out_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Returns out [sq, b, a, dv] and the logsumexp [b, a, sq] (float32) in units of the unscaled scores.

    The logsumexp is infinite where a query sees no key. Where every score is masked, it is relative to the masked
    score, and its last bit is 1. Where an out_dtype is given, out has it, and the logsumexp is in units of the scaled
    scores, as eager.py's. Of a packed row, tokens of no document get what cpu.py gives them.
    """
    q, v = inputs.q, inputs.v
    _check(inputs, settings)
    num_queries, batch, heads, _ = q.shape
    out = torch.empty(num_queries, batch, heads, v.size(-1), dtype=out_dtype or q.dtype, device=q.device)
    logsumexp = torch.empty(batch, heads, num_queries, dtype=torch.float32, device=q.device)
    if inputs.cu_seqlens is not None:
        # A token of no document has no program.
        out.zero_()
        logsumexp.fill_(float("inf"))
    if q.numel() == 0 or inputs.num_documents == 0:
        return out, logsumexp
    tensors, signature, extras, varying = _prepare(inputs, settings)
    launch(kernel_forward._forward_kernel, plan_pass(signature, "forward"), (*tensors, out, logsumexp, extras), varying)
    return out, logsumexp if out_dtype is None else logsumexp.mul_(settings.softmax_scale)


def backward(
    grad_out: Tensor, inputs: Inputs, kept: Kept, settings: Settings, needs_grad_bias: bool = False
) -> Gradients:
    """Returns the gradients of q, k, v, the sink, and of the bias if it is needed; the same bits every time on the same
    GPU.

    With `kept.is_part` they are float32, out may be of any dtype, and the logsumexp is that of eager.py.

    While it runs it holds 4 bytes per query and head, and 8 in float32.
    """
    q, bias = inputs.q, inputs.bias
    dtype = torch.float32 if kept.is_part else q.dtype
    grad_q, grad_k, grad_v = grads = [torch.empty(t.shape, dtype=dtype, device=q.device) for t in inputs[:3]]
    grad_bias = bias.new_empty(bias.shape) if needs_grad_bias and bias is not None else None
    if inputs.cu_seqlens is not None:
        for grad in grads:
            grad.zero_()
    if q.numel() == 0 or inputs.num_documents == 0:
        grad_sink = None if inputs.sink is None else torch.zeros_like(inputs.sink)
        grad_bias = None if grad_bias is None else grad_bias.zero_()
        return Gradients(grad_q, grad_k.zero_(), grad_v.zero_(), grad_bias, grad_sink)
    assert kept.logsumexp is not None
    logsumexp = kept.logsumexp / settings.softmax_scale if kept.is_part else kept.logsumexp
    (q, k, v, grad_out), signature, extras, varying = _prepare(inputs, settings, grad_out)
    delta = torch.empty_like(logsumexp)
    # A part of a row has no sum to normalise by.
    norm = torch.empty_like(logsumexp) if q.dtype == torch.float32 and not kept.is_part else None
    statistics = (grad_out, logsumexp, delta, norm)
    pointers: tuple[Any, ...] = (q, k, v, kept.out, *statistics, grad_q, extras)
    launch(kernel_backward._grad_q_kernel, plan_pass(signature, "grad_q"), pointers, varying)
    pointers = (q, k, v, *statistics, grad_k, grad_v, extras)
    launch(kernel_backward._grad_kv_kernel, plan_pass(signature, "grad_kv"), pointers, varying)
    if grad_bias is not None:
        pointers = (q, k, v, *statistics, grad_bias, extras)
        launch(kernel_backward._grad_bias_kernel, plan_grad_bias(signature, grad_bias.shape), pointers, varying)
    grad_sink = _compute_grad_sink(inputs, settings, logsumexp, delta, norm)
    return Gradients(grad_q, grad_k, grad_v, grad_bias, grad_sink)


def _compute_grad_sink(
    inputs: Inputs, settings: Settings, logsumexp: Tensor, delta: Tensor, norm: Tensor | None
) -> Tensor | None:
    """Returns minus the sum over rows of the sink's probability times the row's sum of out * grad_out, which is delta
    [b, a, sq] times dropout's scale; norm [b, a, sq] multiplies probabilities."""
    if inputs.sink is None:
        return None
    sink = inputs.sink.float().view(-1, 1)
    if inputs.mask is not None:
        # Where every score is masked, the logsumexp is relative to the masked score.
        is_relative = (logsumexp.view(torch.int32) & 1).bool()
        sink = torch.where(is_relative, sink - MASKED_SCORE, sink)
    p = (sink - logsumexp * settings.softmax_scale).exp()
    if norm is not None:
        p = torch.where(logsumexp.isinf(), 0.0, p * norm)
    delta = torch.where(logsumexp.isinf(), 0.0, delta)
    return ((p * delta).sum((0, 2)) * -settings.keep_scale).to(inputs.sink.dtype)


def _prepare(
    inputs: Inputs, settings: Settings, grad_out: Tensor | None = None
) -> tuple[tuple[Tensor, ...], Signature, Extras, tuple[int, ...]]:
    """Returns q, k, v and, in backward, grad_out as kernels can read them; what plans depend on; the other tensors; and
    the numbers that VARYING names."""
    q, k, v, mask, bias, alibi_slopes, sink, boundaries, key_boundaries, samples = inputs
    # Kernels read rows whose d is contiguous and whose strides fit into 32 bits.
    given = (q, k, v) if grad_out is None else (q, k, v, grad_out)
    tensors = tuple([t if t.stride(3) == 1 and t.stride(0) < MAX_ROW_ELEMENTS else t.contiguous() for t in given])
    scores_shape = (q.size(1), q.size(2), q.size(0), k.size(0))
    mask = None if mask is None else mask.view(torch.uint8).expand(scores_shape)
    bias = None if bias is None else bias.expand(scores_shape)
    samples = samples if settings.dropout_p > 0 else None
    alibi_slopes, sink, boundaries, key_boundaries, samples = [
        None if t is None else t.contiguous() for t in (alibi_slopes, sink, boundaries, key_boundaries, samples)
    ]
    key_boundaries = boundaries if key_boundaries is None else key_boundaries
    (low, high, first_sample), drawn_from = split_draw(settings.dropout_key, settings.first_sample)
    extras = Extras(mask, bias, alibi_slopes, sink, *drawn_from, boundaries, key_boundaries, samples)
    window = settings.window_size
    window = None if window is None else (window[0], window[1])  # a list has no hash
    signature = Signature(
        dataclasses.replace(settings, dropout_key=0, first_sample=0, window_size=window),
        0 if q.dtype == torch.float32 else get_architecture(q.device),
        q.shape,
        k.shape,
        v.size(3),
        tuple([t.stride() for t in tensors]),
        None if mask is None else mask.stride(),
        None if bias is None else bias.stride(),
        inputs.num_documents,
        samples is not None,
    )
    return tensors, signature, extras, (*key_words(low | high << 32), first_sample)


@cache_plans
def plan_pass(signature: Signature, name: str) -> Plan:
    """Plans the pass "forward", "grad_q" or "grad_kv"."""
    tile = signature.get_tile(name)
    shape, block = (signature.k_shape, tile.keys) if name == "grad_kv" else (signature.q_shape, tile.queries)
    num_blocks = -(-shape[0] // block)
    if signature.num_documents is not None:
        num_blocks = shape[0] // block + signature.num_documents
    return Plan((num_blocks * shape[1] * shape[2],), VARYING, **_list_arguments(signature, tile))


@cache_plans
def plan_grad_bias(signature: Signature, bias_shape: torch.Size) -> Plan:
    """Plans the pass for the gradient of a bias."""
    tile, num_queries = signature.get_tile("grad_bias"), signature.q_shape[0]
    samples, heads, rows, num_keys = bias_shape
    sums_queries = rows < num_queries
    num_blocks = -(-num_keys // tile.keys) * (1 if sums_queries else -(-num_queries // tile.queries))
    bias_sizes = BiasSizes(samples, heads, tl.constexpr(sums_queries))
    return Plan((num_blocks * samples * heads,), VARYING, bias_sizes=bias_sizes, **_list_arguments(signature, tile))


def _list_arguments(signature: Signature, tile: Tile) -> dict[str, Any]:
    """Lists the arguments that all passes share: neither tensors nor numbers that change."""
    settings, (num_queries, batch, heads, head_dim) = signature.settings, signature.q_shape
    num_keys, _, groups, _ = signature.k_shape
    shapes = (signature.q_shape, signature.k_shape, signature.k_shape, signature.q_shape)
    steps = [
        stride if size > 1 else 0
        for shape, strides in zip(shapes, signature.strides, strict=False)
        for size, stride in zip(shape[:3], strides[:3], strict=True)
    ]
    unit = 8 if all(step % 8 == 0 for step in steps) else 1
    steps = [step // unit for step in steps] + [0] * (12 - len(steps))
    q, k, v, grad_out = (Step(*steps[first : first + 3]) for first in (0, 3, 6, 9))
    mask, bias = (ScoreStep(*(strides or (0, 0, 0, 0))) for strides in (signature.mask_strides, signature.bias_strides))
    # In a packed row the numbers of queries and keys are those of a document, which adds their difference itself.
    is_packed = signature.num_documents is not None
    lengths = (0, 0) if is_packed else (num_queries, num_keys)
    first, last = settings.compute_window(*lengths)
    p = effective_probability(settings.dropout_p)
    hides_first = is_packed and p > 0 and not signature.has_samples
    is_part = settings.first_row or settings.first_column
    call = Call(
        Steps(q, k, v, grad_out, mask, bias),
        Sizes(num_queries, num_keys, batch, heads, heads // groups, signature.num_documents or 0),
        Places(
            -(1 << 30) if first is None and hides_first else first,  # an offset that no row reaches
            last,
            settings.compute_diagonal(*lengths),
            settings.first_row if is_part else None,
            settings.first_column or 0 if is_part else None,
        ),
        Draw(settings.first_head, threshold(p) if p > 0 else None, settings.keep_scale),
        Scores(
            settings.softmax_scale * math.log2(math.e),
            settings.softmax_scale,
            1.0 / settings.softmax_scale,
            MASKED_SCORES[settings.hidden_rows] / settings.softmax_scale,
            None if settings.softcap is None else settings.softcap / settings.softmax_scale,
        ),
        UNIT=tl.constexpr(unit),
        HIDES_FIRST=tl.constexpr(hides_first),
        ADDS_MASK=tl.constexpr(settings.hidden_rows == "added"),
        BRANCHES=tl.constexpr(signature.architecture >= 90),
        KEEPS_APART=tl.constexpr(signature.architecture == 90),
        HEAD_DIM=tl.constexpr(head_dim),
        BLOCK_DIM=tl.constexpr(max(16, triton.next_power_of_2(head_dim))),
        VALUE_DIM=tl.constexpr(signature.value_dim),
        VALUE_BLOCK=tl.constexpr(max(16, triton.next_power_of_2(signature.value_dim))),
        BLOCK_QUERIES=tl.constexpr(tile.queries),
        BLOCK_KEYS=tl.constexpr(tile.keys),
    )
    return {"call": call, "num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}


def _check(inputs: Inputs, settings: Settings) -> None:
    q, v = inputs.q, inputs.v
    # Offsets within a tile of the bias have 32 bits.
    if inputs.bias is not None and max(inputs.bias.stride()[2:]) >= MAX_ROW_ELEMENTS // 2:
        raise ValueError(
            f"attention: bias has strides {inputs.bias.stride()}; expected fewer than {MAX_ROW_ELEMENTS // 2} elements "
            "from query to query and from key to key on a GPU; give bias.contiguous()"
        )
    if inputs.bias is not None:
        check_dtype("attention", inputs.bias, "bias is")
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
            f"of Philox draws the masks of {lanes} keys at once; cut the sequence there"
        )

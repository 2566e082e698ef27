"""Computes all three gradients of attention in one walk, in Triton: scores and dropout are computed once, not twice.

FlashAttention-2 (Dao, arXiv 2307.08691, algorithm 2) has a program per block of keys, and all of them add their part of
grad_q to memory, in another order each time. Here one program walks over all key blocks of a head, or a few programs
("splits") walk over a share each. Splits of the keys have float32 sums of grad_q of their own, splits of the queries
float32 parts of grad_k and grad_v. A last launch adds them up. The order is fixed, so the same inputs give the same
bits. `walks.choose_splits` says how many splits there are.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.attention.kernel_columns import find_queries
from tempo_kernels.attention.kernel_tile import (
    DRAWN,
    PADDING,
    VARYING,
    compute_anew,
    count_keys,
    find_place_of_draw,
    find_probabilities,
    find_score_gradients,
    find_seen_keys,
    keep_apart,
    load_described_rows,
    load_rows,
    load_slope,
    order_keys,
    store_rows,
)
from tempo_kernels.kernel_launch import Plan, launch
from tempo_kernels.philox.kernel import load_draw

IS_SUPPORTED = "disable_licm" in inspect.signature(tl.range.__init__).parameters
"""Whether this version of Triton can be told to leave a loop's computations in it."""


@triton.jit
def _find_block(step, split, KEY_SPLITS: tl.constexpr):
    """Returns the block of keys of a step. Splits take turns in being first: under a causal limit early blocks have
    more queries, and taking turns shares them out evenly."""
    turn = split
    if KEY_SPLITS > 1:
        turn = tl.where(step % 2 == 0, split, KEY_SPLITS - 1 - split)
    return step * KEY_SPLITS + turn


@triton.jit
def _lay_out(tile, BLOCK_QUERIES: tl.constexpr, BLOCK_DIM: tl.constexpr, PARTS: tl.constexpr):
    """Flattens a tile [dim, queries] in the order in which sm_90's threads hold a product, four elements at a time: a
    thread then adds 16 bytes at once, and nothing moves between threads. PARTS groups of warps share its columns."""
    tile = tl.reshape(tile, (BLOCK_DIM // 16, 2, 8, PARTS, BLOCK_QUERIES // PARTS // 8, 4, 2))
    return tl.reshape(tl.permute(tile, (4, 3, 0, 2, 5, 1, 6)), (BLOCK_QUERIES * BLOCK_DIM,))


@triton.jit
def _lay_back(numbers, BLOCK_QUERIES: tl.constexpr, BLOCK_DIM: tl.constexpr, PARTS: tl.constexpr):
    """Returns the tile [queries, dim] whose transpose _lay_out flattened."""
    tile = tl.reshape(numbers, (BLOCK_QUERIES // PARTS // 8, PARTS, BLOCK_DIM // 16, 8, 4, 2, 2))
    return tl.trans(tl.reshape(tl.permute(tile, (2, 5, 3, 1, 0, 4, 6)), (BLOCK_DIM, BLOCK_QUERIES)))


@triton.jit(do_not_specialize=VARYING)
def _prepare_kernel(
    out_ptr, grad_out_ptr, logsumexp_ptr, statistics_ptr, grad_row, grad_sample, grad_head,
    num_queries, batch, num_heads, keep_scale,
    UNIT: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr, BLOCK_QUERIES: tl.constexpr,
):  # fmt: skip
    """Writes the statistics of one block of queries, as _grad_q_kernel describes them."""
    num_blocks = tl.cdiv(num_queries, PADDING) * (PADDING // BLOCK_QUERIES)
    start_row, index = tl.program_id(0) % num_blocks * BLOCK_QUERIES, (tl.program_id(0) // num_blocks).to(tl.int64)
    sample, head = index // num_heads, index % num_heads
    block_row = tl.arange(0, BLOCK_QUERIES)
    row = start_row + block_row
    grad_out_ptr += (sample * grad_sample + head * grad_head) * UNIT
    out_row = batch.to(tl.int64) * num_heads * VALUE_DIM
    grad_out = load_rows(grad_out_ptr, start_row, block_row, grad_row * UNIT, num_queries, VALUE_DIM, VALUE_BLOCK)
    out = load_rows(out_ptr + index * VALUE_DIM, start_row, block_row, out_row, num_queries, VALUE_DIM, VALUE_BLOCK)
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1) / keep_scale
    logsumexp = tl.load(logsumexp_ptr + index * num_queries + row, mask=row < num_queries, other=float("inf"))
    num_rows = batch.to(tl.int64) * num_heads * num_blocks * BLOCK_QUERIES
    first_row = index * num_blocks * BLOCK_QUERIES + start_row
    tl.store(statistics_ptr + first_row + block_row, logsumexp)
    tl.store(statistics_ptr + num_rows + first_row + block_row, delta)


@triton.jit
def _add_up_parts(
    parts_ptr, grad_ptr, start, block_row, num_rows, num_splits: tl.constexpr, part_size,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Adds up the parts [splits, rows, HEAD_DIM] of rows of grad_k or grad_v."""
    width = tl.full((), HEAD_DIM, tl.int32)
    total = load_rows(parts_ptr, start, block_row, width, num_rows, HEAD_DIM, BLOCK_DIM)
    for split in tl.static_range(1, num_splits):
        total += load_rows(parts_ptr + split * part_size, start, block_row, width, num_rows, HEAD_DIM, BLOCK_DIM)
    store_rows(grad_ptr, start, block_row, width, num_rows, total, HEAD_DIM, BLOCK_DIM)


@triton.jit(do_not_specialize=VARYING)
def _finish_kernel(
    sums_ptr, grad_q_ptr, k_parts_ptr, v_parts_ptr, grad_k_ptr, grad_v_ptr,
    num_queries, num_keys, batch, num_heads, group_size, softmax_scale, keep_scale,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, KEY_SPLITS: tl.constexpr, QUERY_SPLITS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Adds up the sums of one block of queries and writes its grad_q [sq, b, a, d]; where queries are split, all
    programs share out the rows of grad_k and grad_v."""
    num_blocks = tl.cdiv(num_queries, PADDING) * (PADDING // BLOCK_QUERIES)
    start_row, index = tl.program_id(0) % num_blocks * BLOCK_QUERIES, (tl.program_id(0) // num_blocks).to(tl.int64)
    num_rows = batch.to(tl.int64) * num_heads * num_blocks * BLOCK_QUERIES
    first_row = index * num_blocks * BLOCK_QUERIES + start_row
    place = tl.arange(0, BLOCK_QUERIES * BLOCK_DIM)
    # Behind the last query nobody wrote sums.
    inside = start_row + 0 * place < num_queries
    total = tl.load(sums_ptr + first_row * BLOCK_DIM + place, mask=inside, other=0.0)
    for split in tl.static_range(1, KEY_SPLITS):
        total += tl.load(sums_ptr + (split * num_rows + first_row) * BLOCK_DIM + place, mask=inside, other=0.0)
    grad_q = _lay_back(total, BLOCK_QUERIES, BLOCK_DIM, PARTS) * (softmax_scale * keep_scale)
    out_row = batch.to(tl.int64) * num_heads * HEAD_DIM
    block_row = tl.arange(0, BLOCK_QUERIES)
    store_rows(grad_q_ptr + index * HEAD_DIM, start_row, block_row, out_row, num_queries, grad_q, HEAD_DIM, BLOCK_DIM)
    if QUERY_SPLITS > 1:
        kv_rows = batch.to(tl.int64) * (num_heads // group_size) * num_keys
        k_size, v_size = kv_rows * HEAD_DIM, kv_rows * VALUE_DIM
        step = tl.num_programs(0).to(tl.int64) * BLOCK_QUERIES
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK_QUERIES, kv_rows, step):
            _add_up_parts(k_parts_ptr, grad_k_ptr, start, block_row, kv_rows, QUERY_SPLITS, k_size, HEAD_DIM, BLOCK_DIM)
            _add_up_parts(
                v_parts_ptr, grad_v_ptr, start, block_row, kv_rows, QUERY_SPLITS, v_size, VALUE_DIM, VALUE_BLOCK
            )


@triton.jit(do_not_specialize=VARYING)
def _grad_heads_kernel(
    q_ptr, k_ptr, v_ptr, grad_out_ptr, statistics_ptr, sums_ptr, grad_k_ptr, grad_v_ptr,
    mask_ptr, lengths_ptr, key_ptr, first_sample_ptr, bias_ptr, slopes_ptr, sink_ptr,
    boundaries_ptr, key_boundaries_ptr, samples_ptr,
    q_row, q_sample, q_head, k_row, k_sample, k_head, v_row, v_sample, v_head, grad_row, grad_sample, grad_head,
    mask_sample, mask_head, mask_row, mask_column, bias_sample, bias_head, bias_row, bias_column,
    num_queries, num_keys, batch, num_heads, group_size, first_offset, last_offset, first_row, first_column, diagonal,
    num_documents, cap, inverse_scale,
    scale, softmax_scale, masked_score,
    key_low, key_high, first_sample, first_head, limit, keep_scale,
    UNIT: tl.constexpr, LIMITS_LEFT: tl.constexpr, LIMITS_RIGHT: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, DRAWS: tl.constexpr, LOADS_KEY: tl.constexpr, LOADS_SAMPLE: tl.constexpr,
    PRECISE: tl.constexpr, BRANCHES: tl.constexpr, IS_PART: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SINK: tl.constexpr,
    IS_PACKED: tl.constexpr, LOADS_SAMPLES: tl.constexpr, HIDES_FIRST: tl.constexpr, DESCRIBES: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, KEY_SPLITS: tl.constexpr, QUERY_SPLITS: tl.constexpr,
    KEEPS_APART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes grad_k [sk, b, g, d] and grad_v [sk, b, g, dv] of this split's key blocks of one key-value head, or of
    their parts [query splits, sk, b, g, d or dv] what this split's queries give.

    Writes their parts of grad_q into sums [key splits, b, a, sq rounded up to a multiple of PADDING, BLOCK_DIM]: those
    of the split's first key block are stored, and those of the others added.
    """
    tl.static_assert(not IS_PACKED, "the documents of a packed row are walked through twice")
    num_groups = num_heads // group_size
    split, index = tl.program_id(0) % KEY_SPLITS, tl.program_id(0) // KEY_SPLITS
    query_split, index = index % QUERY_SPLITS, index // QUERY_SPLITS
    sample, kv_head = (index // num_groups).to(tl.int64), (index % num_groups).to(tl.int64)
    num_seen = count_keys(lengths_ptr, sample, num_keys, HAS_LENGTHS)
    key_low, key_high, first_sample = load_draw(
        key_ptr, first_sample_ptr, key_low, key_high, first_sample, LOADS_KEY, LOADS_SAMPLE
    )
    if HAS_MASK:
        mask_ptr += sample * mask_sample
    if HAS_BIAS:
        bias_ptr += sample * bias_sample
    padded = tl.cdiv(num_queries, PADDING) * PADDING
    num_rows = batch.to(tl.int64) * num_heads * padded
    group_head = (kv_head * group_size).to(tl.int32)
    if not DESCRIBES:
        q_ptr += sample * q_sample * UNIT
        grad_out_ptr += sample * grad_sample * UNIT
    logsumexp_ptr = statistics_ptr + sample * num_heads * padded
    delta_ptr = logsumexp_ptr + num_rows
    sums_ptr += (split * num_rows + sample * num_heads * padded) * BLOCK_DIM
    k_ptr += (sample * k_sample + kv_head * k_head) * UNIT
    v_ptr += (sample * v_sample + kv_head * v_head) * UNIT
    index, num_heads_of_row = sample * num_groups + kv_head, batch.to(tl.int64) * num_groups
    grad_k_ptr += index * HEAD_DIM
    grad_v_ptr += index * VALUE_DIM
    grad_k_row, grad_v_row = num_heads_of_row * HEAD_DIM, num_heads_of_row * VALUE_DIM
    if QUERY_SPLITS > 1:
        grad_k_ptr += query_split * num_keys * grad_k_row
        grad_v_ptr += query_split * num_keys * grad_v_row
    block_row, order = tl.arange(0, BLOCK_QUERIES), order_keys(BLOCK_KEYS, True)
    place = tl.arange(0, BLOCK_QUERIES * BLOCK_DIM)
    num_key_blocks = tl.cdiv(num_keys, BLOCK_KEYS)
    k_stride, v_stride = k_row, v_row
    first, _, _, stop = find_queries(
        split * BLOCK_KEYS, num_queries, num_seen, first_offset, last_offset,
        LIMITS_LEFT, LIMITS_RIGHT, BLOCK_QUERIES, BLOCK_KEYS,
    )  # fmt: skip
    if first > 0 or stop < num_queries:
        # Later key blocks may add to the sums of queries that do not see the first one.
        for row in range(query_split * BLOCK_QUERIES, num_queries, QUERY_SPLITS * BLOCK_QUERIES):
            if row < first or row >= stop:
                for member in range(group_size):
                    zeros_ptr = sums_ptr + ((group_head.to(tl.int64) + member) * padded + row) * BLOCK_DIM
                    tl.store(zeros_ptr + place, tl.zeros_like(place).to(tl.float32))
        tl.debug_barrier()
    for turn in tl.range(0, tl.cdiv(num_key_blocks, KEY_SPLITS), disable_licm=True):
        k_stride, v_stride = compute_anew(k_stride), compute_anew(v_stride)
        start_key = _find_block(turn, split, KEY_SPLITS) * BLOCK_KEYS
        first, full_start, full_stop, stop = find_queries(
            start_key, num_queries, num_seen, first_offset, last_offset,
            LIMITS_LEFT, LIMITS_RIGHT, BLOCK_QUERIES, BLOCK_KEYS,
        )  # fmt: skip
        k = load_rows(k_ptr, start_key, order, k_stride * UNIT, num_seen, HEAD_DIM, BLOCK_DIM)
        v = load_rows(v_ptr, start_key, order, v_stride * UNIT, num_seen, VALUE_DIM, VALUE_BLOCK)
        grad_k = tl.zeros((BLOCK_KEYS, BLOCK_DIM), tl.float32)
        grad_v = tl.zeros((BLOCK_KEYS, VALUE_BLOCK), tl.float32)
        if QUERY_SPLITS > 1:
            # Every key block's queries are shared out the same way, so that each of the sums has one program.
            passed = QUERY_SPLITS + query_split - first // BLOCK_QUERIES % QUERY_SPLITS
            first += passed % QUERY_SPLITS * BLOCK_QUERIES
        num_blocks = tl.cdiv(tl.maximum(stop - first, 0), QUERY_SPLITS * BLOCK_QUERIES)
        head, next_row = group_head.to(tl.int64), first
        q_stride, grad_stride = q_row, grad_row
        for _ in tl.range(0, num_blocks * group_size, disable_licm=True):
            start_row = tl.multiple_of(next_row, BLOCK_QUERIES)
            row = start_row + block_row
            if DESCRIBES:
                q = load_described_rows(q_ptr, sample, head, start_row, BLOCK_QUERIES, BLOCK_DIM)
                grad_out = load_described_rows(grad_out_ptr, sample, head, start_row, BLOCK_QUERIES, VALUE_BLOCK)
            else:
                q_stride, grad_stride = compute_anew(q_stride), compute_anew(grad_stride)
                q_head_ptr, grad_head_ptr = q_ptr + head * q_head * UNIT, grad_out_ptr + head * grad_head * UNIT
                q = load_rows(q_head_ptr, start_row, block_row, q_stride * UNIT, num_queries, HEAD_DIM, BLOCK_DIM)
                grad_out = load_rows(
                    grad_head_ptr, start_row, block_row, grad_stride * UNIT, num_queries, VALUE_DIM, VALUE_BLOCK
                )
            logsumexp = tl.load(logsumexp_ptr + head * padded + start_row + block_row)
            delta = tl.load(delta_ptr + head * padded + start_row + block_row)
            mask_head_ptr = mask_ptr
            if HAS_MASK:
                mask_head_ptr += head * mask_head
            bias_head_ptr = bias_ptr
            if HAS_BIAS:
                bias_head_ptr += head * bias_head
            slope = load_slope(slopes_ptr, head, inverse_scale, HAS_SLOPES)
            first_key, last_key = find_seen_keys(row, first_offset, last_offset, num_seen, LIMITS_LEFT, LIMITS_RIGHT)
            is_edge = (start_row < full_start) | (start_row + BLOCK_QUERIES > full_stop)
            probabilities, hides, tangents = find_probabilities(
                q, k, logsumexp, row, first_key, last_key, start_row, start_key, is_edge,
                mask_head_ptr, mask_row, mask_column, bias_head_ptr, bias_row, bias_column, slope, diagonal, cap,
                inverse_scale, num_queries, num_keys, scale, masked_score, LIMITS_LEFT, HAS_MASK, HAS_CAP, HAS_BIAS,
                HAS_SLOPES, PRECISE, BRANCHES, BLOCK_KEYS, True,
            )  # fmt: skip
            if DRAWS:
                key_low, key_high = compute_anew(key_low), compute_anew(key_high)
            draw_row, draw_key = find_place_of_draw(row, start_key, first_row, first_column, IS_PART)
            probabilities, grad_scores = find_score_gradients(
                probabilities, hides, tangents, v, grad_out, delta, draw_row, draw_key,
                first_head + head, first_sample + sample, key_low, key_high, limit,
                HAS_MASK, HAS_CAP, DRAWS, BLOCK_KEYS, True,
            )  # fmt: skip
            grad_scores = grad_scores.to(q.dtype)
            grad_q = tl.dot(tl.trans(k), grad_scores, input_precision="ieee")
            # No other program adds to these sums. The atomic spares the registers that loading them would take.
            place_ptr = sums_ptr + (head * padded + start_row) * BLOCK_DIM + place
            part = _lay_out(grad_q, BLOCK_QUERIES, BLOCK_DIM, PARTS)
            if turn > 0:
                tl.atomic_add(place_ptr, part, sem="relaxed")
            else:
                tl.store(place_ptr, part)
            # Without dropout the last product may run on into the next iteration; with it ptxas would serialize all.
            if DRAWS:
                grad_v = tl.dot(probabilities.to(grad_out.dtype), grad_out, grad_v, input_precision="ieee")
                grad_k = tl.dot(grad_scores, q, grad_k, input_precision="ieee")
                if KEEPS_APART:
                    grad_v, grad_k = keep_apart(grad_v), keep_apart(grad_k)
            else:
                grad_k = tl.dot(grad_scores, q, grad_k, input_precision="ieee")
                grad_v = tl.dot(probabilities.to(grad_out.dtype), grad_out, grad_v, input_precision="ieee")
                if KEEPS_APART:
                    grad_k = keep_apart(grad_k)
            next_row += QUERY_SPLITS * BLOCK_QUERIES
            is_last = next_row >= stop
            head += is_last.to(tl.int64)
            next_row = tl.where(is_last, first, next_row)
        grad_k *= softmax_scale * keep_scale
        grad_v *= keep_scale
        store_rows(grad_k_ptr, start_key, order, grad_k_row, num_keys, grad_k, HEAD_DIM, BLOCK_DIM)
        store_rows(grad_v_ptr, start_key, order, grad_v_row, num_keys, grad_v, VALUE_DIM, VALUE_BLOCK)


_PREPARES = (
    "grad_row", "grad_sample", "grad_head", "num_queries", "batch", "num_heads", "keep_scale", "UNIT", "VALUE_DIM",
    "VALUE_BLOCK", "BLOCK_QUERIES", "num_warps", "enable_fp_fusion",
)  # fmt: skip
_FINISHES = (
    "num_queries", "num_keys", "batch", "num_heads", "group_size", "softmax_scale", "keep_scale", "HEAD_DIM",
    "BLOCK_DIM", "VALUE_DIM", "VALUE_BLOCK", "BLOCK_QUERIES", "KEY_SPLITS", "QUERY_SPLITS", "PARTS", "num_warps",
    "enable_fp_fusion",
)  # fmt: skip


class HeadPlans(NamedTuple):
    """The plans of three launches: two over blocks of queries, and between them one over key-value heads."""

    prepare: Plan
    walk: Plan
    finish: Plan


def plan_heads(num_row_blocks: int, num_kv_heads: int, **numbers: Any) -> HeadPlans:
    """Plans the three launches; the numbers have the names of the kernels' arguments."""
    return HeadPlans(
        Plan((num_row_blocks,), **{name: numbers[name] for name in _PREPARES}),
        Plan((num_kv_heads * numbers["KEY_SPLITS"] * numbers["QUERY_SPLITS"],), DRAWN, **numbers),
        Plan((num_row_blocks,), **{name: numbers[name] for name in _FINISHES}),
    )


def launch_prepare(plan: Plan, tensors: Sequence[Tensor]) -> None:
    """Fills the statistics; the tensors are the kernel's pointers."""
    launch(_prepare_kernel, plan, tensors)


def launch_walk(plan: Plan, tensors: Sequence[Tensor | None], drawn: Sequence[int]) -> None:
    """Fills grad_k and grad_v, or their parts, and the sums. The tensors are the kernel's pointers, and the numbers
    those that DRAWN names."""
    launch(_grad_heads_kernel, plan, tensors, drawn)


def launch_finish(plan: Plan, tensors: Sequence[Tensor | None]) -> None:
    """Fills grad_q from the sums, and grad_k and grad_v from their parts where there are some; the tensors are the
    kernel's pointers."""
    launch(_finish_kernel, plan, tensors)

"""Computes the gradient of attention's bias in Triton, a tile of it per program.

A bias is broadcast over the samples, heads or queries of which it has one, and its gradient is the sum of the scores'
gradients over them. A program owns a tile of the bias and walks over all tiles of scores to which that was added, one
after the other. It computes their gradients again as kernel_rows.py does, from the statistics that backward has left,
and sums them in registers. The order is fixed and there are no atomics, so the same inputs give the same bits, and
nothing of the scores' size lies in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.attention.kernel_tile import (
    PADDING,
    VARYING,
    compute_anew,
    count_keys,
    find_place_of_draw,
    find_probabilities,
    find_score_gradients,
    find_seen_keys,
    load_rows,
    load_slope,
    order_keys,
)
from tempo_kernels.kernel_launch import Plan, launch
from tempo_kernels.philox.kernel import load_draw


@triton.jit(do_not_specialize=[*VARYING, "bias_samples", "bias_heads"])
def _grad_bias_kernel(
    q_ptr, k_ptr, v_ptr, grad_out_ptr, statistics_ptr, norm_ptr, grad_bias_ptr,
    mask_ptr, lengths_ptr, key_ptr, first_sample_ptr, bias_ptr, slopes_ptr, sink_ptr,
    boundaries_ptr, key_boundaries_ptr, samples_ptr,
    q_row, q_sample, q_head, k_row, k_sample, k_head, v_row, v_sample, v_head, grad_row, grad_sample, grad_head,
    mask_sample, mask_head, mask_row, mask_column, bias_sample, bias_head, bias_row, bias_column,
    num_queries, num_keys, batch, num_heads, group_size, first_offset, last_offset, first_row, first_column, diagonal,
    num_documents, cap, inverse_scale,
    scale, masked_score,
    key_low, key_high, first_sample, first_head, limit, keep_scale,
    bias_samples, bias_heads, SUMS_QUERIES: tl.constexpr,
    UNIT: tl.constexpr, LIMITS_LEFT: tl.constexpr, LIMITS_RIGHT: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, DRAWS: tl.constexpr, LOADS_KEY: tl.constexpr, LOADS_SAMPLE: tl.constexpr,
    PRECISE: tl.constexpr, BRANCHES: tl.constexpr, IS_PART: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SINK: tl.constexpr,
    IS_PACKED: tl.constexpr, LOADS_SAMPLES: tl.constexpr, HIDES_FIRST: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Writes a tile of grad_bias [bias_samples, bias_heads, sq, sk], and with SUMS_QUERIES one query of it.
    bias_samples is b or 1 and bias_heads a or 1."""
    tl.static_assert(not IS_PACKED, "documents of a packed row have no bias")
    num_key_blocks, num_row_blocks = tl.cdiv(num_keys, BLOCK_KEYS), tl.cdiv(num_queries, BLOCK_QUERIES)
    start_key, index = tl.program_id(0) % num_key_blocks * BLOCK_KEYS, tl.program_id(0) // num_key_blocks
    own_row, row_blocks_summed = 0, num_row_blocks
    if not SUMS_QUERIES:
        own_row, index, row_blocks_summed = index % num_row_blocks * BLOCK_QUERIES, index // num_row_blocks, 1
    own_head, own_sample = index % bias_heads, index // bias_heads
    heads_summed = num_heads // bias_heads
    num_steps = batch // bias_samples * heads_summed * row_blocks_summed
    if not SUMS_QUERIES:
        # Where no query of the tile sees a key of it, there is nothing to sum.
        if LIMITS_RIGHT:
            num_steps = tl.where(start_key > own_row + (BLOCK_QUERIES - 1) + last_offset, 0, num_steps)
        if LIMITS_LEFT:
            num_steps = tl.where(start_key + BLOCK_KEYS <= own_row + first_offset, 0, num_steps)
    key_low, key_high, first_sample = load_draw(
        key_ptr, first_sample_ptr, key_low, key_high, first_sample, LOADS_KEY, LOADS_SAMPLE
    )
    padded = tl.cdiv(num_queries, PADDING) * PADDING
    delta_ptr = statistics_ptr + batch.to(tl.int64) * num_heads * padded
    block_row, order = tl.arange(0, BLOCK_QUERIES), order_keys(BLOCK_KEYS, False)
    total = tl.zeros((BLOCK_QUERIES, BLOCK_KEYS), tl.float32)
    q_stride, k_stride, v_stride, grad_stride = q_row, k_row, v_row, grad_row
    for step in range(0, num_steps):
        q_stride, k_stride = compute_anew(q_stride), compute_anew(k_stride)
        v_stride, grad_stride = compute_anew(v_stride), compute_anew(grad_stride)
        start_row = tl.multiple_of(own_row + step % row_blocks_summed * BLOCK_QUERIES, BLOCK_QUERIES)
        place = step // row_blocks_summed
        head, sample = (own_head + place % heads_summed).to(tl.int64), (own_sample + place // heads_summed).to(tl.int64)
        kv_head = head // group_size
        row = start_row + block_row
        num_seen = count_keys(lengths_ptr, sample, num_keys, HAS_LENGTHS)
        first_key, last_key = find_seen_keys(row, first_offset, last_offset, num_seen, LIMITS_LEFT, LIMITS_RIGHT)
        q_head_ptr = q_ptr + (sample * q_sample + head * q_head) * UNIT
        k_head_ptr = k_ptr + (sample * k_sample + kv_head * k_head) * UNIT
        v_head_ptr = v_ptr + (sample * v_sample + kv_head * v_head) * UNIT
        grad_head_ptr = grad_out_ptr + (sample * grad_sample + head * grad_head) * UNIT
        q = load_rows(q_head_ptr, start_row, block_row, q_stride * UNIT, num_queries, HEAD_DIM, BLOCK_DIM)
        k = load_rows(k_head_ptr, start_key, order, k_stride * UNIT, num_seen, HEAD_DIM, BLOCK_DIM)
        v = load_rows(v_head_ptr, start_key, order, v_stride * UNIT, num_seen, VALUE_DIM, VALUE_BLOCK)
        grad_out = load_rows(
            grad_head_ptr, start_row, block_row, grad_stride * UNIT, num_queries, VALUE_DIM, VALUE_BLOCK
        )
        statistics = (sample * num_heads + head) * padded + start_row + block_row
        logsumexp, delta = tl.load(statistics_ptr + statistics), tl.load(delta_ptr + statistics)
        mask_head_ptr = mask_ptr
        if HAS_MASK:
            mask_head_ptr += sample * mask_sample + head * mask_head
        bias_head_ptr = bias_ptr + sample * bias_sample + head * bias_head
        slope = load_slope(slopes_ptr, head, inverse_scale, HAS_SLOPES)
        probabilities, hides, _ = find_probabilities(
            q, k, logsumexp, row, first_key, last_key, start_row, start_key, True,
            mask_head_ptr, mask_row, mask_column, bias_head_ptr, bias_row, bias_column, slope, diagonal, cap,
            inverse_scale, num_queries, num_keys, scale, masked_score, LIMITS_LEFT, HAS_MASK, HAS_CAP, HAS_BIAS,
            HAS_SLOPES, PRECISE, False, BLOCK_KEYS, False,
        )  # fmt: skip
        if PRECISE:
            norm_place = (sample * num_heads + head) * num_queries + row
            norm = tl.load(norm_ptr + norm_place, mask=row < num_queries, other=0.0)
            probabilities *= norm[:, None]
        draw_row, draw_key = find_place_of_draw(row, start_key, first_row, first_column, IS_PART)
        # A bias is added to scores that are capped already: without HAS_CAP these are the gradients of its sum.
        _, grad_scores = find_score_gradients(
            probabilities, hides, 0.0, v, grad_out, delta, draw_row, draw_key,
            first_head + head, first_sample + sample, key_low, key_high, limit,
            HAS_MASK != 0, False, DRAWS, BLOCK_KEYS, False,
        )  # fmt: skip
        total += grad_scores
    total *= keep_scale
    inside = start_key + order < num_keys
    grad_bias_ptr += (own_sample.to(tl.int64) * bias_heads + own_head) * (1 if SUMS_QUERIES else num_queries) * num_keys
    grad_bias_ptr += start_key
    if SUMS_QUERIES:
        tl.store(grad_bias_ptr + order, tl.sum(total, 0).to(grad_bias_ptr.dtype.element_ty), mask=inside)
    else:
        row = own_row + block_row
        pointers = grad_bias_ptr + row.to(tl.int64)[:, None] * num_keys + order[None, :]
        inside = (row < num_queries)[:, None] & inside[None, :]
        tl.store(pointers, total.to(grad_bias_ptr.dtype.element_ty), mask=inside)


def launch_grad_bias(plan: Plan, tensors: Sequence[Tensor | None], drawn: Sequence[int]) -> None:
    """Launches the pass for grad_bias with the kernel's pointers and the numbers that DRAWN names."""
    launch(_grad_bias_kernel, plan, tensors, drawn)

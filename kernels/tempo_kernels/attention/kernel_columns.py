"""Computes the gradients of attention's k and v in Triton, a block of keys per program.

After FlashAttention-2 (Dao, arXiv 2307.08691, algorithm 2). A program owns a block of keys of one key-value head and
walks over the queries that see them, one head of its group after the other. It computes their probabilities again from
the logsumexp and sums P^T dO and dS^T Q in registers. The order is fixed and there are no atomics, so the same inputs
give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.attention.kernel_documents import enter_document, find_document
from tempo_kernels.attention.kernel_tile import (
    PADDING,
    VARYING,
    compute_anew,
    count_keys,
    find_place_of_draw,
    find_probabilities,
    find_score_gradients,
    find_seen_keys,
    find_turn,
    keep_apart,
    load_rows,
    load_slope,
    order_keys,
    store_rows,
)
from tempo_kernels.kernel_launch import Plan, launch
from tempo_kernels.philox.kernel import load_draw


@triton.jit
def find_queries(
    start_key, num_queries, num_seen, first_offset, last_offset,
    LIMITS_LEFT: tl.constexpr, LIMITS_RIGHT: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    num_hidden=0, HIDES_FIRST: tl.constexpr = False,
):  # fmt: skip
    """Returns (first, full_start, full_stop, stop) of the queries that see this block of keys.

    In [full_start, full_stop) every query sees every key. first is a multiple of BLOCK_QUERIES.
    """
    last_key = tl.minimum(start_key + BLOCK_KEYS, num_seen) - 1
    first, full_start = 0, 0
    # A partial last block needs no mask: rows behind the last query have an infinite logsumexp, so probabilities of 0.
    stop, full_stop = num_queries, num_queries + BLOCK_QUERIES
    if LIMITS_RIGHT:
        first = tl.maximum(start_key - last_offset, 0) // BLOCK_QUERIES * BLOCK_QUERIES
        full_start = last_key - last_offset
    if LIMITS_LEFT:
        stop = tl.minimum(stop, last_key - first_offset + 1)
        full_stop = start_key - first_offset + 1
    if start_key + BLOCK_KEYS > num_seen:
        full_stop = 0
    if HIDES_FIRST:
        full_stop = tl.where(start_key < num_hidden, 0, full_stop)
    if start_key >= num_seen:
        stop = 0
    return first, full_start, full_stop, stop


@triton.jit(do_not_specialize=VARYING)
def _grad_kv_kernel(
    q_ptr, k_ptr, v_ptr, grad_out_ptr, statistics_ptr, norm_ptr, grad_k_ptr, grad_v_ptr,
    mask_ptr, lengths_ptr, key_ptr, first_sample_ptr, bias_ptr, slopes_ptr, sink_ptr,
    boundaries_ptr, key_boundaries_ptr, samples_ptr,
    q_row, q_sample, q_head, k_row, k_sample, k_head, v_row, v_sample, v_head, grad_row, grad_sample, grad_head,
    mask_sample, mask_head, mask_row, mask_column, bias_sample, bias_head, bias_row, bias_column,
    num_queries, num_keys, batch, num_heads, group_size, first_offset, last_offset, first_row, first_column, diagonal,
    num_documents, heads_in_turn, cap, inverse_scale,
    scale, softmax_scale, masked_score,
    key_low, key_high, first_sample, first_head, limit, keep_scale,
    UNIT: tl.constexpr, LIMITS_LEFT: tl.constexpr, LIMITS_RIGHT: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, DRAWS: tl.constexpr, LOADS_KEY: tl.constexpr, LOADS_SAMPLE: tl.constexpr,
    PRECISE: tl.constexpr, BRANCHES: tl.constexpr, IS_PART: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SINK: tl.constexpr,
    IS_PACKED: tl.constexpr, LOADS_SAMPLES: tl.constexpr, HIDES_FIRST: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, KEEPS_APART: tl.constexpr,
):  # fmt: skip
    """Writes grad_k [sk, b, g, d] and grad_v [sk, b, g, dv] of one block of keys.

    Programs of one head are neighbours and share its queries in the L2 cache. The grad_q pass wrote whole blocks of
    statistics, as a masked load reads 4 bytes a time.
    """
    num_key_blocks, num_groups = tl.cdiv(num_keys, BLOCK_KEYS), num_heads // group_size
    if IS_PACKED:
        num_key_blocks = num_keys // BLOCK_KEYS + num_documents
    # Under a causal limit the first block of keys has the most queries.
    place, index = find_turn(tl.program_id(0), num_key_blocks, batch * num_groups, heads_in_turn)
    total_queries, first_query, first_seen, num_hidden = num_queries, 0, 0, 0
    start_key = place * BLOCK_KEYS
    if IS_PACKED:
        document, start_key, first_seen, num_keys, first_query, num_queries = find_document(
            place, key_boundaries_ptr, boundaries_ptr, num_keys, num_queries, num_documents, BLOCK_KEYS, HIDES_FIRST
        )
        first_seen, num_keys, first_offset, last_offset, diagonal, num_hidden = enter_document(
            num_queries, first_seen, num_keys, first_offset, last_offset, HIDES_FIRST
        )
        if HIDES_FIRST:
            first_row, first_column = first_query, first_seen
        q_ptr += first_query * q_row.to(tl.int64) * UNIT
        k_ptr += first_seen * k_row.to(tl.int64) * UNIT
        v_ptr += first_seen * v_row.to(tl.int64) * UNIT
        grad_out_ptr += first_query * grad_row.to(tl.int64) * UNIT
    sample, kv_head = (index // num_groups).to(tl.int64), (index % num_groups).to(tl.int64)
    num_seen = count_keys(lengths_ptr, sample, num_keys, HAS_LENGTHS)
    first, full_start, full_stop, stop = find_queries(
        start_key, num_queries, num_seen, first_offset, last_offset,
        LIMITS_LEFT, LIMITS_RIGHT, BLOCK_QUERIES, BLOCK_KEYS, num_hidden, HIDES_FIRST,
    )  # fmt: skip
    key_low, key_high, first_sample = load_draw(
        key_ptr, first_sample_ptr, key_low, key_high, first_sample, LOADS_KEY, LOADS_SAMPLE
    )
    if LOADS_SAMPLES:
        first_sample = tl.load(samples_ptr + document)
    if HAS_MASK:
        mask_ptr += sample * mask_sample
    if HAS_BIAS:
        bias_ptr += sample * bias_sample
    q_ptr += sample * q_sample * UNIT
    grad_out_ptr += sample * grad_sample * UNIT
    padded = tl.cdiv(total_queries, PADDING) * PADDING
    logsumexp_ptr = statistics_ptr + sample * num_heads * padded
    delta_ptr = logsumexp_ptr + batch.to(tl.int64) * num_heads * padded
    if IS_PACKED:
        logsumexp_ptr += first_query
        delta_ptr += first_query
    if PRECISE:
        norm_ptr += sample * num_heads * total_queries + first_query
    k_ptr += (sample * k_sample + kv_head * k_head) * UNIT
    v_ptr += (sample * v_sample + kv_head * v_head) * UNIT
    block_row, order = tl.arange(0, BLOCK_QUERIES), order_keys(BLOCK_KEYS, True)
    k = load_rows(k_ptr, start_key, order, k_row * UNIT, num_seen, HEAD_DIM, BLOCK_DIM, num_hidden, HIDES_FIRST)
    v = load_rows(v_ptr, start_key, order, v_row * UNIT, num_seen, VALUE_DIM, VALUE_BLOCK, num_hidden, HIDES_FIRST)
    grad_k = tl.zeros((BLOCK_KEYS, BLOCK_DIM), tl.float32)
    grad_v = tl.zeros((BLOCK_KEYS, VALUE_BLOCK), tl.float32)
    group_head = (kv_head * group_size).to(tl.int32)
    num_blocks = tl.cdiv(tl.maximum(stop - first, 0), BLOCK_QUERIES)
    # One loop over heads and queries, because two nested loops spill registers.
    q_stride, grad_stride = q_row, grad_row
    head, next_row = group_head.to(tl.int64), first
    for _ in range(0, num_blocks * group_size):
        if KEEPS_APART:
            q_stride, grad_stride = compute_anew(q_stride), compute_anew(grad_stride)
        start_row = tl.multiple_of(next_row, BLOCK_QUERIES)
        row = start_row + block_row
        q_head_ptr, grad_head_ptr = q_ptr + head * q_head * UNIT, grad_out_ptr + head * grad_head * UNIT
        q = load_rows(q_head_ptr, start_row, block_row, q_stride * UNIT, num_queries, HEAD_DIM, BLOCK_DIM)
        grad_out = load_rows(
            grad_head_ptr, start_row, block_row, grad_stride * UNIT, num_queries, VALUE_DIM, VALUE_BLOCK
        )
        if IS_PACKED:
            # Behind the document's last row is the next document's first.
            logsumexp = tl.load(logsumexp_ptr + head * padded + row, mask=row < num_queries, other=float("inf"))
            delta = tl.load(delta_ptr + head * padded + row, mask=row < num_queries, other=0.0)
        else:
            logsumexp = tl.load(logsumexp_ptr + head * padded + start_row + block_row)
            delta = tl.load(delta_ptr + head * padded + start_row + block_row)
        mask_head_ptr = mask_ptr
        if HAS_MASK:
            mask_head_ptr += head * mask_head
        bias_head_ptr = bias_ptr
        if HAS_BIAS:
            bias_head_ptr += head * bias_head
        slope = load_slope(slopes_ptr, head, inverse_scale, HAS_SLOPES)
        first_key, last_key = find_seen_keys(
            row, first_offset, last_offset, num_seen, LIMITS_LEFT, LIMITS_RIGHT, num_hidden, HIDES_FIRST
        )
        is_edge = (start_row < full_start) | (start_row + BLOCK_QUERIES > full_stop)
        probabilities, hides, tangents = find_probabilities(
            q, k, logsumexp, row, first_key, last_key, start_row, start_key, is_edge,
            mask_head_ptr, mask_row, mask_column, bias_head_ptr, bias_row, bias_column, slope, diagonal, cap,
            inverse_scale, num_queries, num_keys, scale, masked_score, LIMITS_LEFT, HAS_MASK, HAS_CAP, HAS_BIAS,
            HAS_SLOPES, PRECISE, BRANCHES, BLOCK_KEYS, True,
        )  # fmt: skip
        if PRECISE:
            norm = tl.load(norm_ptr + head * total_queries + row, mask=row < num_queries, other=0.0)
            probabilities *= norm[None, :]
        if DRAWS and KEEPS_APART:
            key_low, key_high = compute_anew(key_low), compute_anew(key_high)
        draw_row, draw_key = find_place_of_draw(row, start_key, first_row, first_column, IS_PART)
        probabilities, grad_scores = find_score_gradients(
            probabilities, hides, tangents, v, grad_out, delta, draw_row, draw_key,
            first_head + head, first_sample + sample, key_low, key_high, limit,
            HAS_MASK, HAS_CAP, DRAWS, BLOCK_KEYS, True,
        )  # fmt: skip
        grad_v = tl.dot(probabilities.to(grad_out.dtype), grad_out, grad_v, input_precision="ieee")
        grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k, input_precision="ieee")
        if KEEPS_APART:
            grad_v, grad_k = keep_apart(grad_v), keep_apart(grad_k)
        next_row += BLOCK_QUERIES
        is_last = next_row >= stop
        head += is_last.to(tl.int64)
        next_row = tl.where(is_last, first, next_row)
    if not IS_PACKED:
        # The loop needs the registers that would keep the place.
        place, index = find_turn(compute_anew(tl.program_id(0)), num_key_blocks, batch * num_groups, heads_in_turn)
        start_key = place * BLOCK_KEYS
        sample, kv_head = (index // num_groups).to(tl.int64), (index % num_groups).to(tl.int64)
    grad_k *= softmax_scale * keep_scale
    grad_v *= keep_scale
    index, num_heads_of_row = sample * num_groups + kv_head, batch.to(tl.int64) * num_groups
    grad_k_ptr += index * HEAD_DIM
    grad_v_ptr += index * VALUE_DIM
    grad_k_row, grad_v_row = num_heads_of_row * HEAD_DIM, num_heads_of_row * VALUE_DIM
    if IS_PACKED:
        grad_k_ptr += first_seen * grad_k_row
        grad_v_ptr += first_seen * grad_v_row
    store_rows(grad_k_ptr, start_key, order, grad_k_row, num_keys, grad_k, HEAD_DIM, BLOCK_DIM, num_hidden, HIDES_FIRST)
    store_rows(
        grad_v_ptr, start_key, order, grad_v_row, num_keys, grad_v, VALUE_DIM, VALUE_BLOCK, num_hidden, HIDES_FIRST
    )


def launch_grad_kv(plan: Plan, tensors: Sequence[Tensor | None], drawn: Sequence[int]) -> None:
    """Launches the pass for grad_k and grad_v with the kernel's pointers and the numbers that DRAWN names."""
    launch(_grad_kv_kernel, plan, tensors, drawn)

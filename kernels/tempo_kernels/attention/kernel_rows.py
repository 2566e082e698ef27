"""Computes attention's forward and the gradient of q in Triton, a block of queries per program.

After FlashAttention-2 (Dao, arXiv 2307.08691, algorithms 1 and 2). A program owns a block of queries of one head and
walks over the keys that they see. Forward is an online softmax: it keeps each row's running maximum and running sum,
rescales the output when the maximum grows, and divides once, at the end. The gradient of q takes one more walk, over
probabilities computed again from the logsumexp. Only blocks of keys that some of the queries do not see are masked.
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
    change_scores,
    compute_anew,
    count_keys,
    draw_drops,
    find_origin,
    find_place_of_draw,
    find_probabilities,
    find_score_gradients,
    find_seen_keys,
    find_turn,
    hide_unseen,
    keep_apart,
    load_described_keys,
    load_mask,
    load_rows,
    load_slope,
    multiply,
    order_keys,
    store_rows,
)
from tempo_kernels.kernel_launch import Plan, launch
from tempo_kernels.philox.kernel import load_draw


@triton.jit
def _find_place(
    program, num_queries, num_documents, batch, num_heads, group_size, heads_in_turn,
    BLOCK_QUERIES: tl.constexpr, IS_PACKED: tl.constexpr,
):  # fmt: skip
    """Returns (block of queries, sample, query head, key-value head) of a program; the block of a packed row is a
    place of find_document. The last block of queries goes first: under a causal limit it takes longest."""
    num_blocks = tl.cdiv(num_queries, BLOCK_QUERIES)
    if IS_PACKED:
        num_blocks = num_queries // BLOCK_QUERIES + num_documents
    block, index = find_turn(program, num_blocks, batch * num_heads, heads_in_turn)
    head = index % num_heads
    sample = (index // num_heads).to(tl.int64)
    return num_blocks - 1 - block, sample, head.to(tl.int64), (head // group_size).to(tl.int64)


@triton.jit
def _find_keys(
    start_row, num_queries, num_seen, first_offset, last_offset,
    LIMITS_LEFT: tl.constexpr, LIMITS_RIGHT: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    num_hidden=0, HIDES_FIRST: tl.constexpr = False,
):  # fmt: skip
    """Returns (first, full_start, full_stop, stop) of the keys that this block of queries sees.

    In [full_start, full_stop) every query sees every key. first is a multiple of BLOCK_KEYS.
    """
    last_row = tl.minimum(start_row + BLOCK_QUERIES, num_queries) - 1
    first, full_start = 0, 0
    stop, full_stop = num_seen, num_seen
    if LIMITS_LEFT:
        first = tl.maximum(start_row + first_offset, 0) // BLOCK_KEYS * BLOCK_KEYS
        full_start = last_row + first_offset
    if HIDES_FIRST:
        full_start = tl.maximum(full_start, num_hidden)
    if LIMITS_RIGHT:
        stop = tl.minimum(stop, last_row + last_offset + 1)
        full_stop = tl.minimum(full_stop, start_row + last_offset + 1)
    return first, full_start, full_stop, stop


@triton.jit(do_not_specialize=VARYING)
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, logsumexp_ptr,
    mask_ptr, lengths_ptr, key_ptr, first_sample_ptr, bias_ptr, slopes_ptr, sink_ptr,
    boundaries_ptr, key_boundaries_ptr, samples_ptr,
    q_row, q_sample, q_head, k_row, k_sample, k_head, v_row, v_sample, v_head,
    mask_sample, mask_head, mask_row, mask_column, bias_sample, bias_head, bias_row, bias_column,
    num_queries, num_keys, batch, num_heads, group_size, first_offset, last_offset, first_row, first_column, diagonal,
    num_documents, heads_in_turn, cap, inverse_scale,
    scale, masked_score,
    key_low, key_high, first_sample, first_head, limit, keep_scale,
    UNIT: tl.constexpr, LIMITS_LEFT: tl.constexpr, LIMITS_RIGHT: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, DRAWS: tl.constexpr, LOADS_KEY: tl.constexpr, LOADS_SAMPLE: tl.constexpr,
    PRECISE: tl.constexpr, BRANCHES: tl.constexpr, IS_PART: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SINK: tl.constexpr,
    IS_PACKED: tl.constexpr, LOADS_SAMPLES: tl.constexpr, HIDES_FIRST: tl.constexpr, DESCRIBES: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Writes out [sq, b, a, dv] and the logsumexp [b, a, sq], in units of unscaled scores, of a block of queries."""
    place, sample, head, kv_head = _find_place(
        tl.program_id(0), num_queries, num_documents, batch, num_heads, group_size, heads_in_turn,
        BLOCK_QUERIES, IS_PACKED,
    )  # fmt: skip
    total_queries, first_query, first_seen, num_hidden = num_queries, 0, 0, 0
    start_row = place * BLOCK_QUERIES
    if IS_PACKED:
        document, start_row, first_query, num_queries, first_seen, num_keys = find_document(
            place, boundaries_ptr, key_boundaries_ptr, num_queries, num_keys, num_documents, BLOCK_QUERIES
        )
        first_seen, num_keys, first_offset, last_offset, diagonal, num_hidden = enter_document(
            num_queries, first_seen, num_keys, first_offset, last_offset, HIDES_FIRST
        )
        if HIDES_FIRST:
            first_row, first_column = first_query, first_seen
        q_ptr += first_query * q_row.to(tl.int64) * UNIT
        k_ptr += first_seen * k_row.to(tl.int64) * UNIT
        v_ptr += first_seen * v_row.to(tl.int64) * UNIT
    num_seen = count_keys(lengths_ptr, sample, num_keys, HAS_LENGTHS)
    first, full_start, full_stop, stop = _find_keys(
        start_row, num_queries, num_seen, first_offset, last_offset,
        LIMITS_LEFT, LIMITS_RIGHT, BLOCK_QUERIES, BLOCK_KEYS, num_hidden, HIDES_FIRST,
    )  # fmt: skip
    key_low, key_high, first_sample = load_draw(
        key_ptr, first_sample_ptr, key_low, key_high, first_sample, LOADS_KEY, LOADS_SAMPLE
    )
    if LOADS_SAMPLES:
        first_sample = tl.load(samples_ptr + document)
    if HAS_MASK:
        mask_ptr += sample * mask_sample + head * mask_head
    if HAS_BIAS:
        bias_ptr += sample * bias_sample + head * bias_head
    slope = load_slope(slopes_ptr, head, inverse_scale, HAS_SLOPES)
    kv_index = (sample * (num_heads // group_size) + kv_head).to(tl.int32)
    if not DESCRIBES:
        k_ptr += (sample * k_sample + kv_head * k_head) * UNIT
        v_ptr += (sample * v_sample + kv_head * v_head) * UNIT
    q_ptr += (sample * q_sample + head * q_head) * UNIT
    block_row, order = tl.arange(0, BLOCK_QUERIES), order_keys(BLOCK_KEYS, False)
    row = start_row + block_row
    first_key, last_key = find_seen_keys(
        row, first_offset, last_offset, num_seen, LIMITS_LEFT, LIMITS_RIGHT, num_hidden, HIDES_FIRST
    )
    q = load_rows(q_ptr, start_row, block_row, q_row * UNIT, num_queries, HEAD_DIM, BLOCK_DIM)
    top = tl.full((BLOCK_QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_QUERIES,), tl.float32)
    if HAS_SINK:
        # The sink is a score that every row has seen before its first key.
        sink = tl.load(sink_ptr + head).to(tl.float32) * inverse_scale
        top, total = total + sink, total + tl.where(sink == float("-inf"), 0.0, 1.0)
    out = tl.zeros((BLOCK_QUERIES, VALUE_BLOCK), tl.float32)
    k_stride, v_stride = k_row, v_row
    for start_key in range(first, stop, BLOCK_KEYS):
        if DESCRIBES:
            k = load_described_keys(k_ptr, kv_index, start_key, BLOCK_KEYS, BLOCK_DIM)
        else:
            k_stride, v_stride = compute_anew(k_stride), compute_anew(v_stride)
            k = load_rows(
                k_ptr, start_key, order, k_stride * UNIT, num_seen, HEAD_DIM, BLOCK_DIM, num_hidden, HIDES_FIRST
            )
        if DRAWS:
            # On sm_90 the product of the iteration before is still being added to out, and this one's first runs.
            draw_row, draw_key = find_place_of_draw(row, start_key, first_row, first_column, IS_PART)
            drops = draw_drops(
                draw_row, draw_key, first_head + head, first_sample + sample, key_low, key_high, limit,
                BLOCK_KEYS, False, DESCRIBES, DESCRIBES and BLOCK_KEYS * VALUE_BLOCK > 8192,
            )  # fmt: skip
        scores = multiply(q, k, False)
        scores, _ = change_scores(
            scores, row, start_row, start_key, bias_ptr, bias_row, bias_column, slope, diagonal, cap, inverse_scale,
            num_queries, num_keys, HAS_CAP, HAS_BIAS, HAS_SLOPES, BLOCK_KEYS, False, DESCRIBES,
        )  # fmt: skip
        if HAS_MASK:
            hides = load_mask(
                mask_ptr, row, start_key, mask_row, mask_column, num_queries, num_keys, BLOCK_KEYS, False, DESCRIBES
            )
            scores = tl.where(hides, masked_score, scores)
        is_edge = (start_key < full_start) | (start_key + BLOCK_KEYS > full_stop)
        scores = hide_unseen(
            scores, first_key, last_key, start_key, is_edge, LIMITS_LEFT, BRANCHES, BLOCK_KEYS, False, DESCRIBES
        )
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen no key yet would subtract minus infinity from itself, which gives NaN.
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        if HAS_MASK or PRECISE:
            # Subtract before scaling: masked scores are huge and would round, while their difference is exactly 0.
            probabilities = tl.exp2((scores - finite_top[:, None]) * scale)
        else:
            probabilities = tl.exp2(scores * scale - (finite_top * scale)[:, None])
        shrink = tl.exp2((top - finite_top) * scale)
        total = total * shrink + tl.sum(probabilities, 1)
        if DRAWS:
            probabilities = keep_apart(tl.where(drops, 0.0, probabilities))
        if DESCRIBES:
            v = load_described_keys(v_ptr, kv_index, start_key, BLOCK_KEYS, VALUE_BLOCK)
        else:
            v = load_rows(
                v_ptr, start_key, order, v_stride * UNIT, num_seen, VALUE_DIM, VALUE_BLOCK, num_hidden, HIDES_FIRST
            )
        out = tl.dot(probabilities.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
        top = new_top
    if not IS_PACKED:
        # The loop needs the registers that would keep the place.
        place, sample, head, _ = _find_place(
            compute_anew(tl.program_id(0)), num_queries, num_documents, batch, num_heads, group_size, heads_in_turn,
            BLOCK_QUERIES, IS_PACKED,
        )  # fmt: skip
        start_row = place * BLOCK_QUERIES
        row = start_row + block_row
    # A row that sees no key gets an output of 0 and an infinite logsumexp, which makes backward's probabilities 0.
    sees_nothing = total == 0.0
    total = tl.where(sees_nothing, 1.0, total)
    logsumexp = top + tl.log2(total) / scale
    if HAS_MASK:
        # A masked score is so large that adding the logarithm of the sum to it would lose the logarithm's digits. Where
        # the top is a masked score, we therefore store the logsumexp relative to it, and mark that in the last bit.
        hides_all = top == masked_score
        bits = tl.where(hides_all, tl.log2(total) / scale, logsumexp).to(tl.int32, bitcast=True)
        logsumexp = ((bits & ~1) | hides_all.to(tl.int32)).to(tl.float32, bitcast=True)
    logsumexp = tl.where(sees_nothing, float("inf"), logsumexp)
    statistics = (sample * num_heads + head) * total_queries + first_query + row
    tl.store(logsumexp_ptr + statistics, logsumexp, mask=row < num_queries)
    # The softmax's sum and dropout's scale are applied once to the output, not to every probability.
    out *= tl.where(sees_nothing, 0.0, keep_scale / total)[:, None]
    out_ptr += (sample * num_heads + head) * VALUE_DIM
    out_row = batch.to(tl.int64) * num_heads * VALUE_DIM
    if IS_PACKED:
        out_ptr += first_query * out_row
    store_rows(out_ptr, start_row, block_row, out_row, num_queries, out, VALUE_DIM, VALUE_BLOCK)


@triton.jit(do_not_specialize=VARYING)
def _grad_q_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, grad_out_ptr, logsumexp_ptr, statistics_ptr, norm_ptr, grad_q_ptr,
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
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Writes grad_q of one block of queries, and its part of the statistics that the pass for k and v reads.

    statistics [2, b, a, sq rounded up to a multiple of PADDING] hold the logsumexp, infinite behind the last query, and
    delta, the row's sum of out * grad_out divided by dropout's scale.

    In float32 the roundings of logsumexp and out are the largest errors. PRECISE avoids both by a further walk over the
    keys: it divides the probabilities by their sum (norm is its inverse) and sums delta from the same terms from which
    delta is subtracted later.
    """
    place, sample, head, kv_head = _find_place(
        tl.program_id(0), num_queries, num_documents, batch, num_heads, group_size, heads_in_turn,
        BLOCK_QUERIES, IS_PACKED,
    )  # fmt: skip
    total_queries, first_query, first_seen, num_hidden = num_queries, 0, 0, 0
    start_row = place * BLOCK_QUERIES
    if IS_PACKED:
        document, start_row, first_query, num_queries, first_seen, num_keys = find_document(
            place, boundaries_ptr, key_boundaries_ptr, num_queries, num_keys, num_documents, BLOCK_QUERIES
        )
        first_seen, num_keys, first_offset, last_offset, diagonal, num_hidden = enter_document(
            num_queries, first_seen, num_keys, first_offset, last_offset, HIDES_FIRST
        )
        if HIDES_FIRST:
            first_row, first_column = first_query, first_seen
        q_ptr += first_query * q_row.to(tl.int64) * UNIT
        k_ptr += first_seen * k_row.to(tl.int64) * UNIT
        v_ptr += first_seen * v_row.to(tl.int64) * UNIT
    num_seen = count_keys(lengths_ptr, sample, num_keys, HAS_LENGTHS)
    first, full_start, full_stop, stop = _find_keys(
        start_row, num_queries, num_seen, first_offset, last_offset,
        LIMITS_LEFT, LIMITS_RIGHT, BLOCK_QUERIES, BLOCK_KEYS, num_hidden, HIDES_FIRST,
    )  # fmt: skip
    key_low, key_high, first_sample = load_draw(
        key_ptr, first_sample_ptr, key_low, key_high, first_sample, LOADS_KEY, LOADS_SAMPLE
    )
    if LOADS_SAMPLES:
        first_sample = tl.load(samples_ptr + document)
    if HAS_MASK:
        mask_ptr += sample * mask_sample + head * mask_head
    if HAS_BIAS:
        bias_ptr += sample * bias_sample + head * bias_head
    slope = load_slope(slopes_ptr, head, inverse_scale, HAS_SLOPES)
    k_ptr += (sample * k_sample + kv_head * k_head) * UNIT
    v_ptr += (sample * v_sample + kv_head * v_head) * UNIT
    q_ptr += (sample * q_sample + head * q_head) * UNIT
    grad_out_ptr += (sample * grad_sample + head * grad_head) * UNIT
    index = sample * num_heads + head
    out_row, grad_q_row = (batch.to(tl.int64) * num_heads * VALUE_DIM, batch.to(tl.int64) * num_heads * HEAD_DIM)
    if IS_PACKED:
        grad_out_ptr += first_query * grad_row.to(tl.int64) * UNIT
        out_ptr += first_query * out_row
        grad_q_ptr += first_query * grad_q_row
    block_row, order = tl.arange(0, BLOCK_QUERIES), order_keys(BLOCK_KEYS, False)
    row = start_row + block_row
    first_key, last_key = find_seen_keys(
        row, first_offset, last_offset, num_seen, LIMITS_LEFT, LIMITS_RIGHT, num_hidden, HIDES_FIRST
    )
    q = load_rows(q_ptr, start_row, block_row, q_row * UNIT, num_queries, HEAD_DIM, BLOCK_DIM)
    grad_out = load_rows(grad_out_ptr, start_row, block_row, grad_row * UNIT, num_queries, VALUE_DIM, VALUE_BLOCK)
    out = load_rows(out_ptr + index * VALUE_DIM, start_row, block_row, out_row, num_queries, VALUE_DIM, VALUE_BLOCK)
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1) / keep_scale
    statistics = (sample * num_heads + head) * total_queries + first_query + row
    logsumexp = tl.load(logsumexp_ptr + statistics, mask=row < num_queries, other=float("inf"))
    if PRECISE:
        total, delta = tl.zeros_like(delta), tl.zeros_like(delta)
        if HAS_SINK:
            sink = tl.load(sink_ptr + head).to(tl.float32) * inverse_scale
            origin = find_origin(logsumexp, masked_score) if HAS_MASK else 0.0
            total += tl.exp2((sink - origin - logsumexp) * scale)
        for start_key in range(first, stop, BLOCK_KEYS):
            k = load_rows(k_ptr, start_key, order, k_row * UNIT, num_seen, HEAD_DIM, BLOCK_DIM, num_hidden, HIDES_FIRST)
            v = load_rows(
                v_ptr, start_key, order, v_row * UNIT, num_seen, VALUE_DIM, VALUE_BLOCK, num_hidden, HIDES_FIRST
            )
            probabilities, hides, tangents = find_probabilities(
                q, k, logsumexp, row, first_key, last_key, start_row, start_key, True,
                mask_ptr, mask_row, mask_column, bias_ptr, bias_row, bias_column, slope, diagonal, cap, inverse_scale,
                num_queries, num_keys, scale, masked_score, LIMITS_LEFT, HAS_MASK, HAS_CAP, HAS_BIAS, HAS_SLOPES,
                PRECISE, False, BLOCK_KEYS, False,
            )  # fmt: skip
            total += tl.sum(probabilities, 1)
            draw_row, draw_key = find_place_of_draw(row, start_key, first_row, first_column, IS_PART)
            _, products = find_score_gradients(
                probabilities, hides, tangents, v, grad_out, tl.zeros_like(delta), draw_row, draw_key,
                first_head + head, first_sample + sample, key_low, key_high, limit,
                False, False, DRAWS, BLOCK_KEYS, False,
            )  # fmt: skip
            delta += tl.sum(products, 1)
        norm = 1.0 / tl.where(total == 0.0, 1.0, total)
        delta *= norm
        tl.store(norm_ptr + statistics, norm, mask=row < num_queries)
    padded = tl.cdiv(total_queries, PADDING) * PADDING
    statistics_ptr += (sample * num_heads + head) * padded
    if IS_PACKED:
        # Behind the document's last row is the next document's first.
        statistics_ptr += first_query
        tl.store(statistics_ptr + row, logsumexp, mask=row < num_queries)
        tl.store(statistics_ptr + num_heads * padded + row, delta, mask=row < num_queries)
    else:
        tl.store(statistics_ptr + row, logsumexp)
        tl.store(statistics_ptr + batch.to(tl.int64) * num_heads * padded + row, delta)
    grad_q = tl.zeros((BLOCK_QUERIES, BLOCK_DIM), tl.float32)
    k_stride, v_stride = k_row, v_row
    for start_key in range(first, stop, BLOCK_KEYS):
        k_stride, v_stride = compute_anew(k_stride), compute_anew(v_stride)
        k = load_rows(k_ptr, start_key, order, k_stride * UNIT, num_seen, HEAD_DIM, BLOCK_DIM, num_hidden, HIDES_FIRST)
        v = load_rows(
            v_ptr, start_key, order, v_stride * UNIT, num_seen, VALUE_DIM, VALUE_BLOCK, num_hidden, HIDES_FIRST
        )
        is_edge = (start_key < full_start) | (start_key + BLOCK_KEYS > full_stop)
        probabilities, hides, tangents = find_probabilities(
            q, k, logsumexp, row, first_key, last_key, start_row, start_key, is_edge,
            mask_ptr, mask_row, mask_column, bias_ptr, bias_row, bias_column, slope, diagonal, cap, inverse_scale,
            num_queries, num_keys, scale, masked_score, LIMITS_LEFT, HAS_MASK, HAS_CAP, HAS_BIAS, HAS_SLOPES,
            PRECISE, BRANCHES, BLOCK_KEYS, False,
        )  # fmt: skip
        if PRECISE:
            probabilities *= norm[:, None]
        draw_row, draw_key = find_place_of_draw(row, start_key, first_row, first_column, IS_PART)
        _, grad_scores = find_score_gradients(
            probabilities, hides, tangents, v, grad_out, delta, draw_row, draw_key,
            first_head + head, first_sample + sample, key_low, key_high, limit,
            HAS_MASK, HAS_CAP, DRAWS, BLOCK_KEYS, False,
        )  # fmt: skip
        grad_q = tl.dot(grad_scores.to(k.dtype), k, grad_q, input_precision="ieee")
    grad_q *= softmax_scale * keep_scale
    grad_q_ptr += index * HEAD_DIM
    store_rows(grad_q_ptr, start_row, block_row, grad_q_row, num_queries, grad_q, HEAD_DIM, BLOCK_DIM)


def launch_forward(plan: Plan, tensors: Sequence[Tensor | None], drawn: Sequence[int]) -> None:
    """Launches the forward pass with the kernel's pointers and the numbers that DRAWN names."""
    launch(_forward_kernel, plan, tensors, drawn)


def launch_grad_q(plan: Plan, tensors: Sequence[Tensor | None], drawn: Sequence[int]) -> None:
    """Launches the pass for grad_q and delta with the kernel's pointers and the numbers that DRAWN names."""
    launch(_grad_q_kernel, plan, tensors, drawn)

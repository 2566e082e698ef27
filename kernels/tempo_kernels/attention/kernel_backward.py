"""Computes attention's gradients in Triton: FlashAttention-2 (Dao, arXiv 2307.08691, algorithm 2) in two passes.

All passes compute P again from the logsumexp, and Philox draws the same bits again. Their order of sums is fixed and
there are no atomics, so the same inputs give the same bits. `_grad_q_kernel` runs first, as it writes delta.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tempo_kernels.attention.kernel_program import (
    VARYING,
    enter_program,
    enter_row,
    get_keys,
    get_queries,
    load_block,
    load_keys,
    load_out,
    store_rows,
    widen,
)
from tempo_kernels.attention.kernel_scores import (
    add_sink_p,
    compute_ds,
    compute_p,
    draw_drops,
    keep_apart,
    multiply,
    order_keys,
)


@triton.jit(do_not_specialize=VARYING)
def _grad_q_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, grad_out_ptr, logsumexp_ptr, delta_ptr, norm_ptr, grad_q_ptr, extras,
    key_low, key_high, first_sample, call,
):  # fmt: skip
    """Writes grad_q of a block of queries, and delta [b, a, sq], the rows' sums of out * grad_out divided by dropout's
    scale. Grid: one program for each block of queries of each head of each sample. It passes over the keys:

        for each block of keys:  dQ += dS K

    In float32, where norm_ptr is given, the roundings of logsumexp and out would be the largest errors. One more pass
    over the keys avoids both: it divides P by its sum (norm [b, a, sq] is the inverse) and sums delta from the same
    products from which delta is subtracted later.
    """
    program = enter_program(extras, key_low, key_high, first_sample, call, False)
    head, start_row, num_queries = program.head, program.start, program.num_queries
    kv_head, index = head // call.sizes.group_size, program.sample * call.sizes.num_heads + head
    block_row, order = tl.arange(0, call.BLOCK_QUERIES), order_keys(call.BLOCK_KEYS, False)
    row = start_row + block_row
    rows, q, grad_out, logsumexp = load_block(q_ptr, grad_out_ptr, logsumexp_ptr, start_row, head, program, call)
    first, full_start, full_stop, stop = get_keys(program, call)
    out = load_out(out_ptr, start_row, head, program, call)
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1) / call.draw.keep_scale
    if norm_ptr is not None:
        total, delta = tl.zeros_like(delta), tl.zeros_like(delta)
        total = add_sink_p(total, logsumexp, head, extras, call)
        for start_key in range(first, stop, call.BLOCK_KEYS):
            k = load_keys(k_ptr, call.steps.k, start_key, order, kv_head, program, call, call.HEAD_DIM, call.BLOCK_DIM)
            v = load_keys(
                v_ptr, call.steps.v, start_key, order, kv_head, program, call, call.VALUE_DIM, call.VALUE_BLOCK
            )
            p, _, _ = compute_p(q, k, logsumexp, start_row, start_key, head, True, program, extras, call, False)
            total += tl.sum(p, 1)
            dp = multiply(grad_out, v, False)
            if call.draw.limit is not None:
                drops = draw_drops(start_row, start_key, head, program, call, False)
                dp = tl.where(drops, 0.0, dp)
            delta += tl.sum(p * dp, 1)
        norm = 1.0 / tl.where(total == 0.0, 1.0, total)
        delta *= norm
        tl.store(norm_ptr + rows, norm, mask=row < num_queries)
    tl.store(delta_ptr + rows, delta, mask=row < num_queries)
    grad_q = tl.zeros((call.BLOCK_QUERIES, call.BLOCK_DIM), tl.float32)
    for start_key in range(first, stop, call.BLOCK_KEYS):
        k = load_keys(k_ptr, call.steps.k, start_key, order, kv_head, program, call, call.HEAD_DIM, call.BLOCK_DIM)
        v = load_keys(v_ptr, call.steps.v, start_key, order, kv_head, program, call, call.VALUE_DIM, call.VALUE_BLOCK)
        is_edge = (start_key < full_start) | (full_stop - start_key < call.BLOCK_KEYS)
        p, hides, tangents = compute_p(
            q, k, logsumexp, start_row, start_key, head, is_edge, program, extras, call, False
        )
        if norm_ptr is not None:
            p *= norm[:, None]
        _, ds = compute_ds(
            p, hides, tangents, v, grad_out, delta, start_row, start_key, head, program, extras, call, False
        )
        grad_q = tl.dot(ds.to(k.dtype), k, grad_q, input_precision="ieee")
    grad_q *= call.scores.softmax_scale * call.draw.keep_scale
    step = call.sizes.batch * call.sizes.num_heads * call.HEAD_DIM
    grad_q_ptr += widen(program.first_query) * step + index * call.HEAD_DIM
    store_rows(grad_q_ptr, start_row, block_row, step, num_queries, grad_q, call.HEAD_DIM, call.BLOCK_DIM)


@triton.jit(do_not_specialize=VARYING)
def _grad_kv_kernel(
    q_ptr, k_ptr, v_ptr, grad_out_ptr, logsumexp_ptr, delta_ptr, norm_ptr, grad_k_ptr, grad_v_ptr, extras,
    key_low, key_high, first_sample, call,
):  # fmt: skip
    """Writes grad_k [sk, b, g, d] and grad_v [sk, b, g, dv] of a block of keys. Grid: one program for each block of
    keys of each key-value head of each sample; programs of one head are neighbours and share its queries in the L2
    cache. It passes over the queries that see these keys, one head of the group after the other:

        for each head and block of queries:  dV += dropout(P)^T dO,  dK += dS^T Q
    """
    program = enter_program(extras, key_low, key_high, first_sample, call, True)
    kv_head, start_key, num_queries = program.head, program.start, program.num_queries
    block_row, order = tl.arange(0, call.BLOCK_QUERIES), order_keys(call.BLOCK_KEYS, True)
    k = load_keys(k_ptr, call.steps.k, start_key, order, kv_head, program, call, call.HEAD_DIM, call.BLOCK_DIM)
    v = load_keys(v_ptr, call.steps.v, start_key, order, kv_head, program, call, call.VALUE_DIM, call.VALUE_BLOCK)
    grad_k = tl.zeros((call.BLOCK_KEYS, call.BLOCK_DIM), tl.float32)
    grad_v = tl.zeros((call.BLOCK_KEYS, call.VALUE_BLOCK), tl.float32)
    first, full_start, full_stop, stop = get_queries(program, call)
    num_blocks = tl.cdiv(tl.maximum(stop - first, 0), call.BLOCK_QUERIES)
    # One loop over heads and queries, because two nested loops spill registers.
    head, next_row = kv_head * call.sizes.group_size, first
    for _ in range(0, num_blocks * call.sizes.group_size):
        start_row = tl.multiple_of(next_row, call.BLOCK_QUERIES)
        row = start_row + block_row
        rows, q, grad_out, logsumexp = load_block(q_ptr, grad_out_ptr, logsumexp_ptr, start_row, head, program, call)
        delta = tl.load(delta_ptr + rows, mask=row < num_queries, other=0.0)
        is_edge = (start_row < full_start) | (start_row + call.BLOCK_QUERIES > full_stop)
        p, hides, tangents = compute_p(
            q, k, logsumexp, start_row, start_key, head, is_edge, program, extras, call, True
        )
        if norm_ptr is not None:
            p *= tl.load(norm_ptr + rows, mask=row < num_queries, other=0.0)[None, :]
        p, ds = compute_ds(
            p, hides, tangents, v, grad_out, delta, start_row, start_key, head, program, extras, call, True
        )
        grad_v = tl.dot(p.to(grad_out.dtype), grad_out, grad_v, input_precision="ieee")
        grad_k = tl.dot(ds.to(q.dtype), q, grad_k, input_precision="ieee")
        if call.KEEPS_APART:
            grad_v, grad_k = keep_apart(grad_v), keep_apart(grad_k)
        next_row += call.BLOCK_QUERIES
        is_last = next_row >= stop
        head += is_last.to(tl.int64)
        next_row = tl.where(is_last, first, next_row)
    grad_k *= call.scores.softmax_scale * call.draw.keep_scale
    grad_v *= call.draw.keep_scale
    num_heads = call.sizes.batch * (call.sizes.num_heads // call.sizes.group_size)
    index = program.sample * (call.sizes.num_heads // call.sizes.group_size) + kv_head
    grad_k_ptr += (widen(program.first_key) * num_heads + index) * call.HEAD_DIM
    grad_v_ptr += (widen(program.first_key) * num_heads + index) * call.VALUE_DIM
    store_rows(
        grad_k_ptr, start_key, order, num_heads * call.HEAD_DIM, program.num_keys, grad_k, call.HEAD_DIM,
        call.BLOCK_DIM, program.num_hidden, call.HIDES_FIRST,
    )  # fmt: skip
    store_rows(
        grad_v_ptr, start_key, order, num_heads * call.VALUE_DIM, program.num_keys, grad_v, call.VALUE_DIM,
        call.VALUE_BLOCK, program.num_hidden, call.HIDES_FIRST,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _grad_bias_kernel(
    q_ptr, k_ptr, v_ptr, grad_out_ptr, logsumexp_ptr, delta_ptr, norm_ptr, grad_bias_ptr, extras,
    key_low, key_high, first_sample, bias_sizes, call,
):  # fmt: skip
    """Writes a tile of grad_bias [b or 1, a or 1, sq or 1, sk], the sum of dS over the samples, heads or queries to
    which an element of the bias was added. Grid: one program for each tile of the bias. It passes over the tiles of
    scores to which that was added, so that nothing of the scores' size lies in memory:

        for each sample, head and block of queries:  dBias += dS
    """
    num_key_blocks = tl.cdiv(call.sizes.num_keys, call.BLOCK_KEYS)
    num_row_blocks = tl.cdiv(call.sizes.num_queries, call.BLOCK_QUERIES)
    start_key, index = tl.program_id(0) % num_key_blocks * call.BLOCK_KEYS, tl.program_id(0) // num_key_blocks
    own_row, row_blocks_summed = 0, num_row_blocks
    if not bias_sizes.SUMS_QUERIES:
        own_row, index, row_blocks_summed = index % num_row_blocks * call.BLOCK_QUERIES, index // num_row_blocks, 1
    own_head, own_sample = index % bias_sizes.num_heads, index // bias_sizes.num_heads
    heads_summed = call.sizes.num_heads // bias_sizes.num_heads
    num_steps = call.sizes.batch // bias_sizes.num_samples * heads_summed * row_blocks_summed
    if not bias_sizes.SUMS_QUERIES:
        # Where no query of the tile sees a key of it, there is nothing to sum.
        if call.places.last_offset is not None:
            num_steps = tl.where(start_key > own_row + (call.BLOCK_QUERIES - 1) + call.places.last_offset, 0, num_steps)
        if call.places.first_offset is not None:
            num_steps = tl.where(start_key + call.BLOCK_KEYS <= own_row + call.places.first_offset, 0, num_steps)
    block_row, order = tl.arange(0, call.BLOCK_QUERIES), order_keys(call.BLOCK_KEYS, False)
    total = tl.zeros((call.BLOCK_QUERIES, call.BLOCK_KEYS), tl.float32)
    for step in range(0, num_steps):
        start_row = tl.multiple_of(own_row + step % row_blocks_summed * call.BLOCK_QUERIES, call.BLOCK_QUERIES)
        place = step // row_blocks_summed
        head, sample = widen(own_head + place % heads_summed), widen(own_sample + place // heads_summed)
        program = enter_row(start_row, sample, head, extras, key_low, key_high, first_sample, call)
        kv_head, row = head // call.sizes.group_size, start_row + block_row
        rows, q, grad_out, logsumexp = load_block(q_ptr, grad_out_ptr, logsumexp_ptr, start_row, head, program, call)
        k = load_keys(k_ptr, call.steps.k, start_key, order, kv_head, program, call, call.HEAD_DIM, call.BLOCK_DIM)
        v = load_keys(v_ptr, call.steps.v, start_key, order, kv_head, program, call, call.VALUE_DIM, call.VALUE_BLOCK)
        delta = tl.load(delta_ptr + rows, mask=row < call.sizes.num_queries, other=0.0)
        p, hides, tangents = compute_p(q, k, logsumexp, start_row, start_key, head, True, program, extras, call, False)
        if norm_ptr is not None:
            p *= tl.load(norm_ptr + rows, mask=row < call.sizes.num_queries, other=0.0)[:, None]
        _, ds = compute_ds(
            p, hides, tangents, v, grad_out, delta, start_row, start_key, head, program, extras, call, False, True
        )
        total += ds
    total *= call.draw.keep_scale
    inside = start_key + order < call.sizes.num_keys
    first = widen(own_sample) * bias_sizes.num_heads + own_head
    if bias_sizes.SUMS_QUERIES:
        grad_bias_ptr += first * call.sizes.num_keys + start_key
        tl.store(grad_bias_ptr + order, tl.sum(total, 0).to(grad_bias_ptr.dtype.element_ty), mask=inside)
    else:
        grad_bias_ptr += (first * call.sizes.num_queries + own_row) * call.sizes.num_keys + start_key
        pointers = grad_bias_ptr + block_row.to(tl.int64)[:, None] * call.sizes.num_keys + order[None, :]
        inside = (own_row + block_row < call.sizes.num_queries)[:, None] & inside[None, :]
        tl.store(pointers, total.to(grad_bias_ptr.dtype.element_ty), mask=inside)

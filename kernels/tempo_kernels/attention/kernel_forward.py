"""Computes attention's forward in Triton: FlashAttention-2 (Dao, arXiv 2307.08691, algorithm 1).

Grid: one program for each block of queries of each head of each sample. It passes over the keys that these queries see:

    for each block of keys:
        S = Q K^T, changed and hidden as eager.py says
        m' = max(m, rowmax(S)),  P = exp(S - m'),  l = l exp(m - m') + rowsum(P)
        O = O exp(m - m') + dropout(P) V
    O = O / l / (1 - p),  L = m + log(l)

Only blocks of keys that some of the queries do not see are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tempo_kernels.attention.kernel_program import (
    VARYING,
    enter_program,
    get_keys,
    load_keys,
    load_queries,
    store_rows,
    widen,
)
from tempo_kernels.attention.kernel_scores import begin_softmax, compute_scores, draw_drops, order_keys


@triton.jit(do_not_specialize=VARYING)
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, logsumexp_ptr, extras, key_low, key_high, first_sample, call
):  # fmt: skip
    """Writes out [sq, b, a, dv] and the logsumexp [b, a, sq], in units of unscaled scores, of a block of queries."""
    program = enter_program(extras, key_low, key_high, first_sample, call, False)
    sample, head, start_row = program.sample, program.head, program.start
    kv_head = head // call.sizes.group_size
    block_row, order = tl.arange(0, call.BLOCK_QUERIES), order_keys(call.BLOCK_KEYS, False)
    row = start_row + block_row
    q = load_queries(q_ptr, call.steps.q, start_row, head, program, call, call.HEAD_DIM, call.BLOCK_DIM)
    top, total = begin_softmax(head, extras, call)
    out = tl.zeros((call.BLOCK_QUERIES, call.VALUE_BLOCK), tl.float32)
    first, full_start, full_stop, stop = get_keys(program, call)
    for start_key in range(first, stop, call.BLOCK_KEYS):
        k = load_keys(k_ptr, call.steps.k, start_key, order, kv_head, program, call, call.HEAD_DIM, call.BLOCK_DIM)
        is_edge = (start_key < full_start) | (full_stop - start_key < call.BLOCK_KEYS)
        s, _, _ = compute_scores(q, k, start_row, start_key, head, is_edge, program, extras, call, False)
        new_top = tl.maximum(top, tl.max(s, 1))
        # A row that has seen no key yet would subtract minus infinity from itself, which gives NaN.
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        if extras.mask is not None or q.dtype == tl.float32:
            # Subtract before scaling: masked scores are huge and would round, while their difference is exactly 0.
            p = tl.exp2((s - finite_top[:, None]) * call.scores.scale)
        else:
            p = tl.exp2(s * call.scores.scale - (finite_top * call.scores.scale)[:, None])
        shrink = tl.exp2((top - finite_top) * call.scores.scale)
        total = total * shrink + tl.sum(p, 1)
        if call.draw.limit is not None:
            drops = draw_drops(start_row, start_key, head, program, call, False)
            p = tl.where(drops, 0.0, p)
        v = load_keys(v_ptr, call.steps.v, start_key, order, kv_head, program, call, call.VALUE_DIM, call.VALUE_BLOCK)
        out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
        top = new_top
    # A row that sees no key gets an output of 0 and an infinite logsumexp, which makes backward's probabilities 0.
    sees_nothing = total == 0.0
    total = tl.where(sees_nothing, 1.0, total)
    logsumexp = top + tl.log2(total) / call.scores.scale
    if extras.mask is not None:
        # A masked score is so large that adding the logarithm of the sum to it would lose the logarithm's digits. Where
        # the top is a masked score, we therefore store the logsumexp relative to it, and mark that in the last bit.
        hides_all = top == call.scores.masked_score
        bits = tl.where(hides_all, tl.log2(total) / call.scores.scale, logsumexp).to(tl.int32, bitcast=True)
        logsumexp = ((bits & ~1) | hides_all.to(tl.int32)).to(tl.float32, bitcast=True)
    logsumexp = tl.where(sees_nothing, float("inf"), logsumexp)
    index = sample * call.sizes.num_heads + head
    rows = index * call.sizes.num_queries + program.first_query + row
    tl.store(logsumexp_ptr + rows, logsumexp, mask=row < program.num_queries)
    # The softmax's sum and dropout's scale are applied once to the output, not to every probability.
    out *= tl.where(sees_nothing, 0.0, call.draw.keep_scale / total)[:, None]
    step = call.sizes.batch * call.sizes.num_heads * call.VALUE_DIM
    out_ptr += widen(program.first_query) * step + index * call.VALUE_DIM
    store_rows(out_ptr, start_row, block_row, step, program.num_queries, out, call.VALUE_DIM, call.VALUE_BLOCK)

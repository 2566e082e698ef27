"""Computes one tile of attention: scores, probabilities, dropout and the gradients of scores; device functions.

A tile is S [queries, keys] where a program owns queries. Where it owns keys the tile is S^T [keys, queries]
(KEYS_FIRST): then P^T and dS^T are the left operands of P^T dO and dS^T Q as they come out of the product before, and
nothing is transposed. Recomputed probabilities are P = exp(S - logsumexp), and the gradient of the scores is
dS = P * (dP - delta), as in FlashAttention-2 (Dao, arXiv 2307.08691, algorithms 1 and 2). Exponentials are powers of
two, for which the GPU has an instruction; scale therefore includes log2(e).

Keys are permuted within a tile, so that dropout moves nothing between threads; attention does not depend on the order
of keys. Tensor cores give a thread the columns 2 t, 2 t + 1, 8 + 2 t, 8 + 2 t + 1, ... of rows r and r + 8, where t is
the thread's number modulo 4. One call of Philox serves eight neighbouring keys of one query. Rows of K and V are loaded
in such an order that a thread's columns are neighbouring keys, so that it draws for itself alone. With KEYS_FIRST a
thread has only two or four keys of a query. There r and r + 8 are neighbouring keys: a thread needs one word of each
call, and these words do move.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tempo_kernels.attention import settings
from tempo_kernels.attention.kernel_program import widen
from tempo_kernels.kernel_numbers import IS_COMPILED
from tempo_kernels.philox.kernel import draw_words, drop_mask

# Triton 3.3 cannot compile the joins of a transposed tile.
JOINS_TRANSPOSED = tl.constexpr(not triton.__version__.startswith("3.3."))
HIDING_BIAS = tl.constexpr(settings.HIDING_BIAS)


@triton.jit
def order_keys(BLOCK_KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Returns the key at each place of the permuted tile; the module's docstring says why it is permuted."""
    index = tl.arange(0, BLOCK_KEYS)
    if KEYS_FIRST:
        key = (index & ~15) | ((index & 7) << 1) | (index >> 3 & 1)
    else:
        key = (index & ~30) | ((index >> 3 & 3) << 1) | ((index >> 1 & 3) << 3)
    return key


@triton.jit
def reorder_keys(tile, KEYS_FIRST: tl.constexpr):
    """Permutes a tile whose keys are in their own order to the order of order_keys."""
    num_rows: tl.constexpr = tile.shape[0]
    num_columns: tl.constexpr = tile.shape[1]
    if KEYS_FIRST:
        tile = tl.permute(tl.reshape(tile, (num_rows // 16, 8, 2, num_columns)), (0, 2, 1, 3))
    else:
        tile = tl.permute(tl.reshape(tile, (num_rows, num_columns // 32, 4, 4, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(tile, (num_rows, num_columns))


@triton.jit
def expand_queries(x, KEYS_FIRST: tl.constexpr):
    """Gives x [queries] the shape that broadcasts over a tile."""
    return x[None, :] if KEYS_FIRST else x[:, None]


@triton.jit
def expand_keys(x, KEYS_FIRST: tl.constexpr):
    """Gives x [keys] the shape that broadcasts over a tile."""
    return x[:, None] if KEYS_FIRST else x[None, :]


@triton.jit
def multiply(queries, keys, KEYS_FIRST: tl.constexpr):
    """Multiplies queries [m, d] and keys [n, d] to a tile; float32 products are exact, not TF32."""
    if KEYS_FIRST:
        products = tl.dot(keys, tl.trans(queries), input_precision="ieee")
    else:
        products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    return products


@triton.jit
def keep_apart(sums):
    """Returns the sums unchanged, but hides from the compiler that it does. On sm_90 wgmma adds a product to its sums
    asynchronously. Where ptxas sees a loop's sums move between registers at its end, it serializes all products
    (warning C7515)."""
    if IS_COMPILED:
        sums = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [sums], dtype=tl.float32, is_pure=True, pack=1)
    return sums


@triton.jit
def draw_drops(start_row, start_key, head, program, call, KEYS_FIRST: tl.constexpr):
    """Returns where dropout drops in a tile, int1; head is an int64 scalar, as the program's sample. These are the bits
    of drop_mask in philox/kernel.py."""
    row = (start_row + tl.arange(0, call.BLOCK_QUERIES) + program.first_row)[:, None]
    group = ((start_key + program.first_column) // 8 + tl.arange(0, call.BLOCK_KEYS // 8))[None, :]
    sample, head = program.sample + program.first_sample, head + call.draw.first_head
    limit = tl.full((), 0, tl.uint32) + call.draw.limit
    if KEYS_FIRST and JOINS_TRANSPOSED:
        # A transposed tile needs words of other threads, and of joined tensors, as drop_mask has them, the compiler
        # draws each once and then moves it.
        drops = drop_mask(group, row, head, sample, program.key_low, program.key_high, limit)
    else:
        word0, word1, word2, word3 = draw_words(group, row, head, sample, program.key_low, program.key_high)
        # [m, keys / 8, 4, 2]: word, half of the word. Selected by index, not joined, each element is computed by the
        # thread that uses it. For joins Triton 3.6 chooses, before sm_90, a layout whose products move probabilities.
        index, half = tl.arange(0, 4)[None, None, :], tl.arange(0, 2)[None, None, None, :]
        first = word0.to(tl.uint64) | (word1.to(tl.uint64) << 32)
        second = word2.to(tl.uint64) | (word3.to(tl.uint64) << 32)
        pairs = tl.where(index < 2, first[:, :, None], second[:, :, None])
        words = (pairs >> (32 * (index & 1)).to(tl.uint64)).to(tl.uint32)[:, :, :, None]
        drops = tl.where(half == 0, (words & 0xFFFF) < limit, words < (limit << 16))
        drops = tl.reshape(drops, (call.BLOCK_QUERIES, call.BLOCK_KEYS))
    if KEYS_FIRST:
        drops = tl.trans(drops)
    return reorder_keys(drops, KEYS_FIRST)


@triton.jit
def _compute_tanh(x):
    """Computes tanh in float32 to a few units in the last place: near 0 by Cephes' polynomial, elsewhere by an
    exponential."""
    square = x * x
    near = -5.70498872745e-3
    near = near * square + 2.06390887954e-2
    near = near * square - 5.37397155531e-2
    near = near * square + 1.33314422036e-1
    near = near * square - 3.33332819422e-1
    near = near * square * x + x
    far = 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)
    return tl.where(tl.abs(x) < 0.625, near, far)


@triton.jit
def _load_bias(start_row, start_key, head, program, extras, call, KEYS_FIRST: tl.constexpr):
    """Loads the bias of a tile in float32, minus infinity where it hides a key. Offsets within the tile have 32 bits:
    as those of 64 they would take twice the registers."""
    row, key = tl.arange(0, call.BLOCK_QUERIES), order_keys(call.BLOCK_KEYS, KEYS_FIRST)
    first = extras.bias + program.sample * call.steps.bias.sample + head * call.steps.bias.head
    first += widen(start_row) * call.steps.bias.row + widen(start_key) * call.steps.bias.column
    offsets = expand_queries(row * call.steps.bias.row, KEYS_FIRST)
    offsets += expand_keys(key * call.steps.bias.column, KEYS_FIRST)
    inside = expand_queries(start_row + row < program.num_queries, KEYS_FIRST)
    inside = inside & expand_keys(start_key + key < program.num_keys, KEYS_FIRST)
    bias = tl.load(first + offsets, mask=inside, other=0.0).to(tl.float32)
    return tl.where(bias < HIDING_BIAS, float("-inf"), bias)


@triton.jit
def _load_mask(row, start_key, head, program, extras, call, KEYS_FIRST: tl.constexpr):
    """Loads whether the caller's mask hides each key of a tile, int1."""
    key = start_key + tl.arange(0, call.BLOCK_KEYS)
    pointers = extras.mask + program.sample * call.steps.mask.sample + head * call.steps.mask.head
    pointers += expand_queries(row.to(tl.int64) * call.steps.mask.row, KEYS_FIRST)
    pointers += expand_keys(key.to(tl.int64) * call.steps.mask.column, KEYS_FIRST)
    inside = expand_queries(row < program.num_queries, KEYS_FIRST) & expand_keys(key < program.num_keys, KEYS_FIRST)
    return reorder_keys(tl.load(pointers, mask=inside, other=0) != 0, KEYS_FIRST)


@triton.jit
def _hide_unseen(tile, row, start_key, program, call, KEYS_FIRST: tl.constexpr):
    """Returns scores with minus infinity where queries row [m] do not see the key."""
    key = expand_keys(order_keys(call.BLOCK_KEYS, KEYS_FIRST), KEYS_FIRST)
    last_key = row * 0 + (program.num_keys - 1)
    if call.places.last_offset is not None:
        last_key = tl.minimum(row + program.last_offset, last_key)
    seen = key <= expand_queries(last_key - start_key, KEYS_FIRST)
    if call.places.first_offset is not None:
        first_key = row + program.first_offset
        if call.HIDES_FIRST:
            first_key = tl.maximum(first_key, program.num_hidden)
        seen = seen & (key >= expand_queries(first_key - start_key, KEYS_FIRST))
    return tl.where(seen, tile, float("-inf"))


@triton.jit
def compute_scores(q, k, start_row, start_key, head, is_edge, program, extras, call, KEYS_FIRST: tl.constexpr):
    """Computes a tile of unscaled scores as eager.py does: softcap, bias and ALiBi, the caller's mask, then minus
    infinity where a query does not see a key. is_edge says whether some query of the tile does not see some key.

    Returns the scores, int1 where the caller's mask hides (else False), and tanh of the softcap (else 0)."""
    row = start_row + tl.arange(0, call.BLOCK_QUERIES)
    tile = multiply(q, k, KEYS_FIRST)
    tangents, hides = 0.0, False
    if call.scores.cap is not None:
        tangents = _compute_tanh(tile * (1.0 / call.scores.cap))
        tile = tangents * call.scores.cap
    if extras.bias is not None:
        bias = _load_bias(start_row, start_key, head, program, extras, call, KEYS_FIRST)
        tile += bias * call.scores.inverse_scale
    if extras.alibi_slopes is not None:
        # Both terms are whole numbers, so that their sum is exact.
        alibi_slope = tl.load(extras.alibi_slopes + head) * call.scores.inverse_scale
        key = order_keys(call.BLOCK_KEYS, KEYS_FIRST).to(tl.float32)
        behind = (start_key - program.diagonal - row).to(tl.float32)
        tile += alibi_slope * (expand_keys(key, KEYS_FIRST) + expand_queries(behind, KEYS_FIRST))
    if extras.mask is not None:
        hides = _load_mask(row, start_key, head, program, extras, call, KEYS_FIRST)
        tile = tl.where(hides, call.scores.masked_score, tile)
    if call.BRANCHES:
        if is_edge:
            tile = _hide_unseen(tile, row, start_key, program, call, KEYS_FIRST)
    else:
        tile = _hide_unseen(tile, row, start_key, program, call, KEYS_FIRST)
    return tile, hides, tangents


@triton.jit
def get_origin(logsumexp, call):
    """Returns the score to which each logsumexp of rows with a mask is relative: a last bit of 1 marks the masked
    score. The end of _forward_kernel says why."""
    return tl.where((logsumexp.to(tl.int32, bitcast=True) & 1) == 1, call.scores.masked_score, 0.0)


@triton.jit
def begin_softmax(head, extras, call):
    """Returns the maximum and the sum of each row before its first key. A sink is a score that every row has seen."""
    top = tl.full((call.BLOCK_QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((call.BLOCK_QUERIES,), tl.float32)
    if extras.sink is not None:
        sink = tl.load(extras.sink + head).to(tl.float32) * call.scores.inverse_scale
        top, total = total + sink, total + tl.where(sink == float("-inf"), 0.0, 1.0)
    return top, total


@triton.jit
def add_sink_p(total, logsumexp, head, extras, call):
    """Returns the sum of each row's probabilities and of its sink's."""
    if extras.sink is not None:
        sink = tl.load(extras.sink + head).to(tl.float32) * call.scores.inverse_scale
        origin = get_origin(logsumexp, call) if extras.mask is not None else 0.0
        total += tl.exp2((sink - origin - logsumexp) * call.scores.scale)
    return total


@triton.jit
def compute_p(q, k, logsumexp, start_row, start_key, head, is_edge, program, extras, call, KEYS_FIRST: tl.constexpr):
    """Computes P = exp(S - logsumexp), probabilities before dropout in float32, and returns with it what compute_ds
    needs of the scores."""
    tile, hides, tangents = compute_scores(q, k, start_row, start_key, head, is_edge, program, extras, call, KEYS_FIRST)
    if extras.mask is not None:
        tile -= expand_queries(get_origin(logsumexp, call), KEYS_FIRST)
    if q.dtype == tl.float32:
        exponents = (tile - expand_queries(logsumexp, KEYS_FIRST)) * call.scores.scale
    else:
        exponents = tile * call.scores.scale - expand_queries(logsumexp * call.scores.scale, KEYS_FIRST)
    return tl.exp2(exponents), hides, tangents


@triton.jit
def compute_ds(
    p, hides, tangents, v, grad_out, delta, start_row, start_key, head, program, extras, call,
    KEYS_FIRST: tl.constexpr, OF_BIAS: tl.constexpr = False,
):  # fmt: skip
    """Returns P after dropout and dS = P * (dP - delta), in float32. dS is the gradient of the scaled products; with
    OF_BIAS that of what is added to them. Both lack the factor of dropout's scale 1 / (1 - p), by which delta is
    divided too: the kernels multiply their finished sums by it once."""
    dp = multiply(grad_out, v, KEYS_FIRST)
    kept = p
    if call.draw.limit is not None:
        drops = draw_drops(start_row, start_key, head, program, call, KEYS_FIRST)
        kept = tl.where(drops, 0.0, p)
    if call.draw.limit is not None and v.dtype != tl.float32:
        # D * dP - P * delta needs no second selection. Its extra rounding is far below that of 16-bit products.
        ds = kept * dp - p * expand_queries(delta, KEYS_FIRST)
    else:
        if call.draw.limit is not None:
            dp = tl.where(drops, 0.0, dp)
        ds = p * (dp - expand_queries(delta, KEYS_FIRST))
    if extras.mask is not None and (OF_BIAS or not call.ADDS_MASK):
        ds = tl.where(hides, 0.0, ds)
    if call.scores.cap is not None and not OF_BIAS:
        ds *= 1.0 - tangents * tangents
    return kept, ds

"""Device functions that attention's kernels share: loads, masks, dropout and softmax of one tile of scores.

A tile is [queries, keys] where a program owns queries, and [keys, queries] (KEYS_FIRST) where it owns keys. Recomputed
probabilities are P = exp(scores - logsumexp), and the gradient of the scores is P * (dP - delta), as in
FlashAttention-2 (Dao, arXiv 2307.08691, algorithms 1 and 2). Exponentials are powers of two, for which the GPU has an
instruction; scale therefore includes log2(e).

Keys are permuted within a tile, so that dropout moves nothing between threads; attention does not depend on the order
of keys. Tensor cores give a thread the columns 2 t, 2 t + 1, 8 + 2 t, 8 + 2 t + 1, ... of rows r and r + 8, where t is
the thread's number modulo 4. One call of Philox serves eight neighbouring keys of one query. Rows of K and V are loaded
in such an order that a thread's columns are neighbouring keys, so that it draws for itself alone. In the keys' own
order the mask of a tile of 128 x 64 took 24 more stores to shared memory, 24 more loads and five more barriers. With
KEYS_FIRST a thread has only two or four keys of a query. There r and r + 8 are neighbouring keys: a thread needs one
word of each call, and these words do move.

From sm_90 on forward and the walk for all gradients read by tensor descriptors where they can (kernel_plan.py): one
instruction of one thread copies a tile (TMA), where each thread else computes addresses. A descriptor cannot express
the order above, in which pieces of 32 keys are permuted. With DESCRIBED the whole tile is: of every eight neighbouring
keys the first two lie in its first quarter. A thread's columns are neighbouring keys there, too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tempo_kernels.attention import settings, walks
from tempo_kernels.kernel_numbers import IS_COMPILED
from tempo_kernels.philox.kernel import philox4x32

# triton 3.3 cannot compile the joins of a transposed tile. There each key makes its own call of Philox.
JOINS_TRANSPOSED = tl.constexpr(not triton.__version__.startswith("3.3."))

HIDING_BIAS = tl.constexpr(settings.HIDING_BIAS)

# Rows of the statistics are rounded up to this: every BLOCK_QUERIES divides it, so that no load needs a mask.
PADDING = tl.constexpr(walks.ROWS_OF_STATISTICS)

# Arguments that change from call to call or from layer to layer: do_not_specialize keeps Triton from compiling a kernel
# anew for a value that is 1 or divisible by 16.
VARYING = [f"{name}_{axis}" for name in ("q", "k", "v", "grad") for axis in ("row", "sample", "head")]
VARYING += ["mask_sample", "mask_head", "mask_row", "mask_column"]
VARYING += ["num_queries", "num_keys", "batch", "num_heads", "group_size", "first_offset", "last_offset"]
VARYING += ["first_row", "first_column", "diagonal", "num_documents"]
VARYING += ["bias_sample", "bias_head", "bias_row", "bias_column"]
VARYING += ["mask_ptr", "lengths_ptr", "key_ptr", "first_sample_ptr", "bias_ptr", "slopes_ptr", "sink_ptr"]
VARYING += ["boundaries_ptr", "key_boundaries_ptr", "samples_ptr"]
DRAWN = ("key_low", "key_high", "first_sample", "first_head")
VARYING += [*DRAWN, "limit", "heads_in_turn"]


@triton.jit
def find_turn(program, num_blocks, num_heads, heads_in_turn):
    """Returns (block, head) of a program, where num_heads has those of all samples: a group of heads_in_turn heads
    follows the other, and in it the first blocks of all heads come first; see walks.group_heads."""
    programs_of_group = num_blocks * heads_in_turn
    first_head = program // programs_of_group * heads_in_turn
    place, heads = program % programs_of_group, tl.minimum(heads_in_turn, num_heads - first_head)
    return place // heads, first_head + place % heads


@triton.jit
def order_keys(BLOCK_KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr, DESCRIBED: tl.constexpr = False):
    """Returns the key at each place of the permuted tile; the module's docstring says why it is permuted."""
    index = tl.arange(0, BLOCK_KEYS)
    if KEYS_FIRST:
        key = (index & ~15) | ((index & 7) << 1) | (index >> 3 & 1)
    elif DESCRIBED:
        place = index % (BLOCK_KEYS // 4)
        key = (place >> 1 << 3) | (index // (BLOCK_KEYS // 4) << 1) | (place & 1)
    else:
        key = (index & ~30) | ((index >> 3 & 3) << 1) | ((index >> 1 & 3) << 3)
    return key


@triton.jit
def reorder_keys(tile, KEYS_FIRST: tl.constexpr, DESCRIBED: tl.constexpr = False):
    """Permutes a tile whose keys are in their own order to that of order_keys."""
    num_rows: tl.constexpr = tile.shape[0]
    num_columns: tl.constexpr = tile.shape[1]
    if KEYS_FIRST:
        tile = tl.permute(tl.reshape(tile, (num_rows // 16, 8, 2, num_columns)), (0, 2, 1, 3))
    elif DESCRIBED:
        tile = tl.permute(tl.reshape(tile, (num_rows, num_columns // 8, 4, 2)), (0, 2, 1, 3))
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
def draw_drops(
    row, start_key, head, sample, key_low, key_high, limit, BLOCK_KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr,
    DESCRIBED: tl.constexpr = False, PACKS: tl.constexpr = False,
):  # fmt: skip
    """Returns where dropout drops, int1, for queries row [m]; head and sample (int64) are scalars. These are the bits
    of drop_mask in philox/kernel.py. With DESCRIBED they are drawn where the call stands, and until their use a call of
    Philox occupies four registers, or with PACKS one, which takes more instructions."""
    group = start_key // 8 + tl.arange(0, BLOCK_KEYS // 8)
    word0, word1, word2, word3 = philox4x32(
        group[None, :].to(tl.uint32),
        row[:, None].to(tl.uint32),
        (head + ((sample >> 32) << 16)).to(tl.uint32),
        sample.to(tl.uint32),
        key_low,
        key_high,
    )
    limit = limit.to(tl.uint32)
    if DESCRIBED and not PACKS:
        word0, word2 = hold_here(word0), hold_here(word2)  # a round gives the others by the same products
    if PACKS:
        low, high = 0xFFFF, limit << 16
        bits = ((word0 & low) < limit).to(tl.uint32) | ((word0 < high).to(tl.uint32) << 1)
        bits |= (((word1 & low) < limit).to(tl.uint32) << 2) | ((word1 < high).to(tl.uint32) << 3)
        bits |= (((word2 & low) < limit).to(tl.uint32) << 4) | ((word2 < high).to(tl.uint32) << 5)
        bits |= (((word3 & low) < limit).to(tl.uint32) << 6) | ((word3 < high).to(tl.uint32) << 7)
        # [m, keys / 8, 4, 2]: word, half of the word
        place = tl.arange(0, 4)[None, None, :, None] * 2 + tl.arange(0, 2)[None, None, None, :]
        drops = ((hold_here(bits)[:, :, None, None] >> place.to(tl.uint32)) & 1) != 0
    elif KEYS_FIRST:
        # [m, keys / 8, 2, 2]: pair, word of the pair. A transposed tile needs words of other threads, and of joined
        # tensors the compiler draws each once and then moves it.
        words = tl.join(tl.join(word0, word2), tl.join(word1, word3))
        drops = tl.join((words & 0xFFFF) < limit, words < (limit << 16))
    else:
        # [m, keys / 8, 4, 2]: word, half of the word. Selected by index, not joined, each element is computed by the
        # thread that uses it. For joins Triton 3.6 chooses, before sm_90, a layout whose products move probabilities.
        index, half = tl.arange(0, 4)[None, None, :], tl.arange(0, 2)[None, None, None, :]
        first = word0.to(tl.uint64) | (word1.to(tl.uint64) << 32)
        second = word2.to(tl.uint64) | (word3.to(tl.uint64) << 32)
        pairs = tl.where(index < 2, first[:, :, None], second[:, :, None])
        words = (pairs >> (32 * (index & 1)).to(tl.uint64)).to(tl.uint32)[:, :, :, None]
        drops = tl.where(half == 0, (words & 0xFFFF) < limit, words < (limit << 16))
    drops = tl.reshape(drops, (row.shape[0], BLOCK_KEYS))
    if KEYS_FIRST:
        drops = tl.trans(drops)
    return reorder_keys(drops, KEYS_FIRST, DESCRIBED)


@triton.jit
def draw_drops_key_by_key(row, start_key, head, sample, key_low, key_high, limit, BLOCK_KEYS: tl.constexpr):
    """Returns the same bits as draw_drops with KEYS_FIRST, by a call of Philox per key instead of one for eight."""
    key = (start_key + order_keys(BLOCK_KEYS, True))[:, None]
    word0, word1, word2, word3 = philox4x32(
        (key // 8).to(tl.uint32),
        row[None, :].to(tl.uint32),
        (head + ((sample >> 32) << 16)).to(tl.uint32),
        sample.to(tl.uint32),
        key_low,
        key_high,
    )
    pair = key // 2 % 4
    word = tl.where(pair < 2, tl.where(pair == 0, word0, word1), tl.where(pair == 2, word2, word3))
    return ((word >> (key % 2 * 16).to(tl.uint32)) & 0xFFFF) < limit.to(tl.uint32)


@triton.jit
def find_place_of_draw(row, start_key, first_row, first_column, IS_PART: tl.constexpr):
    """Returns the global numbers of queries `row` and of a tile's first key, by which dropout draws."""
    if IS_PART:
        row, start_key = row + first_row, start_key + first_column
    return row, start_key


@triton.jit
def load_rows(
    ptr, start, row, stride, num_rows, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    num_hidden=0, HIDES_FIRST: tl.constexpr = False,
):  # fmt: skip
    """Loads rows start + row [m] of a matrix [num_rows, HEAD_DIM] as [m, BLOCK_DIM], with zeros outside of the matrix,
    and with HIDES_FIRST in its first num_hidden rows.
    Only the offset of `start` needs 64 bits; kernel.MAX_ROW_ELEMENTS keeps those within a block in 32."""
    dim = tl.arange(0, BLOCK_DIM)
    inside = (start + row < num_rows)[:, None]
    if HIDES_FIRST:
        inside = inside & (start + row >= num_hidden)[:, None]
    if HEAD_DIM < BLOCK_DIM:
        inside = inside & (dim < HEAD_DIM)[None, :]
    pointers = ptr + start * stride.to(tl.int64) + (row[:, None] * stride + dim[None, :])
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def load_described_rows(rows, sample, head, start, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Loads rows from `start` on, in their own order, by the descriptor of kernel_plan.py: _describe_queries."""
    tile = rows.load([sample.to(tl.int32), head.to(tl.int32), start, 0])
    return tl.reshape(tile, (BLOCK_ROWS, BLOCK_DIM))


@triton.jit
def load_described_keys(keys, index, start_key, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Loads keys from start_key on in the order of order_keys, by the descriptor of kernel_plan.py: _describe_keys;
    index is sample * key-value heads + head."""
    return tl.reshape(keys.load([index, 0, start_key // 8, 0, 0]), (BLOCK_KEYS, BLOCK_DIM))


@triton.jit
def store_rows(
    ptr, start, row, stride, num_rows, value, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    num_hidden=0, HIDES_FIRST: tl.constexpr = False,
):  # fmt: skip
    """Stores value [m, BLOCK_DIM] where load_rows reads."""
    dim = tl.arange(0, BLOCK_DIM)
    pointers = ptr + start * stride.to(tl.int64) + (row.to(tl.int64)[:, None] * stride + dim[None, :])
    inside = (start + row < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    if HIDES_FIRST:
        inside = inside & (start + row >= num_hidden)[:, None]
    tl.store(pointers, value.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_mask(
    ptr, row, start_key, stride_query, stride_key, num_queries, num_keys,
    BLOCK_KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr, DESCRIBED: tl.constexpr = False,
):  # fmt: skip
    """Loads whether the caller's mask hides each key, int1, for queries row [m]."""
    key = start_key + tl.arange(0, BLOCK_KEYS)
    pointers = ptr + expand_queries(row.to(tl.int64) * stride_query, KEYS_FIRST)
    pointers += expand_keys(key.to(tl.int64) * stride_key, KEYS_FIRST)
    inside = expand_queries(row < num_queries, KEYS_FIRST) & expand_keys(key < num_keys, KEYS_FIRST)
    return reorder_keys(tl.load(pointers, mask=inside, other=0) != 0, KEYS_FIRST, DESCRIBED)


@triton.jit
def count_keys(lengths_ptr, sample, num_keys, HAS_LENGTHS: tl.constexpr):
    """Returns how many keys the sample has, clamped to those that exist."""
    num_seen = num_keys
    if HAS_LENGTHS:
        num_seen = tl.minimum(tl.maximum(tl.load(lengths_ptr + sample), 0), num_keys).to(tl.int32)
    return num_seen


@triton.jit
def find_seen_keys(
    row, first_offset, last_offset, num_seen, LIMITS_LEFT: tl.constexpr, LIMITS_RIGHT: tl.constexpr,
    num_hidden=0, HIDES_FIRST: tl.constexpr = False,
):  # fmt: skip
    """Returns the (first, last) key that queries row [m] see of num_seen keys: row + first_offset to row + last_offset,
    where the side is limited. With HIDES_FIRST, which comes with LIMITS_LEFT, nobody sees the first num_hidden."""
    first_key, last_key = row * 0, row * 0 + (num_seen - 1)
    if LIMITS_LEFT:
        first_key = row + first_offset
    if HIDES_FIRST:
        first_key = tl.maximum(first_key, num_hidden)
    if LIMITS_RIGHT:
        last_key = tl.minimum(row + last_offset, last_key)
    return first_key, last_key


@triton.jit
def hide_unseen(
    scores, first_key, last_key, start_key, is_edge,
    LIMITS_LEFT: tl.constexpr, BRANCHES: tl.constexpr, BLOCK_KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr,
    DESCRIBED: tl.constexpr = False,
):  # fmt: skip
    """Returns scores with minus infinity where a query does not see the key; first_key and last_key are those of
    find_seen_keys. With BRANCHES, tiles in which every query sees every key skip the work."""
    if BRANCHES:
        if is_edge:
            scores = _hide(scores, first_key, last_key, start_key, LIMITS_LEFT, BLOCK_KEYS, KEYS_FIRST, DESCRIBED)
    else:
        scores = _hide(scores, first_key, last_key, start_key, LIMITS_LEFT, BLOCK_KEYS, KEYS_FIRST, DESCRIBED)
    return scores


@triton.jit
def _hide(
    scores, first_key, last_key, start_key,
    LIMITS_LEFT: tl.constexpr, BLOCK_KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    key = expand_keys(order_keys(BLOCK_KEYS, KEYS_FIRST, DESCRIBED), KEYS_FIRST)
    seen = key <= expand_queries(last_key - start_key, KEYS_FIRST)
    if LIMITS_LEFT:
        seen = seen & (key >= expand_queries(first_key - start_key, KEYS_FIRST))
    return tl.where(seen, scores, float("-inf"))


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
    (warning C7515). Applied to probabilities, it keeps LLVM from masking pairs of 16 bits, at twice the cost."""
    if IS_COMPILED:
        sums = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [sums], dtype=tl.float32, is_pure=True, pack=1)
    return sums


@triton.jit
def compute_anew(number):
    """Returns the 32-bit number unchanged, but hides from the compiler that it does. A loop that passes a stride on to
    its next iteration this way computes offsets anew, where they would else occupy registers that the tile needs."""
    if IS_COMPILED:
        number = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=True, pack=1)
    return number


@triton.jit
def hold_here(words):
    """Returns the 32-bit words unchanged, by a shuffle of each thread with itself. ptxas moves computations to their
    first use, behind the wait for a product; it does not move a shuffle, nor what goes into it."""
    if IS_COMPILED:
        words = tl.inline_asm_elementwise(
            "shfl.sync.bfly.b32 $0, $1, 0, 31, -1;", "=r,r", [words], dtype=tl.uint32, is_pure=True, pack=1
        )
    return words


@triton.jit
def _find_tanh(x):
    """tanh in float32, to a few units in the last place: near 0 by Cephes' polynomial, elsewhere by an exponential."""
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
def load_slope(slopes_ptr, head, inverse_scale, HAS_SLOPES: tl.constexpr):
    """Returns the head's slope of ALiBi for unscaled scores."""
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(slopes_ptr + head) * inverse_scale
    return slope


@triton.jit
def change_scores(
    scores, row, start_row, start_key, bias_ptr, bias_row, bias_column, slope, diagonal, cap, inverse_scale,
    num_queries, num_keys, HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr, DESCRIBED: tl.constexpr = False,
):  # fmt: skip
    """Returns the unscaled scores with softcap, bias and ALiBi, and the tangents: the capped scores divided by cap."""
    tangents = 0.0
    if HAS_CAP:
        tangents = _find_tanh(scores * (1.0 / cap))
        scores = tangents * cap
    if HAS_BIAS:
        # Offsets within the tile have 32 bits: as those of 64 they would take twice the registers.
        key = order_keys(BLOCK_KEYS, KEYS_FIRST, DESCRIBED)
        bias_ptr += start_row * bias_row.to(tl.int64) + start_key * bias_column.to(tl.int64)
        offsets = expand_queries((row - start_row) * bias_row, KEYS_FIRST) + expand_keys(key * bias_column, KEYS_FIRST)
        inside = expand_queries(row < num_queries, KEYS_FIRST) & expand_keys(start_key + key < num_keys, KEYS_FIRST)
        bias = tl.load(bias_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        scores += tl.where(bias < HIDING_BIAS, float("-inf"), bias) * inverse_scale
    if HAS_SLOPES:
        # Both terms are whole numbers, so that their sum is exact.
        key = order_keys(BLOCK_KEYS, KEYS_FIRST, DESCRIBED).to(tl.float32)
        behind = (start_key - diagonal - row).to(tl.float32)
        scores += slope * (expand_keys(key, KEYS_FIRST) + expand_queries(behind, KEYS_FIRST))
    return scores, tangents


@triton.jit
def find_origin(logsumexp, masked_score):
    """Returns the score to which each logsumexp beside a mask is relative: a last bit of 1 marks the masked score. The
    end of _forward_kernel says why."""
    return tl.where((logsumexp.to(tl.int32, bitcast=True) & 1) == 1, masked_score, 0.0)


@triton.jit
def find_probabilities(
    q, k, logsumexp, row, first_key, last_key, start_row, start_key, is_edge,
    mask_ptr, mask_row, mask_column, bias_ptr, bias_row, bias_column, slope, diagonal, cap, inverse_scale,
    num_queries, num_keys, scale, masked_score,
    LIMITS_LEFT: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPES: tl.constexpr,
    PRECISE: tl.constexpr, BRANCHES: tl.constexpr, BLOCK_KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Computes exp(scores - logsumexp): probabilities before dropout in float32, and int1 where the mask hides, and the
    tangents of change_scores."""
    scores = multiply(q, k, KEYS_FIRST)
    scores, tangents = change_scores(
        scores, row, start_row, start_key, bias_ptr, bias_row, bias_column, slope, diagonal, cap, inverse_scale,
        num_queries, num_keys, HAS_CAP, HAS_BIAS, HAS_SLOPES, BLOCK_KEYS, KEYS_FIRST,
    )  # fmt: skip
    hides = False
    if HAS_MASK:
        hides = load_mask(
            mask_ptr, row, start_key, mask_row, mask_column, num_queries, num_keys, BLOCK_KEYS, KEYS_FIRST
        )
        scores = tl.where(hides, masked_score, scores)
        scores -= expand_queries(find_origin(logsumexp, masked_score), KEYS_FIRST)
    scores = hide_unseen(scores, first_key, last_key, start_key, is_edge, LIMITS_LEFT, BRANCHES, BLOCK_KEYS, KEYS_FIRST)
    if PRECISE:
        exponents = (scores - expand_queries(logsumexp, KEYS_FIRST)) * scale
    else:
        exponents = scores * scale - expand_queries(logsumexp * scale, KEYS_FIRST)
    return tl.exp2(exponents), hides, tangents


@triton.jit
def find_score_gradients(
    probabilities, hides, tangents, v, grad_out, delta, row, start_key, head, sample, key_low, key_high, limit,
    HAS_MASK: tl.constexpr, HAS_CAP: tl.constexpr, DRAWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Returns probabilities after dropout and the gradient of the scaled products, in float32; row and start_key are
    those of find_place_of_draw. HAS_MASK is kernel_plan.py's. Both lack the factor of
    dropout's scale 1 / (1 - p), by which delta is divided too: the kernels multiply their finished sums by it once."""
    grad_probabilities = multiply(grad_out, v, KEYS_FIRST)
    kept = probabilities
    if DRAWS:
        if JOINS_TRANSPOSED or not KEYS_FIRST:
            drops = draw_drops(row, start_key, head, sample, key_low, key_high, limit, BLOCK_KEYS, KEYS_FIRST)
        else:
            drops = draw_drops_key_by_key(row, start_key, head, sample, key_low, key_high, limit, BLOCK_KEYS)
        kept = tl.where(drops, 0.0, probabilities)
    if DRAWS and v.dtype != tl.float32:
        # D * dP - P * delta needs no second selection. Its extra rounding is far below that of 16-bit products.
        grad_scores = kept * grad_probabilities - probabilities * expand_queries(delta, KEYS_FIRST)
    else:
        if DRAWS:
            grad_probabilities = tl.where(drops, 0.0, grad_probabilities)
        grad_scores = probabilities * (grad_probabilities - expand_queries(delta, KEYS_FIRST))
    if HAS_MASK == 1:
        grad_scores = tl.where(hides, 0.0, grad_scores)
    if HAS_CAP:
        grad_scores *= 1.0 - tangents * tangents
    return kept, grad_scores

"""What the kernels of attention do with one tile of scores: [queries, keys] where a program owns queries, and
[keys, queries] (KEYS_FIRST) where it owns keys.

Keys are not in order within a tile; attention knows no order of keys. Tensor cores give a thread columns 2 t, 2 t + 1,
8 + 2 t, 8 + 2 t + 1, ... of rows r and r + 8 (t: its number modulo 4), while one call of Philox serves eight
neighbouring keys of one query. Rows of K and V are loaded such that the columns of a thread are neighbouring keys: it
draws what it needs, once, and nothing moves between threads. In the keys' own order the mask of a tile of 128 x 64 took
24 more stores to and 24 more loads from shared memory and five more barriers. With KEYS_FIRST a thread has only two or
four keys of a query; there r and r + 8 are neighbours, so that a thread needs one word of each call, and these words
move.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tempo_kernels.philox.kernel import philox4x32

# triton 3.3 cannot compile the joins of a transposed tile: there every key of it makes its own call of Philox.
JOINS_TRANSPOSED = tl.constexpr(not triton.__version__.startswith("3.3."))

# Arguments that change from call to call or from layer to layer: no value of theirs compiles a kernel anew.
VARYING = [f"{name}_{axis}" for name in ("q", "k", "v", "grad") for axis in ("row", "sample", "head")]
VARYING += ["mask_sample", "mask_head", "mask_row", "mask_column"]
VARYING += ["num_queries", "num_keys", "batch", "num_heads", "group_size", "first_offset", "last_offset"]
VARYING += ["mask_ptr", "lengths_ptr", "key_ptr", "first_sample_ptr"]
VARYING += ["key_low", "key_high", "first_sample", "first_head", "limit"]


@triton.jit
def key_order(BLOCK_KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Which key of the tile is where."""
    index = tl.arange(0, BLOCK_KEYS)
    if KEYS_FIRST:
        key = (index & ~15) | ((index & 7) << 1) | (index >> 3 & 1)
    else:
        key = (index & ~30) | ((index >> 3 & 3) << 1) | ((index >> 1 & 3) << 3)
    return key


@triton.jit
def in_key_order(tile, KEYS_FIRST: tl.constexpr):
    """A tile whose keys are in order, as key_order has them."""
    num_rows: tl.constexpr = tile.shape[0]
    num_columns: tl.constexpr = tile.shape[1]
    if KEYS_FIRST:
        tile = tl.permute(tl.reshape(tile, (num_rows // 16, 8, 2, num_columns)), (0, 2, 1, 3))
    else:
        tile = tl.permute(tl.reshape(tile, (num_rows, num_columns // 32, 4, 4, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(tile, (num_rows, num_columns))


@triton.jit
def over_queries(x, KEYS_FIRST: tl.constexpr):
    """x [queries] as it broadcasts over a tile."""
    return x[None, :] if KEYS_FIRST else x[:, None]


@triton.jit
def over_keys(x, KEYS_FIRST: tl.constexpr):
    """x [keys] as it broadcasts over a tile."""
    return x[:, None] if KEYS_FIRST else x[None, :]


@triton.jit
def dropped(row, start_key, head, sample, key_low, key_high, limit, BLOCK_KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Where dropout drops, int1, of queries row [m]; head and sample (int64) are scalars.

    The same bits as drop_mask in philox/kernel.py.
    """
    group = start_key // 8 + tl.arange(0, BLOCK_KEYS // 8)
    word0, word1, word2, word3 = philox4x32(
        group[None, :].to(tl.uint32),
        row[:, None].to(tl.uint32),
        (head + ((sample >> 32) << 16)).to(tl.uint32),
        sample.to(tl.uint32),
        key_low,
        key_high,
    )
    # [m, keys / 8, 2, 2], [first or second pair][word of the pair]
    if KEYS_FIRST:
        # With four tensors to join, the compiler draws each once and moves it. That is what is wanted here,
        words = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    else:
        # and not here: of two tensors it computes each element where it is used.
        first = word0.to(tl.uint64) | (word1.to(tl.uint64) << 32)
        second = word2.to(tl.uint64) | (word3.to(tl.uint64) << 32)
        pairs = tl.join(first, second)
        words = tl.join(pairs.to(tl.uint32), (pairs >> 32).to(tl.uint32))
    limit = limit.to(tl.uint32)
    drops = tl.join((words & 0xFFFF) < limit, words < (limit << 16))
    drops = tl.reshape(drops, (row.shape[0], BLOCK_KEYS))
    if KEYS_FIRST:
        drops = tl.trans(drops)
    return in_key_order(drops, KEYS_FIRST)


@triton.jit
def dropped_key_by_key(row, start_key, head, sample, key_low, key_high, limit, BLOCK_KEYS: tl.constexpr):
    """As dropped with KEYS_FIRST, at eight times its price."""
    key = (start_key + key_order(BLOCK_KEYS, True))[:, None]
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
def load_rows(ptr, start, row, stride, num_rows, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Rows start + row [m] of a matrix [num_rows, HEAD_DIM], as [m, BLOCK_DIM] with zeros where it has no element."""
    dim = tl.arange(0, BLOCK_DIM)
    inside = (start + row < num_rows)[:, None]
    if HEAD_DIM < BLOCK_DIM:
        inside = inside & (dim < HEAD_DIM)[None, :]
    pointers = ptr + start * stride.to(tl.int64) + (row[:, None] * stride + dim[None, :])
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def store_rows(ptr, start, row, stride, num_rows, value, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Writes value [m, BLOCK_DIM] where load_rows reads."""
    dim = tl.arange(0, BLOCK_DIM)
    pointers = ptr + start * stride.to(tl.int64) + (row.to(tl.int64)[:, None] * stride + dim[None, :])
    inside = (start + row < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(pointers, value.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_mask(
    ptr, row, start_key, stride_query, stride_key, num_queries, num_keys,
    BLOCK_KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Whether the caller's mask hides, int1, for queries row [m]."""
    key = start_key + tl.arange(0, BLOCK_KEYS)
    pointers = ptr + over_queries(row.to(tl.int64) * stride_query, KEYS_FIRST)
    pointers += over_keys(key.to(tl.int64) * stride_key, KEYS_FIRST)
    inside = over_queries(row < num_queries, KEYS_FIRST) & over_keys(key < num_keys, KEYS_FIRST)
    return in_key_order(tl.load(pointers, mask=inside, other=0) != 0, KEYS_FIRST)


@triton.jit
def keys_seen(row, first_offset, last_offset, num_seen, LIMITS_LEFT: tl.constexpr, LIMITS_RIGHT: tl.constexpr):
    """(first, last) key that queries row [m] see: row + first_offset to row + last_offset, if limited, of num_seen."""
    first_key, last_key = row * 0, row * 0 + (num_seen - 1)
    if LIMITS_LEFT:
        first_key = row + first_offset
    if LIMITS_RIGHT:
        last_key = tl.minimum(row + last_offset, last_key)
    return first_key, last_key


@triton.jit
def limited(
    scores, first_key, last_key, start_key,
    LIMITS_LEFT: tl.constexpr, BLOCK_KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """scores, and minus infinity where a query does not see the key; see keys_seen."""
    key = over_keys(key_order(BLOCK_KEYS, KEYS_FIRST), KEYS_FIRST)
    seen = key <= over_queries(last_key - start_key, KEYS_FIRST)
    if LIMITS_LEFT:
        seen = seen & (key >= over_queries(first_key - start_key, KEYS_FIRST))
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def tile_probabilities(
    q, k, logsumexp, row, first_key, last_key, start_key, is_edge,
    mask_ptr, mask_row, mask_column, num_queries, num_keys, scale, masked_score,
    LIMITS_LEFT: tl.constexpr, HAS_MASK: tl.constexpr, PRECISE: tl.constexpr, BRANCHES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """(probabilities before dropout in float32, where the caller's mask hides)"""
    if KEYS_FIRST:
        scores = tl.dot(k, tl.trans(q), input_precision="ieee")
    else:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    hides = False
    if HAS_MASK:
        hides = load_mask(
            mask_ptr, row, start_key, mask_row, mask_column, num_queries, num_keys, BLOCK_KEYS, KEYS_FIRST
        )
        scores = tl.where(hides, masked_score, scores)
        # See the end of the forward kernel.
        origin = tl.where((logsumexp.to(tl.int32, bitcast=True) & 1) == 1, masked_score, 0.0)
        scores -= over_queries(origin, KEYS_FIRST)
    if BRANCHES:
        if is_edge:
            scores = limited(scores, first_key, last_key, start_key, LIMITS_LEFT, BLOCK_KEYS, KEYS_FIRST)
    else:
        scores = limited(scores, first_key, last_key, start_key, LIMITS_LEFT, BLOCK_KEYS, KEYS_FIRST)
    if PRECISE:
        exponents = (scores - over_queries(logsumexp, KEYS_FIRST)) * scale
    else:
        exponents = scores * scale - over_queries(logsumexp * scale, KEYS_FIRST)
    return tl.exp2(exponents), hides


@triton.jit
def tile_gradients(
    probabilities, hides, v, grad_out, delta, row, start_key, head, sample, key_low, key_high, limit, keep_scale,
    HAS_MASK: tl.constexpr, DRAWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """(probabilities after dropout without its scale, gradient of the scaled scores), in float32."""
    if KEYS_FIRST:
        grad_probabilities = tl.dot(v, tl.trans(grad_out), input_precision="ieee")
    else:
        grad_probabilities = tl.dot(grad_out, tl.trans(v), input_precision="ieee")
    kept = probabilities
    if DRAWS:
        if JOINS_TRANSPOSED or not KEYS_FIRST:
            drops = dropped(row, start_key, head, sample, key_low, key_high, limit, BLOCK_KEYS, KEYS_FIRST)
        else:
            drops = dropped_key_by_key(row, start_key, head, sample, key_low, key_high, limit, BLOCK_KEYS)
        kept = tl.where(drops, 0.0, probabilities)
        grad_probabilities = tl.where(drops, 0.0, grad_probabilities * keep_scale)
    grad_scores = probabilities * (grad_probabilities - over_queries(delta, KEYS_FIRST))
    if HAS_MASK:
        grad_scores = tl.where(hides, 0.0, grad_scores)
    return kept, grad_scores

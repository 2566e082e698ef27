"""Draws Philox4x32 and dropout masks in Triton: device functions for the kernels of other folders.

Philox4x32 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) maps a counter and a key to four
words by rounds of two 32 x 32 -> 64 bit products. The counter is an element's position (eager.py has its layout), so
any program can draw any part of a mask, any number of times. A word serves two columns, 16 bits each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tempo_kernels.philox import eager

ROUNDS = tl.constexpr(eager.ROUNDS)
LANES = tl.constexpr(eager.LANES)


def key_words(key: int) -> tuple[int, int]:
    """Splits a key into two signed 32-bit numbers. As launch arguments they have the same type for every key, so that,
    listed in do_not_specialize, no key compiles a kernel again."""
    low, high = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    return low - (low >> 31 << 32), high - (high >> 31 << 32)


@triton.jit
def philox4x32(c0, c1, c2, c3, key_low, key_high, NUM_ROUNDS: tl.constexpr = ROUNDS):
    """Computes four random words. The counter's words are uint32 and broadcast; the key's halves are 32-bit scalars."""
    k0 = key_low.to(tl.uint32, bitcast=True)
    k1 = key_high.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(NUM_ROUNDS):
        # A 64-bit product gives both halves by one instruction; umulhi and a 32-bit product would take two.
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0, product1.to(tl.uint32)
        c2, c3 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1, product0.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def load_draw(key_ptr, first_sample_ptr, key_low, key_high, first_sample):
    """Returns (key_low, key_high, first_sample), loaded from memory where they are device data."""
    if key_ptr is not None:
        key = tl.load(key_ptr)
        key_low, key_high = key.to(tl.int32), (key >> 32).to(tl.int32)
    first_sample = first_sample.to(tl.int64)
    if first_sample_ptr is not None:
        first_sample = tl.load(first_sample_ptr)
    return key_low, key_high, first_sample


@triton.jit
def draw_words(group, row, head, sample, key_low, key_high):
    """Computes the four words of every group of eight columns: group is the column divided by eight, [1, n]; row, head
    and sample (int64) broadcast to [m, 1]."""
    place = (head + ((sample >> 32) << 16)).to(tl.uint32)
    return philox4x32(group.to(tl.uint32), row.to(tl.uint32), place, sample.to(tl.uint32), key_low, key_high)


@triton.jit
def drop_mask(group, row, head, sample, key_low, key_high, limit):
    """Returns True where dropout drops, int1 [m, 8 * n], for the eight columns of every group, as in draw_words; limit
    is eager.threshold(p). A thread holds eight neighbours, so no data moves between threads."""
    word0, word1, word2, word3 = draw_words(group, row, head, sample, key_low, key_high)
    # [m, n, 2, 2]: pair, word of the pair
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    limit = limit.to(tl.uint32)
    # The low half is shifted, not masked: shifts run on another pipe than comparisons, "and" runs on the same.
    dropped = tl.join((words << 16) < (limit << 16), words < (limit << 16))
    return tl.reshape(dropped, (word0.shape[0], word0.shape[1] * LANES))

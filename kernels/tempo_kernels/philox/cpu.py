"""Draws dropout masks on a CPU, compiled or in plain torch; eager.py is the specification.

Without a compiler the cost is passes over memory. Work goes by chunks of rows, whose words stay in the cache, in
buffers allocated once per call. What depends on the row or on the column alone is computed once for all chunks. A word
loses the bits above its 32 only before it is multiplied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tempo_kernels.compiled import Library
from tempo_kernels.philox.eager import LANES, MULTIPLIERS, ROUNDS, WEYL, WORD

CHUNK_PER_THREAD = 1 << 15
"""Calls of Philox in a chunk. torch divides no fewer elements among threads."""

_SIGNS = -0x7FFF7FFF7FFF8000
"""The highest bit of each 16-bit lane. With it changed, unsigned lanes are in order as signed ones, which torch has."""


def draw_bits(group: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: int, k1: int, limit: int) -> Tensor:
    """As in eager.py."""
    num_rows, num_groups, device = c1.numel(), group.numel(), group.device
    step = max(1, min(num_rows, CHUNK_PER_THREAD * torch.get_num_threads() // max(1, num_groups)))
    bits = torch.empty(num_rows, num_groups, LANES, dtype=torch.int32, device=device)
    memory = torch.empty(6 * step * num_groups, dtype=torch.int64, device=device)
    keys = [((k0 + number * WEYL[0]) & WORD, (k1 + number * WEYL[1]) & WORD) for number in range(ROUNDS)]
    keys[-1] = (keys[-1][0] ^ _SIGNS, keys[-1][1] ^ _SIGNS)
    multipliers, *later_keys, word, shift = (
        torch.tensor(numbers, dtype=torch.int64, device=device)
        for numbers in (*map(_stack, (MULTIPLIERS, *keys[2:])), WORD, 32)
    )
    # Round 1 leaves first, second, third_of_column ^ third_of_row, and fourth.
    of_column, of_row = group * MULTIPLIERS[0], c2.unsqueeze(-1) * MULTIPLIERS[1]
    first, second = (of_row >> 32 ^ c1.unsqueeze(-1) ^ keys[0][0]) & WORD, of_row & WORD
    third_of_column, third_of_row, fourth = of_column >> 32 & WORD, c3.unsqueeze(-1) ^ keys[0][1], of_column & WORD
    # Round 2, except for what needs the third word.
    of_row = first * MULTIPLIERS[0]
    second, third_of_next_row, fourth = second ^ keys[1][0], of_row >> 32 & WORD, fourth ^ keys[1][1]
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        shape = (rows.stop - start, num_groups)
        words, *products = memory[: 6 * shape[0] * num_groups].view(3, 2, *shape)
        first, third = words
        torch.bitwise_xor(third_of_column, third_of_row[rows], out=third)
        later_second = torch.mul(third, multipliers[1], out=products[1][1])
        torch.bitwise_right_shift(later_second, shift, out=first).bitwise_xor_(second[rows]).bitwise_and_(word)
        torch.bitwise_xor(fourth, third_of_next_row[rows], out=third)
        later_fourth = of_row[rows]
        for number, key in enumerate(later_keys):
            of_first, of_third = torch.mul(words, multipliers, out=products[number % 2])
            torch.bitwise_right_shift(of_third, shift, out=first).bitwise_xor_(later_second)
            torch.bitwise_right_shift(of_first, shift, out=third).bitwise_xor_(later_fourth)
            words.bitwise_and_(word).bitwise_xor_(key)
            later_second, later_fourth = of_third, of_first
        lanes = products[1].view(*shape, 2)
        torch.bitwise_xor(first, later_second.bitwise_left_shift_(shift), out=lanes[..., 0])
        torch.bitwise_xor(third, later_fourth.bitwise_left_shift_(shift), out=lanes[..., 1])
        # The comparison is written in the operands' dtype: for any other, torch goes through a buffer and is slower.
        kept = words.view(torch.int16).view(*shape, LANES)
        torch.ge(lanes.view(torch.int16), limit - (1 << 15), out=kept)
        bits[rows] = kept.neg_()
    return bits.view(torch.int64)


def _stack(pair: tuple[int, int]) -> list[list[list[int]]]:
    """Arranges two numbers as [2, 1, 1]."""
    return [[[number]] for number in pair]


def draw_bits_compiled(
    group: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: int, k1: int, limit: int
) -> Tensor | None:
    """As in eager.py, in a quarter of the time, or None if nothing can be compiled."""
    bits = torch.empty(c1.numel(), group.numel(), LANES // 2, dtype=torch.int64, device=group.device)
    operands = (group, c1, c2, c3, group.numel(), c1.numel(), k0, k1, limit, bits)
    return bits if _LIBRARY.run("draw_bits", *operands) else None


# The compiler turns the loops over a tile into vector instructions: four or eight calls of Philox at a time.
_LIBRARY = Library(
    f"""
#include <algorithm>
#include <cstdint>
#include <cstring>

extern "C" void draw_bits(
    int64_t num_threads, const int64_t* group, const int64_t* c1, const int64_t* c2, const int64_t* c3,
    int64_t num_groups, int64_t num_rows, int64_t k0, int64_t k1, int64_t limit, int32_t* bits) {{
  constexpr int TILE = 64;
  const uint16_t bound = limit;
  #pragma omp parallel for num_threads(num_threads) if (num_rows * num_groups >= {CHUNK_PER_THREAD})
  for (int64_t row = 0; row < num_rows; ++row) {{
    for (int64_t start = 0; start < num_groups; start += TILE) {{
      const int count = std::min<int64_t>(TILE, num_groups - start), padded = (count + 7) / 8 * 8;
      uint32_t column[TILE] = {{}}, words[TILE][4];
      for (int i = 0; i < count; ++i) column[i] = group[start + i];
      #pragma omp simd
      for (int i = 0; i < padded; ++i) {{
        uint32_t w0 = column[i], w1 = c1[row], w2 = c2[row], w3 = c3[row], key0 = k0, key1 = k1;
        #pragma GCC unroll {ROUNDS}
        for (int round = 0; round < {ROUNDS}; ++round) {{
          const uint64_t p0 = uint64_t(w0) * {MULTIPLIERS[0]}u, p1 = uint64_t(w2) * {MULTIPLIERS[1]}u;
          w0 = uint32_t(p1 >> 32) ^ w1 ^ key0, w1 = p1;
          w2 = uint32_t(p0 >> 32) ^ w3 ^ key1, w3 = p0;
          key0 += {WEYL[0]}u, key1 += {WEYL[1]}u;
        }}
        words[i][0] = w0, words[i][1] = w1, words[i][2] = w2, words[i][3] = w3;
      }}
      uint16_t lanes[TILE * {LANES}];
      std::memcpy(lanes, words, sizeof(lanes));
      int32_t* out = bits + (row * num_groups + start) * {LANES};
      for (int i = 0; i < count * {LANES}; ++i) out[i] = lanes[i] < bound ? 0 : -1;
    }}
  }}
}}
"""
)

"""Draws dropout masks on a CPU: large ones in C++, in a tenth of the time, others in torch; eager.py is the
specification. Both have the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from tempo_kernels.compiled import run_cpp
from tempo_kernels.philox.eager import LANES, MULTIPLIERS, ROUNDS, WEYL, WORD

LARGE_DRAW = 1 << 14
"""Calls of Philox from which a draw is worth the compiler: the first such draw waits for it."""
CHUNK_PER_THREAD = 1 << 15
"""Calls of Philox whose words stay in the cache. torch divides no fewer elements among threads."""


def draw_bits(
    group: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: int, k1: int, limit: int, *,
    compiled_from: int = LARGE_DRAW, chunk_per_thread: int = CHUNK_PER_THREAD,
) -> Tensor:  # fmt: skip
    """As in eager.py."""
    num_rows, num_groups = c1.numel(), group.numel()
    bits = torch.empty(num_rows, num_groups, LANES, dtype=torch.int32, device=group.device)
    operands = (group, c1, c2, c3, num_groups, num_rows, k0, k1, limit, bits)
    if num_groups and (num_rows * num_groups < compiled_from or not run_cpp(_SOURCE, "draw_bits", *operands)):
        step = max(1, chunk_per_thread * torch.get_num_threads() // num_groups)
        for start in range(0, num_rows, step):
            rows = slice(start, start + step)
            _draw_chunk(group, c1[rows], c2[rows], c3[rows], k0, k1, limit, bits[rows])
    return bits.view(torch.int64)


def _draw_chunk(group: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: int, k1: int, limit: int, bits: Tensor) -> None:
    """Writes bits [n, groups, 8]. Both products of a round are one operation, and a word loses the bits above its 32
    only before it is multiplied."""
    multipliers, *keys = (
        torch.tensor(pair, dtype=torch.int64, device=group.device).view(2, 1, 1)
        for pair in (MULTIPLIERS[::-1], *((k0 + n * WEYL[0], k1 + n * WEYL[1]) for n in range(ROUNDS)))
    )
    words = torch.stack(torch.broadcast_tensors(group, c2.unsqueeze(-1)))  # the first and the third word
    others = torch.stack((c1, c3)).unsqueeze(-1)  # the second and the fourth
    for key in keys:
        products = words.flip(0).mul_(multipliers)
        words = (products >> 32).bitwise_xor_(others).bitwise_xor_(key).bitwise_and_(WORD)
        others = products
    lanes = (words | others << 32).permute(1, 2, 0).contiguous().view(torch.int16)
    # With its highest bit changed, an unsigned lane has its place in the order of signed ones, which torch has.
    bits.copy_(lanes.bitwise_xor_(-(1 << 15)) >= limit - (1 << 15)).neg_()


# The compiler turns the loops over a tile into vector instructions: four or eight calls of Philox at a time.
_SOURCE = f"""
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

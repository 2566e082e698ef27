"""Draws dropout masks on a CPU without a compiler, where the cost is passes over memory; eager.py is the specification.

Work goes by chunks of rows, whose words stay in the cache, in buffers allocated once per call. What depends on the row
or on the column alone is computed once for all chunks. A word loses the bits above its 32 only before it is multiplied.
"""

from __future__ import annotations

import torch
from torch import Tensor

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

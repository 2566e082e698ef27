"""Philox4x32 in plain torch, and the dropout mask that is read from it: the specification.

Layout of the counter, 4 x 32 bits: [column // 8, row, head + 2**16 * (sample >> 32), sample & 0xffffffff].
One call gives 4 words = 8 lanes of 16 bits; lane `column % 8`, low half of a word first, belongs to the column.
An element is dropped where its 16 bits are below round(p * 2**16).
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
"""The fewest rounds of Philox4x32 that pass BigCrush (Salmon et al., table 2)."""

LANES = 8

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: tuple, key: int, rounds: int = ROUNDS) -> tuple:
    """Four random 32-bit words.

    Args:
        counter: four ints or int64 tensors in [0, 2**32) that broadcast against each other.
        key: 64 bits.
        rounds: 7 by default; 10 is Random123's own default.

    Returns:
        Four ints or int64 tensors in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _WORD, key >> 32
    for _ in range(rounds):
        # The product wraps around in int64, but its bits are those of the unsigned one, and the masks drop the sign.
        # Tensors that do not depend on every coordinate stay small for the first rounds by broadcasting.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((p1 >> 32) ^ (c1 ^ k0)) & _WORD, p1 & _WORD
        c2, c3 = ((p0 >> 32) ^ (c3 ^ k1)) & _WORD, p0 & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def derive_key(seed: int, *path: int) -> int:
    """A 64-bit key for the place `path` (up to three numbers below 2**32) under a 64-bit seed."""
    if len(path) > 3 or any(not 0 <= step <= _WORD for step in path):
        raise ValueError(f"path is {path}; at most three numbers in [0, 2**32) are wanted")
    # The last word is one that no element's counter of a real run reaches, should seed and key ever coincide.
    words = philox4x32((*path, *[0] * (3 - len(path)), _WORD), seed % 2**64, rounds=10)
    return words[0] | words[1] << 32


def threshold(p: float) -> int:
    """The 16-bit number below which an element is dropped. Raises ValueError unless 0 <= p < 1."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout probability is {p}; it must be in [0, 1)")
    return min(round(p * 65536), 65535)


def effective_probability(p: float) -> float:
    """The probability that 16 bits realise: abs(effective - p) <= 2**-16. Survivors are scaled by 1 / (1 - this)."""
    return threshold(p) / 65536


def drop_mask(key: int, p: float, *, sample: Tensor, head: Tensor, row: Tensor, num_columns: int) -> Tensor:
    """True where dropout drops.

    Args:
        key: 64 bits, one per seed, layer and site.
        p: in [0, 1).
        sample, head, row: int64 tensors of global indices, in [0, 2**48), [0, 2**16) and [0, 2**32),
            that broadcast against each other to a shape [...].
        num_columns: columns 0 ... num_columns - 1 are drawn.

    Returns:
        bool [..., num_columns].
    """
    columns = torch.arange(-(-num_columns // LANES), device=row.device)
    words = philox4x32(
        (
            columns,
            row.unsqueeze(-1),
            (head + ((sample >> 32) << 16)).unsqueeze(-1),
            (sample & _WORD).unsqueeze(-1),
        ),
        key,
    )
    limit = threshold(p)
    shape = torch.broadcast_shapes(*(word.shape for word in words))
    mask = torch.empty(*shape, LANES, dtype=torch.bool, device=row.device)
    for index, word in enumerate(words):
        torch.lt(word & 0xFFFF, limit, out=mask[..., 2 * index])
        torch.lt(word, limit << 16, out=mask[..., 2 * index + 1])
    return mask.flatten(-2)[..., :num_columns]

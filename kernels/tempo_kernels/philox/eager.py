"""Specifies Philox4x32, and the dropout mask that is read from it, in plain torch.

Layout of the counter, 4 x 32 bits: [column // 8, row, head + 2**16 * (sample >> 32), sample & 0xffffffff].
One call gives 4 words = 8 lanes of 16 bits; lane `column % 8`, low half of a word first, belongs to the column.
An element is dropped if its 16 bits are below round(p * 2**16).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROUNDS = 7
"""The fewest rounds of Philox4x32 that pass BigCrush (Salmon et al., table 2)."""

LANES = 8

Words = tuple[Any, Any, Any, Any]
"""Four 32-bit words: ints or int64 tensors."""

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: Words, key: int, rounds: int = ROUNDS) -> Words:
    """Computes four random 32-bit words.

    Args:
        counter: four ints or int64 tensors in [0, 2**32) that broadcast against each other.
        key: 64 bits.
        rounds: 7 by default; 10 is Random123's own default.

    Returns:
        Four ints or int64 tensors in [0, 2**32).
    """
    return _compute_rounds(counter, key & WORD, key >> 32, rounds)


def _compute_rounds(counter: Words, k0: Any, k1: Any, rounds: int) -> Words:
    c0, c1, c2, c3 = counter
    for _ in range(rounds):
        # The int64 product wraps around, but it has the bits of the unsigned product, and the masks drop the sign.
        # Broadcasting keeps tensors that do not depend on every coordinate small during the first rounds.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = ((p1 >> 32) ^ (c1 ^ k0)) & WORD, p1 & WORD
        c2, c3 = ((p0 >> 32) ^ (c3 ^ k1)) & WORD, p0 & WORD
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def derive_key(seed: int, *path: int) -> int:
    """Derives the 64-bit key of the place `path` from a 64-bit seed.

    Args:
        seed: any integer; its low 64 bits count.
        path: up to three numbers in [0, 2**32). Paths that differ in a number or in their length have different keys.

    Raises ValueError for another path.
    """
    if len(path) > 3 or any(not 0 <= step <= WORD for step in path):
        raise ValueError(f"path is {path}; expected at most three numbers in [0, 2**32)")
    c0, c1, c2 = (*path, *[0] * (3 - len(path)))
    # The last word tells paths of different lengths apart. No element's counter reaches it in a real run, in case seed
    # and key ever coincide. It is 2**32 - 1 for two numbers, which must stay so that released masks stay the same.
    last = WORD - (len(path) - 2) % 4
    low, high, *_ = philox4x32((c0, c1, c2, last), seed % 2**64, rounds=10)
    key: int = low | high << 32
    return key


def threshold(p: float) -> int:
    """Returns the 16-bit number below which an element is dropped. Raises ValueError unless 0 <= p < 1."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout probability is {p}; it must be in [0, 1)")
    return min(round(p * 65536), 65535)


def effective_probability(p: float) -> float:
    """Rounds p to the probability that 16 bits realise, within 2**-16. Survivors are scaled by 1 / (1 - this)."""
    return threshold(p) / 65536


def check_place(
    *, key: int | Tensor = 0, first_sample: int = 0, num_samples: int = 1, first_head: int = 0, num_heads: int = 1,
    first_row: int = 0, num_rows: int = 1, first_column: int = 0, num_columns: int = 1,
) -> None:  # fmt: skip
    """Raises ValueError if an index exceeds its bits of the counter, or the key exceeds 64 bits.

    An index that is too large would share the mask of another place: head 2**16 of sample 0 is head 0 of sample 2**32.
    """
    for name, first, count, limit in (
        ("sample", first_sample, num_samples, 1 << 48),
        ("head", first_head, num_heads, 1 << 16),
        ("row", first_row, num_rows, 1 << 32),
        ("column", first_column, num_columns, LANES << 32),
    ):
        if first < 0 or first + count > limit:
            raise ValueError(
                f"a dropout mask is asked for {name} {first} to {first + count - 1}; expected 0 to {limit - 1}, "
                "as beyond lie the masks of other places; give global indices in that range"
            )
    # A compiled graph serves any key, and its numbers cannot have more bits.
    if isinstance(key, int) and not torch.compiler.is_compiling() and not -(1 << 63) <= key < 1 << 64:
        raise ValueError(
            f"the key of a dropout mask is {key}; expected 64 bits, signed or not, as derive_key gives; longer keys "
            "would share their masks"
        )


def check_drawn_from(device: torch.device, **numbers: int | Tensor) -> None:
    """Raises ValueError if one of the numbers by which a mask is drawn is device data that does not fit."""
    for name, number in numbers.items():
        if isinstance(number, Tensor) and (number.dtype, number.dim(), number.device) != (torch.int64, 0, device):
            raise ValueError(
                f"{name} is {number.dtype} of shape {list(number.shape)} on {number.device}; expected an int, or a "
                f"0-dim torch.int64 tensor on {device}, as the operation's input; move it there"
            )


def drop_(x: Tensor, bits: Tensor) -> Tensor:
    """Overwrites the dropped elements of x (float32 or float64), NaN and infinities too, with 0; returns x.

    It does what masked_fill_ does with a bool mask, by a bitwise "and": on a CPU in a fortieth of the time.
    """
    integers = torch.int64 if x.dtype == torch.float64 else torch.int32
    x.view(integers).bitwise_and_(bits.to(integers))
    return x


def draw_bits(group: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Any, k1: Any, limit: Tensor | int) -> Tensor:
    """Returns int64 [n, groups, 4] for the rows at c1, c2, c3 [n]: 32 bits for each of two columns, low half first.

    All arithmetic is 64 bits wide, and the words are joined only at the end: then Inductor vectorises all of it, which
    halves the time.
    """
    counter = (group, c1.unsqueeze(-1), c2.unsqueeze(-1), c3.unsqueeze(-1))
    words = torch.stack(_compute_rounds(counter, k0, k1, ROUNDS))
    first, second = ((words & 0xFFFF) - limit) >> 63, ((words >> 16) - limit) >> 63
    kept = ~((first & WORD) | (second << 32))
    return kept.permute(1, 2, 0).contiguous()

"""Specifies Philox4x32, and the dropout mask that is read from it, in plain torch.

Layout of the counter, 4 x 32 bits: [column // 8, row, head + 2**16 * (sample >> 32), sample & 0xffffffff].
One call gives 4 words = 8 lanes of 16 bits; lane `column % 8`, low half of a word first, belongs to the column.
An element is dropped if its 16 bits are below round(p * 2**16).

On a CPU, compiled words take a fortieth of the time, which makes dropout faster than torch's own instead of slower.
They have the same bits, so switching to them after DRAWS_BEFORE_COMPILING calls changes no result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tempo_kernels.compiled import Compiled
from tempo_kernels.fakes import run_or_simulate

ROUNDS = 7
"""The fewest rounds of Philox4x32 that pass BigCrush (Salmon et al., table 2)."""

LANES = 8

SAMPLES, HEADS, ROWS, COLUMNS = 1 << 48, 1 << 16, 1 << 32, LANES << 32
"""How many of each index the counter tells apart."""

DRAWS_BEFORE_COMPILING = 1 << 26
"""Calls of Philox that, not compiled, take about as much longer as the compiler takes."""

Words = tuple[Any, Any, Any, Any]
"""Four 32-bit words: ints or int64 tensors."""

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: Words, key: int, rounds: int = ROUNDS) -> Words:
    """Computes four random 32-bit words.

    Args:
        counter: four ints or int64 tensors in [0, 2**32) that broadcast against each other.
        key: 64 bits.
        rounds: 7 by default; 10 is Random123's own default.

    Returns:
        Four ints or int64 tensors in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    return _rounds(c0, c1, c2, c3, key & _WORD, key >> 32, rounds)


def _rounds(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any, rounds: int) -> Words:
    for _ in range(rounds):
        # The int64 product wraps around, but it has the bits of the unsigned product, and the masks drop the sign.
        # Broadcasting keeps tensors that do not depend on every coordinate small during the first rounds.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((p1 >> 32) ^ (c1 ^ k0)) & _WORD, p1 & _WORD
        c2, c3 = ((p0 >> 32) ^ (c3 ^ k1)) & _WORD, p0 & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def derive_key(seed: int, *path: int) -> int:
    """Derives the 64-bit key of the place `path` from a 64-bit seed.

    Args:
        seed: any integer; its low 64 bits count.
        path: up to three numbers in [0, 2**32). Paths that differ in a number or in their length have different keys.

    Raises ValueError for another path.
    """
    if len(path) > 3 or any(not 0 <= step <= _WORD for step in path):
        raise ValueError(f"path is {path}; expected at most three numbers in [0, 2**32)")
    c0, c1, c2 = (*path, *[0] * (3 - len(path)))
    # The last word tells paths of different lengths apart. No element's counter reaches it in a real run, in case seed
    # and key ever coincide. It is 2**32 - 1 for two numbers, which must stay so that released masks stay the same.
    last = _WORD - (len(path) - 2) % 4
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
    *,
    key: int | Tensor = 0,
    first_sample: int = 0,
    num_samples: int = 1,
    first_head: int = 0,
    num_heads: int = 1,
    first_row: int = 0,
    num_rows: int = 1,
    first_column: int = 0,
    num_columns: int = 1,
) -> None:
    """Raises ValueError if an index exceeds its bits of the counter, or the key exceeds 64 bits.

    An index that is too large would share the mask of another place: head 2**16 of sample 0 is head 0 of sample 2**32.
    """
    for name, first, count, limit in (
        ("sample", first_sample, num_samples, SAMPLES),
        ("head", first_head, num_heads, HEADS),
        ("row", first_row, num_rows, ROWS),
        ("column", first_column, num_columns, COLUMNS),
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


def drop_mask(
    key: int, p: float, *, sample: Tensor, head: Tensor, row: Tensor, num_columns: int, first_column: int = 0
) -> Tensor:
    """Returns True where dropout drops.

    Args:
        key: 64 bits, one per seed, layer and site.
        p: in [0, 1).
        sample, head, row: int64 tensors of global indices, in [0, 2**48), [0, 2**16) and [0, 2**32),
            that broadcast against each other to a shape [...].
        num_columns, first_column: columns first_column ... first_column + num_columns - 1 are drawn.

    Returns:
        bool [..., num_columns].

    Raises ValueError for a probability or, on a CPU, an index outside of its range. Indices on a GPU are not checked,
    because that would wait for it.
    """
    places = {"sample": sample, "head": head, "row": row}
    return keep_bits(key, p, **places, num_columns=num_columns, first_column=first_column) == 0


def keep_bits(
    key: int, p: float, *, sample: Tensor, head: Tensor, row: Tensor, num_columns: int, first_column: int = 0
) -> Tensor:
    """Returns int32 [..., num_columns] for `drop_`: 0 where dropout drops, all bits set elsewhere; see `drop_mask`."""
    global _drawn
    k0, k1, limit = key & _WORD, key >> 32, threshold(p)
    _check_indices(sample, head, row)
    c1, c2, c3 = torch.broadcast_tensors(row, head + ((sample >> 32) << 16), sample & _WORD)
    shape = c1.shape
    first_group, skipped = divmod(first_column, LANES)
    end = -(-(first_column + num_columns) // LANES)
    group = torch.arange(first_group, end, dtype=torch.int64, device=row.device)
    c1, c2, c3 = (c.reshape(-1).contiguous() for c in (c1, c2, c3))
    _drawn += group.numel() * c1.numel()
    # Sizes of 1 would be compiled in, each combination anew, and torch 2.13's Inductor gets one of these wrong.
    if _drawn < DRAWS_BEFORE_COMPILING or min(group.numel(), c1.numel()) < 2:
        bits = run_or_simulate(_keep_bits, group, c1, c2, c3, k0=k0, k1=k1, limit=limit)
    else:
        numbers = (torch.tensor(number, dtype=torch.int64, device=row.device) for number in (k0, k1, limit))
        bits = _compiled_keep_bits(group, c1, c2, c3, *numbers)
    # View each int64 as two int32: torch runs on little-endian machines only, so the lower half comes first.
    return bits.view(*shape, group.numel() * LANES // 2).view(torch.int32)[..., skipped : skipped + num_columns]


def foresee(num_repeats: int) -> None:
    """Announces that all draws so far will be repeated `num_repeats` times, as after the first step of a run. If
    compiling pays for itself by the end of the run, it begins now. No mask changes."""
    global _drawn
    _drawn += num_repeats * _drawn


def _check_indices(sample: Tensor, head: Tensor, row: Tensor) -> None:
    # Check only numbers that are available: reading a GPU's would wait for it, and a tracer's have no values.
    is_known = row.device.type == "cpu" and type(row) is Tensor and not torch.compiler.is_compiling()
    if not is_known or 0 in (sample.numel(), head.numel(), row.numel()):
        return
    ends = [(int(low), int(high)) for low, high in (index.aminmax() for index in (sample, head, row))]
    (first_sample, last_sample), (first_head, last_head), (first_row, last_row) = ends
    check_place(
        first_sample=first_sample,
        num_samples=last_sample - first_sample + 1,
        first_head=first_head,
        num_heads=last_head - first_head + 1,
        first_row=first_row,
        num_rows=last_row - first_row + 1,
    )


def drop_(x: Tensor, bits: Tensor) -> Tensor:
    """Overwrites the dropped elements of x (float32 or float64), NaN and infinities too, with 0; returns x.

    It does what masked_fill_ does with a bool mask, by a bitwise "and": on a CPU in a fortieth of the time.
    """
    integers = torch.int64 if x.dtype == torch.float64 else torch.int32
    x.view(integers).bitwise_and_(bits.to(integers))
    return x


def _keep_bits(group: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Any, k1: Any, limit: Tensor | int) -> Tensor:
    """Returns int64 [n, groups, 4] for the rows at c1, c2, c3 [n]: 32 bits for each of two columns, low half first.

    All arithmetic is 64 bits wide, and the words are joined only at the end: then Inductor vectorises all of it, which
    halves the time.
    """
    words = torch.stack(_rounds(group, c1.unsqueeze(-1), c2.unsqueeze(-1), c3.unsqueeze(-1), k0, k1, ROUNDS))
    first, second = ((words & 0xFFFF) - limit) >> 63, ((words >> 16) - limit) >> 63
    kept = ~((first & _WORD) | (second << 32))
    return kept.permute(1, 2, 0).contiguous()


_compiled_keep_bits = Compiled(_keep_bits)
_drawn = 0

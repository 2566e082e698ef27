"""Every mask that is drawn on a CPU, caught in the real model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tempo_kernels.philox import keep_bits

Draws = dict[tuple[int, ...], list[tuple[int, bytes]]]


@contextlib.contextmanager
def recorded_draws() -> Iterator[Draws]:
    """{(key, sample, head, row): [(first column, whether each column is dropped) of each draw]}."""
    drawn: Draws = {}

    def record(key: int, p: float, *, first_column: int = 0, **where: Any) -> torch.Tensor:
        bits = keep_bits(key, p, first_column=first_column, **where)
        indices = (where[name].broadcast_to(bits.shape[:-1]).flatten().tolist() for name in ("sample", "head", "row"))
        for index, columns in zip(zip(*indices, strict=True), (bits == 0).flatten(0, -2).tolist(), strict=True):
            drawn.setdefault((key, *index), []).append((first_column, bytes(columns)))
        return bits

    with (
        mock.patch("tempo_kernels.dropout_add.cpu.keep_bits", record),
        mock.patch("tempo_kernels.attention.cpu.keep_bits", record),
    ):
        yield drawn


def join_draws(*of_ranks: Draws) -> dict[tuple[int, ...], bytes]:
    """Place -> dropped columns: every draw of one place, in whatever rank or pass, has to agree."""
    together: Draws = {}
    for drawn in of_ranks:
        for place, draws in drawn.items():
            together.setdefault(place, []).extend(draws)
    masks = {}
    for place, draws in together.items():
        # A causal block draws the columns up to its last row only, and under context parallelism some of them.
        mask = bytearray()
        for first, columns in sorted(draws):
            assert first <= len(mask), f"columns of {place} are missing"
            seen = mask[first : first + len(columns)]
            assert columns.startswith(seen), f"two draws of {place} differ"
            mask += columns[len(seen) :]
        masks[place] = bytes(mask)
    return masks

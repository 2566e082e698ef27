"""Every mask that is drawn on a CPU, caught in the real model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from dropout_masks import Place, watched_rows

Draws = dict[tuple[int, ...], list[tuple[int, bytes]]]


@contextlib.contextmanager
def recorded_draws() -> Iterator[Draws]:
    """{(key, sample, head, row): [(first column, whether each column is dropped) of each draw]}."""
    drawn: Draws = {}

    def note(place: Place, columns: np.ndarray[Any, np.dtype[np.uint8]], first_column: int) -> None:
        drawn.setdefault(place[1:], []).append((first_column, columns.tobytes()))

    with watched_rows(note):
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

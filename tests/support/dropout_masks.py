"""The masks of a run, recorded element by element as attention and bias-dropout-add draw them, and their comparison."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

from tempo_kernels.philox import keep_bits

UNDRAWN = 2
Place = tuple[str, int, int, int, int]
Masks = dict[Place, "np.ndarray[Any, np.dtype[np.uint8]]"]
"""(operation, key, sample, head, row) -> of each column 1 where it is dropped, 0 where it is kept, or UNDRAWN."""


@contextlib.contextmanager
def recorded_masks() -> Iterator[Masks]:
    """Every row of every mask that attention and bias-dropout-add draw meanwhile on a CPU; two draws of an element
    must agree."""
    masks: Masks = {}
    with watched_rows(functools.partial(add_row, masks)):
        yield masks


@contextlib.contextmanager
def recorded_draws() -> Iterator[dict[tuple[int, ...], list[tuple[int, bytes]]]]:
    """{(key, sample, head, row): [(first column, whether each column is dropped) of each draw]}."""
    drawn: dict[tuple[int, ...], list[tuple[int, bytes]]] = {}
    with watched_rows(lambda place, row, first: drawn.setdefault(place[1:], []).append((first, row.tobytes()))):
        yield drawn


@contextlib.contextmanager
def watched_rows(note: Callable[[Place, np.ndarray[Any, np.dtype[np.uint8]], int], object]) -> Iterator[None]:
    """note(place, which columns are dropped, first column) of every row that is drawn meanwhile on a CPU."""

    def record(operation: str, key: int, p: float, **where: Any) -> torch.Tensor:
        bits = keep_bits(key, p, **where)
        indices = [where[name].broadcast_to(bits.shape[:-1]).flatten().tolist() for name in ("sample", "head", "row")]
        rows = (bits == 0).flatten(0, -2).to(torch.uint8).numpy()
        for sample, head, number, row in zip(*indices, rows, strict=True):
            note((operation, key, sample, head, number), row, where.get("first_column", 0))
        return bits

    with contextlib.ExitStack() as patches:
        for operation in ("attention", "dropout_add"):
            recorder = functools.partial(record, operation)
            patches.enter_context(mock.patch(f"tempo_kernels.{operation}.eager.keep_bits", recorder))
        yield


def add_row(masks: Masks, place: Place, row: np.ndarray[Any, np.dtype[np.uint8]], first_column: int = 0) -> None:
    """Put what was drawn of a row from `first_column` on beside what is known of it, which it must not contradict."""
    known = masks.get(place, row[:0])
    end = first_column + len(row)
    if len(known) < end:
        known = np.pad(known, (0, end - len(known)), constant_values=UNDRAWN)
    here = known[first_column:end]
    both = (here != UNDRAWN) & (row != UNDRAWN)
    assert (here[both] == row[both]).all(), f"two draws of {place} differ"
    masks[place] = np.concatenate((known[:first_column], np.where(row == UNDRAWN, here, row), known[end:]))


def compare_masks(masks: Masks, expected: Masks, *, is_causal: bool) -> tuple[int, np.ndarray[Any, np.dtype[np.uint8]]]:
    """(how many elements differ where both have one, whether `masks` has each element of `expected` that is needed).

    is_causal: whether of attention's row i the first i + 1 columns alone are needed; what a block draws beyond them
        depends on its size.
    """
    num_wrong = sum(len(row) for place, row in masks.items() if place not in expected)
    drawn = [np.zeros(0, bool)]
    for place, row in expected.items():
        found = masks.get(place, row[:0])[: len(row)]
        found = np.pad(found, (0, len(row) - len(found)), constant_values=UNDRAWN)
        is_there = found != UNDRAWN
        num_wrong += int((is_there & (row != UNDRAWN) & (found != row)).sum())
        is_there |= row == UNDRAWN
        drawn.append(is_there[: place[-1] + 1] if is_causal and place[0] == "attention" else is_there)
    return num_wrong, np.concatenate(drawn).astype(np.uint8)

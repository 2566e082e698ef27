"""Tries micro batch sizes: a plan for each that fits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from tempo_megatron.memory.plan.planner import MemoryPlan, NoteEstimate, NothingFitsError, Planner, PlanRequest


def list_micro_batches(samples_per_rank: int | None) -> Iterator[int]:
    """Ascending sizes: the divisors of a rank's samples per step if they are known, else 1, 2, 3, 4, 6, 8, 12, ..."""
    if samples_per_rank is not None:
        yield from (size for size in range(1, samples_per_rank + 1) if samples_per_rank % size == 0)
        return
    yield 1
    for power in itertools.count(1):
        yield 2**power
        yield 3 * 2 ** (power - 1)


def try_micro_batches(
    request: PlanRequest, budget: int, samples_per_rank: int | None, note_estimate: NoteEstimate
) -> list[tuple[Planner, MemoryPlan]]:
    """One plan for each micro batch size that fits, smallest first. Stop at the first size that does not fit: larger
    ones need more.

    Args:
        request: its micro batch size is replaced, and, where `samples_per_rank` is given, their number.
        budget: bytes of one GPU.
        samples_per_rank: samples of a step.
        note_estimate: called after each estimate of a step.

    Raises the NothingFitsError of the smallest size where not even that fits.
    """
    found: list[tuple[Planner, MemoryPlan]] = []
    for size in list_micro_batches(samples_per_rank):
        number = request.run.num_micro_batches if samples_per_rank is None else samples_per_rank // size
        run = dataclasses.replace(request.run, micro_batch_size=size, num_micro_batches=number)
        planner = Planner(dataclasses.replace(request, run=run), note_estimate)
        try:
            found.append((planner, planner.plan(budget)))
        except NothingFitsError:
            if not found:
                raise
            break
    return found

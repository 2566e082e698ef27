"""Finds the micro batch size with the least time per sample among those that fit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from tempo_megatron.memory.plan.planner import Plan, PlanRequest
from tempo_megatron.memory.plan.request import Question
from tempo_megatron.memory.plan.verify import answer


@dataclasses.dataclass(frozen=True)
class Trial:
    """The best plan of one micro batch."""

    micro_batch_size: int
    plan: Plan
    request: PlanRequest

    @property
    def seconds_per_sample(self) -> float:
        """Of a step on one data-parallel rank, with the time in which its pipeline fills and drains."""
        stages = self.request.pipeline_parallel
        num_micro_batches = self.request.num_microbatches or stages
        return self.plan.seconds * (num_micro_batches + stages - 1) / (num_micro_batches * self.micro_batch_size)


def list_micro_batches(samples_per_rank: int | None) -> Iterator[int]:
    """Sizes in ascending order: the divisors of a rank's samples of a step, else 1, 2, 3, 4, 6, 8, 12, and so on."""
    if samples_per_rank is not None:
        yield from (size for size in range(1, samples_per_rank + 1) if samples_per_rank % size == 0)
        return
    yield 1
    for power in itertools.count(1):
        yield 2**power
        yield 3 * 2 ** (power - 1)


def try_micro_batches(question: Question, budget: int, samples_per_rank: int | None = None) -> list[Trial]:
    """One plan for each micro batch size that fits, smallest first. Stop at the first size that does not fit: larger
    ones need more.

    Args:
        question: its micro batch, and where `samples_per_rank` is given the number of them, are replaced.
        budget: bytes of one GPU.
        samples_per_rank: of a step.

    Raises ValueError where none fits: that of the smallest.
    """
    found: list[Trial] = []
    for size in list_micro_batches(samples_per_rank):
        number = question.run.num_micro_batches if samples_per_rank is None else samples_per_rank // size
        run = dataclasses.replace(question.run, micro_batch_size=size, num_micro_batches=number)
        try:
            found.append(Trial(size, *answer(dataclasses.replace(question, run=run), budget)))
        except ValueError:
            if not found:
                raise
            break
    return found


def choose_trial(trials: Iterable[Trial]) -> Trial:
    """The one of least time a sample; of equals the smaller micro batch."""
    return min(trials, key=lambda trial: trial.seconds_per_sample)

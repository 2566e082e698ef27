"""Searches plans with measured rows, but accepts one only if the estimate says that it fits; finds the micro batch size
with the least time per sample among those for which one fits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from tempo_megatron.memory.plan.planner import (
    Plan,
    PlanRequest,
    find_plan,
    list_modes,
    make_plan,
    plan_alike,
    raise_impossible,
)
from tempo_megatron.memory.plan.request import Question, make_plan_request

_ROUNDS = 6


def make_verified_plan(
    request: PlanRequest, budget: int, estimate_plan: Callable[[Plan], Sequence[int]]
) -> tuple[Plan, PlanRequest]:
    """The plan of the shortest step of which the estimate says that each GPU holds at most `budget` bytes.

    Add the difference between estimate and plan to each stage's fixed bytes and plan again, until the plan stops
    changing. Of the plans that fit, take the one with the shortest step.

    Args:
        request: what is asked.
        budget: bytes of one GPU.
        estimate_plan: the peaks of a plan's stages.

    Returns:
        The plan, whose peaks are estimated ones, and the request with the corrections that lead to it.

    Raises ValueError as `make_plan`; the nearest plan and by how much it misses are the estimate's too.
    """
    seen: dict[str, tuple[Plan, PlanRequest]] = {}

    def verify(plan: Plan) -> bool:
        """Note the plan with its estimated peaks, and what corrects the request; whether the plan is a new one."""
        nonlocal request
        key = repr((plan.block, plan.megatron_arguments))
        if key in seen:
            return False
        peaks = estimate_plan(plan)
        request = _correct(request, [peak - stage.peak_bytes for peak, stage in zip(peaks, plan.stages, strict=True)])
        stages = (dataclasses.replace(stage, peak_bytes=peak) for stage, peak in zip(plan.stages, peaks, strict=True))
        seen[key] = dataclasses.replace(plan, stages=tuple(stages)), request
        return True

    for _ in range(_ROUNDS):
        if not verify(find_plan(request, budget)):
            break
    fitting = [each for each in seen.values() if each[0].peak_bytes <= budget]
    if not fitting:
        for plan in _descend(lambda: request, lambda: min((plan for plan, _ in seen.values()), key=_peak)):
            verify(plan)
        fitting = [each for each in seen.values() if each[0].peak_bytes <= budget]
    if not fitting:
        raise_impossible(request, min((plan for plan, _ in seen.values()), key=_peak), budget)
    return min(fitting, key=lambda each: each[0].seconds)


def _peak(plan: Plan) -> int:
    return plan.peak_bytes


def _descend(get_request: Callable[[], PlanRequest], get_best: Callable[[], Plan]) -> Iterator[Plan]:
    """Plans to estimate where none fits by the rows: towards the one that needs least by the estimate.

    Rows tell what layers keep, and not what an operation's backward makes for itself, which decides once little
    is kept. So each of Megatron's modes is tried with what needs least by the rows; in the best of them, and where
    whole layers are recomputed, each attention, whose backward makes most; and from the best of all on, each value of
    each other operation, in all layers.

    Args:
        get_request: the request with the corrections of all estimates so far.
        get_best: of the plans that were estimated so far the one that needs least.
    """
    yield find_plan(get_request(), 0)
    values, modes = get_request().values, list_modes(get_request())
    for modules in modes:
        yield plan_alike(get_request(), {}, modules)
    for modules in dict.fromkeys((tuple(sorted(get_best().recompute)), modes[-1])):
        for attention in values["attention"]:
            yield plan_alike(get_request(), {"attention": (attention,)}, modules)
    for operation in sorted(values.keys() - {"attention"}):
        for value in values[operation]:
            best = get_best()
            same = {name: (best.block[name],) for name in values}
            if (operation, value, best.block["attention"]) != ("linear_qkv", "recompute", "off"):
                yield plan_alike(get_request(), {**same, operation: (value,)}, sorted(best.recompute))


def answer(question: Question, budget: int) -> tuple[Plan, PlanRequest]:
    """The plan of a question, verified unless what the GPUs hold anyway was given, and the request that it is of.

    Raises ValueError as `make_plan_request` and `make_plan`.
    """
    request, estimates = make_plan_request(question)
    if estimates is None:
        return make_plan(request, budget), request
    return make_verified_plan(request, budget, estimates.estimate_plan)


def _correct(request: PlanRequest, errors: Sequence[int]) -> PlanRequest:
    known = request.corrections or (0,) * request.run.pipeline_parallel
    return dataclasses.replace(request, corrections=tuple(map(sum, zip(known, errors, strict=True))))


@dataclasses.dataclass(frozen=True)
class Trial:
    """The best plan of one micro batch."""

    micro_batch_size: int
    plan: Plan
    request: PlanRequest

    @property
    def seconds_per_sample(self) -> float:
        """Of a step on one data-parallel rank, with the time in which its pipeline fills and drains."""
        stages = self.request.run.pipeline_parallel
        num_micro_batches = self.request.run.num_micro_batches or stages
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

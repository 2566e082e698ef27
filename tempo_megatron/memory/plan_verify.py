"""A plan that fits by the estimate, not only by the formula with which it was sought."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from tempo_megatron.memory.plan import Plan, PlanRequest, find_plan, make_plan, raise_impossible
from tempo_megatron.memory.plan_request import Question, make_plan_request

_ROUNDS = 6


def make_verified_plan(
    request: PlanRequest, budget: int, estimate_plan: Callable[[Plan], Sequence[int]]
) -> tuple[Plan, PlanRequest]:
    """The plan of the shortest step of which the estimate says that each GPU holds at most `budget` bytes.

    What the estimate of a plan has more, or less, than the plan said becomes part of what its stages hold anyway, and a
    plan is sought again, until the same is found twice. Of the plans that fit the shortest step is taken.

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
        # What needs least by the formula, of which a larger budget would have been no better.
        verify(find_plan(request, 0))
        fitting = [min(seen.values(), key=lambda each: each[0].peak_bytes)]
        if fitting[0][0].peak_bytes > budget:
            raise_impossible(request, fitting[0][0], budget)
    return min(fitting, key=lambda each: each[0].seconds)


def answer(question: Question, budget: int) -> tuple[Plan, PlanRequest]:
    """The plan of a question, verified unless what the GPUs hold anyway was given, and the request that it is of.

    Raises ValueError as `make_plan_request` and `make_plan`.
    """
    request, estimates = make_plan_request(question)
    if estimates is None:
        return make_plan(request, budget), request
    return make_verified_plan(request, budget, estimates.estimate_plan)


def _correct(request: PlanRequest, errors: Sequence[int]) -> PlanRequest:
    known = request.corrections or (0,) * request.pipeline_parallel
    return dataclasses.replace(request, corrections=tuple(map(sum, zip(known, errors, strict=True))))

"""Plans that fit by the estimate: none exceeds its budget in a real step, and no single switch is better."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import pytest
import torch
from covering import exhaustive
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from peak_cases import Step, make_run, measure_step

from tempo_megatron import TempoConfig, use_cpu
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.memory.plan.gpu import read_gpu
from tempo_megatron.memory.plan.planner import MemoryPlan, PlanProblem, PlanRequest, make_plan, make_smallest_plan
from tempo_megatron.memory.plan.plots import list_switches
from tempo_megatron.memory.plan.verify import PlanEstimates, make_problem, make_verified_plan
from tempo_megatron.settings.layer_values import LAYER_OPERATIONS

pytestmark = pytest.mark.usefixtures("without_compiler")
# The 0-dim tensors of the loss, which may or may not be there still when the peak is.
SCALARS_BYTES = 16


@functools.cache
def ask(family: str, **layout: int) -> tuple[PlanProblem, PlanEstimates]:
    """The problem of a small step, whose estimates the tests of this file share."""
    step = Step(family, False, TempoConfig.off())
    run = make_run(step, tempo=TempoConfig(), **layout)
    problem, estimates = make_problem(PlanRequest(run=run, gpu=read_gpu("h100")))
    assert estimates is not None
    return problem, estimates


def list_budgets(problem: PlanProblem, estimates: PlanEstimates, num: int) -> list[int]:
    """From the least that fits to what the shortest step of all needs, by the estimate."""
    smallest = max(estimates.estimate_plan(make_smallest_plan(problem)))
    most = max(estimates.estimate_plan(make_plan(problem, 10**15)))
    return [smallest + (most - smallest) * index // (num - 1) for index in range(num)]


def measure(step: Step, plan: MemoryPlan) -> int:
    tempo = TempoConfig.from_dict(plan.block)
    taken = dataclasses.replace(
        step, tempo=tempo, recompute=tuple(sorted(plan.recompute)), num_full=plan.num_full or None
    )
    with torch.compiler.set_stance("force_eager"), simulate_layout(1):
        model_parallel_cuda_manual_seed(1)
        return measure_step(taken)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", *exhaustive(["gpt"], ["bert"])])
def test_no_real_step_exceeds_the_budget_of_its_plan(family: str) -> None:
    use_cpu()
    step = Step(family, False, TempoConfig.off())
    problem, estimates = ask(family)
    measurements: dict[tuple[str, tuple[str, ...]], int] = {}
    seconds = []
    for budget in list_budgets(problem, estimates, 5):
        plan, _ = make_verified_plan(problem, budget, estimates.estimate_plan)
        taken = str(plan.block), plan.megatron_arguments
        if taken not in measurements:  # the same step has the same bytes
            measurements[taken] = measure(step, plan)
        measured = measurements[taken]
        assert measured <= plan.peak_bytes + SCALARS_BYTES <= budget + SCALARS_BYTES
        assert measured >= 0.9 * plan.peak_bytes
        if not plan.num_full:
            assert abs(measured - plan.peak_bytes) <= SCALARS_BYTES
        seconds.append(plan.seconds)
    assert len(measurements) >= 3 and seconds == sorted(seconds, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", *exhaustive(["bert"])])
def test_where_all_layers_recomputed_would_fit_a_plan_is_found(family: str) -> None:
    problem, estimates = ask(family)
    forms = (
        TempoConfig.off(),
        TempoConfig(activation="recompute", norm="recompute", dropout="recompute", attention="flash", loss="off"),
        TempoConfig(**{**dict.fromkeys(LAYER_OPERATIONS, "recompute"), "moe_permute": "off"}, loss="off"),
    )
    for modules in (("full",), ()):
        budget = min(estimates.estimate(form, modules)[0].peak_bytes for form in forms)
        assert make_verified_plan(problem, budget, estimates.estimate_plan)[0].peak_bytes <= budget


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="one stage", marks=pytest.mark.exhaustive),
        pytest.param({"pipeline_parallel": 2, "num_micro_batches": 4}, id="2 stages"),
    ],
)
def test_no_single_switch_that_fits_by_the_estimate_beats_the_plan(layout: dict[str, int]) -> None:
    problem, estimates = ask("llama", **layout)
    for name, switch in list_switches(problem).items():
        needed = max(estimates.estimate_plan(switch))
        plan, corrected = make_verified_plan(problem, needed, estimates.estimate_plan)
        assert plan.peak_bytes <= needed and plan.seconds <= switch.seconds, name
        assert [stage.peak_bytes for stage in plan.stages] == list(estimates.estimate_plan(plan))
        assert make_plan(corrected, needed).seconds <= plan.seconds


@pytest.mark.slow
def test_what_the_estimate_finds_more_is_made_up_for() -> None:
    """An estimate that is 5 % above the plan's own figures, and one that is 5 % below."""
    problem, estimates = ask("llama")
    budget = int(0.9 * make_plan(problem, 10**15).peak_bytes)

    def judge(factor: float) -> MemoryPlan:
        def estimate(plan: MemoryPlan) -> Sequence[int]:
            return [int(factor * each) for each in estimates.estimate_plan(plan)]

        return make_verified_plan(problem, budget, estimate)[0]

    strict, exact, loose = (judge(factor) for factor in (1.05, 1.0, 0.95))
    assert max(plan.peak_bytes for plan in (strict, exact, loose)) <= budget
    assert loose.seconds <= exact.seconds <= strict.seconds and loose.seconds < strict.seconds


@pytest.mark.exhaustive
def test_a_plan_with_the_host_is_never_slower_than_one_without_whatever_the_estimate_finds() -> None:
    """An estimate that is 3 % above the plan's own figures where something is sent to the host."""
    problem, estimates = ask("llama")
    link = dataclasses.replace(read_gpu("gh200").host_link, to_host_bytes_per_second=1e13, to_gpu_bytes_per_second=1e13)
    with_host = dataclasses.replace(problem, host_bytes=2**30, gpu=dataclasses.replace(problem.gpu, host_link=link))
    least, most = make_smallest_plan(problem).peak_bytes, make_plan(problem, 10**15).peak_bytes

    def estimate(plan: MemoryPlan) -> Sequence[int]:
        return [int(each * (1.03 if plan.host_bytes else 1)) for each in estimates.estimate_plan(plan)]

    assert make_smallest_plan(with_host).host_bytes
    budget = int(least + 0.2 * (most - least))
    alone, _ = make_verified_plan(problem, budget, estimate)
    plan, corrected = make_verified_plan(with_host, budget, estimate)
    assert plan.peak_bytes <= budget and plan.seconds <= alone.seconds and corrected.host_bytes == 2**30

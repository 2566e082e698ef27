"""Plans that fit by the estimate: none exceeds its budget in a real step, and one is found where one fits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from covering import exhaustive
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from peak_cases import Step, make_run, measure_step

from tempo_megatron import TempoConfig, use_cpu
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.memory.plan.gpu import read_gpu
from tempo_megatron.memory.plan.planner import MemoryPlan, Planner, PlanRequest
from tempo_megatron.memory.rank.estimate import estimate_ranks
from tempo_megatron.settings.layer_values import LAYER_OPERATIONS

pytestmark = pytest.mark.usefixtures("without_compiler")
# The 0-dim tensors of the loss, which may or may not be there still when the peak is.
SCALARS_BYTES = 16


def ask(family: str) -> Planner:
    """The planner of a small step."""
    run = make_run(Step(family, False, TempoConfig.off()), tempo=TempoConfig())
    return Planner(PlanRequest(run=run, gpu=read_gpu("h100")))


def list_budgets(planner: Planner, num: int) -> list[int]:
    """From the least that fits to what the shortest step of all needs, by the estimate."""
    smallest = max(planner.play(planner.make_smallest()))
    most = planner.plan(10**15).peak_bytes
    return [smallest + (most - smallest) * index // (num - 1) for index in range(num)]


def measure(step: Step, plan: MemoryPlan) -> int:
    taken = dataclasses.replace(
        step, tempo=plan.tempo, recompute=tuple(sorted(plan.recompute)), num_full=plan.num_full or None
    )
    with torch.compiler.set_stance("force_eager"), simulate_layout(1):
        model_parallel_cuda_manual_seed(1)
        return measure_step(taken)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", *exhaustive(["gpt"], ["bert"])])
def test_no_real_step_exceeds_the_budget_of_its_plan(family: str) -> None:
    use_cpu()
    step, planner = Step(family, False, TempoConfig.off()), ask(family)
    measurements: dict[tuple[str, tuple[str, ...]], int] = {}
    seconds = []
    for budget in list_budgets(planner, 3):
        plan = planner.plan(budget)
        taken = str(plan.block), plan.megatron_arguments
        if taken not in measurements:  # the same step has the same bytes
            measurements[taken] = measure(step, plan)
        assert abs(measurements[taken] - plan.peak_bytes) <= SCALARS_BYTES and plan.peak_bytes <= budget
        seconds.append(plan.seconds)
    assert len(measurements) == 3
    assert all(later <= earlier * 1.005 for earlier, later in zip(seconds, seconds[1:], strict=False))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", *exhaustive(["bert"])])
def test_where_all_layers_recomputed_would_fit_a_plan_is_found(family: str) -> None:
    forms = (
        TempoConfig.off(),
        TempoConfig(activation="recompute", norm="recompute", dropout="recompute", attention="flash", loss="off"),
        TempoConfig(**{**dict.fromkeys(LAYER_OPERATIONS, "recompute"), "moe_permute": "off"}, loss="off"),
    )
    planner = ask(family)
    for modules in (("full",), ()):
        runs = (dataclasses.replace(planner.request.run, tempo=form, recompute=modules) for form in forms)
        budget = min(estimate_ranks(run)[0].peak_bytes for run in runs)
        assert planner.plan(budget).peak_bytes <= budget

"""Plans that fit by the estimate: none exceeds its budget in a real step, and no single switch is better."""

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
from tempo_megatron.memory.plan.plots import list_switches
from tempo_megatron.memory.rank.estimate import estimate_ranks
from tempo_megatron.memory.run import Run
from tempo_megatron.settings.layer_values import LAYER_OPERATIONS

pytestmark = pytest.mark.usefixtures("without_compiler")
# The 0-dim tensors of the loss, which may or may not be there still when the peak is.
SCALARS_BYTES = 16


def describe(family: str, **layout: int) -> Run:
    return make_run(Step(family, False, TempoConfig.off()), tempo=TempoConfig(), **layout)


def ask(family: str, **layout: int) -> Planner:
    """The planner of a small step."""
    return Planner(PlanRequest(run=describe(family, **layout), gpu=read_gpu("h100")))


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
    for budget in list_budgets(planner, 5):
        plan = planner.plan(budget)
        taken = str(plan.block), plan.megatron_arguments
        if taken not in measurements:  # the same step has the same bytes
            measurements[taken] = measure(step, plan)
        assert abs(measurements[taken] - plan.peak_bytes) <= SCALARS_BYTES and plan.peak_bytes <= budget
        seconds.append(plan.seconds)
    assert len(measurements) >= 3
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="one stage", marks=pytest.mark.exhaustive),
        pytest.param({"pp": 2, "num_micro_batches": 4}, id="2 stages"),
    ],
)
def test_no_single_switch_that_fits_by_the_estimate_beats_the_plan(layout: dict[str, int]) -> None:
    planner = ask("llama", **layout)
    for name, switch in list_switches(planner).items():
        needed = max(planner.play(switch))
        plan = planner.plan(needed)
        assert plan.peak_bytes <= needed and plan.seconds <= switch.seconds * 1.005, name
        assert [stage.peak_bytes for stage in plan.stages] == planner.play(plan)


class _Judging(Planner):
    """A planner whose estimate differs from its own figures by a factor, or by one for what sends rows to the host."""

    factor, host_factor = 1.0, 1.0

    def play(self, plan: MemoryPlan) -> list[int]:
        factor = self.host_factor if plan.host_bytes else self.factor
        return [int(factor * each) for each in super().play(plan)]


@pytest.mark.slow
def test_what_the_estimate_finds_more_is_made_up_for() -> None:
    """An estimate that is 5 % above the estimate, and one that is 5 % below."""
    request = ask("llama").request
    planner = _Judging(request)
    budget = int(0.75 * planner.plan(10**15).peak_bytes)
    plans = {}
    for factor in (1.05, 1.0, 0.95):
        judging = _Judging(request)
        judging.factor = judging.host_factor = factor
        plans[factor] = judging.plan(budget)
    assert max(plan.peak_bytes for plan in plans.values()) <= budget
    assert plans[0.95].seconds <= plans[1.0].seconds * 1.005 and plans[1.0].seconds <= plans[1.05].seconds * 1.005
    assert plans[0.95].seconds < plans[1.05].seconds


def ask_with_host(factor: float) -> Planner:
    link = dataclasses.replace(read_gpu("gh200").host_link, to_host_bytes_per_second=1e13, to_gpu_bytes_per_second=1e13)
    gpu = dataclasses.replace(read_gpu("h100"), host_link=link)
    judging = _Judging(PlanRequest(run=describe("llama"), gpu=gpu, host_bytes=2**30))
    judging.host_factor = factor
    return judging


@pytest.mark.exhaustive
def test_a_plan_with_the_host_is_never_slower_than_one_without_whatever_the_estimate_finds() -> None:
    """An estimate that is 3 % above the plan's own figures where something is sent to the host."""
    alone = ask("llama")
    least, *_, most = list_budgets(alone, 2)
    budget = int(least + 0.2 * (most - least))
    assert ask_with_host(1.0).plan(budget).host_bytes
    plan = ask_with_host(1.03).plan(budget)
    assert plan.peak_bytes <= budget and plan.seconds <= alone.plan(budget).seconds * 1.005

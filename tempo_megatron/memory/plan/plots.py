"""Draws the plan command's figure: time against memory, for the plans of all budgets and for single switches."""

from __future__ import annotations

from tempo_megatron.memory.plan.choices import STOCK
from tempo_megatron.memory.plan.planner import MemoryPlan, Planner
from tempo_megatron.memory.show.plots import Report
from tempo_megatron.settings.layer_values import LAYER_OPERATIONS
from tempo_megatron.settings.operations import OPERATIONS

_NUM_BUDGETS = 24
_LINE = "plans of every budget"
_LABELS = ("peak of the fullest GPU, GiB", "slowest stage, ms per micro batch")
_SWITCHES = {
    "stock": (),
    "Tempo, in place": ("inplace", "flash", "recompute"),
    "Tempo, recompute": ("flash", "recompute"),
}
"""Of all layers -> the values that are taken where they can be, the first of them first."""


def list_plans(planner: Planner, num_budgets: int) -> list[MemoryPlan]:
    """The distinct plans of budgets between the least that fits and what stock needs, by the planner's figures."""
    least = planner.make_smallest().peak_bytes
    most = max(least, list_switches(planner)["stock"].peak_bytes)
    plans: list[MemoryPlan] = []
    for index in range(num_budgets):
        plan = planner.search(least + (most - least) * index // (num_budgets - 1))
        if plan is not None and (not plans or plan.seconds < plans[-1].seconds):
            plans.append(plan)
    return plans


def list_switches(planner: Planner) -> dict[str, MemoryPlan]:
    """Plans without a budget, in which all layers have one switch: stock, a form of Tempo, or recomputation that the
    request allows."""
    plans = {}
    for name, preference in _SWITCHES.items():
        values = []
        for operation in LAYER_OPERATIONS:
            found = next((value for value in preference if value in planner.values[operation]), "off")
            # Only some activations can run in place, and "recompute" would be another switch.
            is_other = name == "Tempo, in place" and operation == "activation" and found != "inplace"
            values.append("off" if is_other or OPERATIONS[operation].is_opt_in else found)
        plans[name] = planner.make_alike(tuple(values), frozenset())
    for modules in filter(None, planner.request.list_modes()):
        plans[f"stock + {' '.join(sorted(modules))}"] = planner.make_alike(STOCK, modules)
    return plans


def _place(plan: MemoryPlan) -> tuple[float, float]:
    return plan.peak_bytes / 2**30, plan.seconds * 1e3


def add_plan(report: Report, planner: Planner, plan: MemoryPlan, budget: int) -> None:
    """Adds the shortest time for every budget as a line, single switches and the plan as dots, in GiB and ms."""
    curve = [_place(each) for each in list_plans(planner, _NUM_BUDGETS)]
    report.add_curves(
        f"{_LINE}, and single switches",
        {_LINE: ([x for x, _ in curve], [y for _, y in curve])},
        _LABELS,
        {name: _place(each) for name, each in {**list_switches(planner), "this plan": plan}.items()},
        ("what a plan may take", budget / 2**30),
    )

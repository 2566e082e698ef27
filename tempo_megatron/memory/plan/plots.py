"""Draws the plan command's figure: time against memory, for the plans of all budgets and for single switches."""

from __future__ import annotations

from pathlib import Path

from tempo_megatron.html_report import HtmlReport
from tempo_megatron.memory.plan.planner import MemoryPlan, Planner, list_recomputations
from tempo_megatron.plots import COLOURS, INK, import_pyplot, save, tidy
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
    least = min(plan.peak_bytes for plan in planner.list_smallest())
    most = max(least, list_switches(planner)["stock"].peak_bytes)
    plans: list[MemoryPlan] = []
    for index in range(num_budgets):
        plan = planner.find(least + (most - least) * index // (num_budgets - 1))
        if plan is not None and (not plans or plan.seconds < plans[-1].seconds):
            plans.append(plan)
    return plans


def list_switches(planner: Planner) -> dict[str, MemoryPlan]:
    """Plans without a budget, in which all layers have one switch: stock, a form of Tempo, or recomputation."""
    modes = [modes for modes in list_recomputations(planner.request.run) if modes in planner.request.list_modes()]
    plans = {}
    for name, preference in _SWITCHES.items():
        values = []
        for operation in LAYER_OPERATIONS:
            allowed = planner.values[operation]
            found = next((value for value in preference if value in allowed), "off")
            # Only some activations can run in place, and "recompute" would be another switch.
            is_other = name == "Tempo, in place" and operation == "activation" and found != "inplace"
            values.append("off" if is_other or OPERATIONS[operation].is_opt_in else found)
        if frozenset() in modes:
            plans[name] = planner.make_alike(tuple(values), frozenset())
    for modules in modes:
        if modules:
            name = f"stock + {' '.join(sorted(modules))}"
            plans[name] = planner.make_alike(("off",) * len(LAYER_OPERATIONS), modules)
    return plans


def _place(plan: MemoryPlan) -> tuple[float, float]:
    return plan.peak_bytes / 2**30, plan.seconds * 1e3


def add_plan(report: HtmlReport, planner: Planner, plan: MemoryPlan, budget: int) -> None:
    """Add the line and the dots to a report, in GiB and ms."""
    curve = [_place(each) for each in list_plans(planner, _NUM_BUDGETS)]
    report.add_curves(
        f"{_LINE}, and single switches",
        {_LINE: ([x for x, _ in curve], [y for _, y in curve])},
        _LABELS,
        {name: _place(each) for name, each in {**list_switches(planner), "this plan": plan}.items()},
        ("what a plan may take", budget / 2**30),
    )


def plot_plan(planner: Planner, plan: MemoryPlan, budget: int, png: str | Path, title: str) -> None:
    """Draw the shortest time for every budget as a line, single switches as dots, and the plan as a star.

    Args:
        planner: of what is planned.
        plan: the plan for `budget`.
        budget: bytes of one GPU.
        png: the file to write.
        title: the text above the plot.
    """
    pyplot = import_pyplot()
    curve = [_place(each) for each in list_plans(planner, _NUM_BUDGETS)]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.step([x for x, _ in curve], [y for _, y in curve], where="post", color=COLOURS[0], label=_LINE)
    for number, (name, switch) in enumerate(list_switches(planner).items()):
        axes.plot(*_place(switch), "o", color=f"C{number + 1}", label=name)
    axes.plot(*_place(plan), "*", color="black", markersize=12, label="this plan")
    axes.axvline(budget / 2**30, color=INK, linewidth=0.8, linestyle="--", label="what a plan may take")
    axes.set_xlabel(_LABELS[0])
    axes.set_ylabel(_LABELS[1])
    tidy(axes, title)
    axes.legend(fontsize=8, frameon=False)
    save(figure, png)

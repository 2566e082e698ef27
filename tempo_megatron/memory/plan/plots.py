"""Draws the plan command's figure: time against memory, for the plans of all budgets and for single switches."""

from __future__ import annotations

from pathlib import Path

from tempo_megatron.html_report import HtmlReport
from tempo_megatron.memory.plan.planner import MemoryPlan, Planner, PlanProblem, list_recomputations, plan_alike
from tempo_megatron.plots import COLOURS, INK, import_pyplot, save, tidy
from tempo_megatron.settings.layer_values import LAYER_OPERATIONS
from tempo_megatron.settings.operations import OPERATIONS

_NUM_BUDGETS = 60


def list_plans(problem: PlanProblem, num_budgets: int) -> list[MemoryPlan]:
    """The distinct plans of budgets between the least that fits and what stock needs."""
    planner = Planner(problem)
    least, most = planner.find_smallest().peak_bytes, list_switches(problem)["stock"].peak_bytes
    plans: list[MemoryPlan] = []
    for index in range(num_budgets):
        plan = planner.find(least + (most - least) * index // (num_budgets - 1))
        assert plan is not None
        if not plans or plan.seconds < plans[-1].seconds:
            plans.append(plan)
    return plans


def list_switches(problem: PlanProblem) -> dict[str, MemoryPlan]:
    """Plans without a budget, in which all layers have one switch: stock, a form of Tempo, or recomputation."""
    preferences = {
        "stock": (),
        "Tempo, in place": ("inplace", "flash", "recompute"),
        "Tempo, recompute": ("flash", "recompute"),
    }
    plans = {}
    for name, preference in preferences.items():
        values = {
            operation: (next((value for value in preference if value in allowed), "off"),)
            if not OPERATIONS[operation].is_opt_in
            else ("off",)
            for operation, allowed in problem.values.items()
            if operation != "loss"
        }
        # Only some activations can run in place, and "recompute" would be another switch.
        if name == "Tempo, in place" and "inplace" not in problem.values["activation"]:
            values["activation"] = ("off",)
        plans[name] = plan_alike(problem, values, ())
    off = dict.fromkeys(LAYER_OPERATIONS, ("off",))
    for modules in list_recomputations(problem.run)[1:]:
        if problem.may_recompute(modules):
            plans[f"stock + {' '.join(modules)}"] = plan_alike(problem, off, modules)
    return plans


def add_plan(report: HtmlReport, problem: PlanProblem, plan: MemoryPlan, budget: int) -> None:
    """Add the same line and dots to a report, in GiB and ms."""

    def place(each: MemoryPlan) -> tuple[float, float]:
        return each.peak_bytes / 2**30, each.seconds * 1e3

    curve = [place(each) for each in list_plans(problem, _NUM_BUDGETS)]
    report.add_curves(
        "the best plan of every budget, and single switches",
        {"best plan of every budget": ([x for x, _ in curve], [y for _, y in curve])},
        ("peak of the fullest GPU, GiB", "slowest stage, ms per micro batch"),
        {name: place(each) for name, each in {**list_switches(problem), "this plan": plan}.items()},
        ("--gpu-memory", budget / 2**30),
    )


def plot_plan(problem: PlanProblem, plan: MemoryPlan, budget: int, png: str | Path, title: str) -> None:
    """Draw the shortest time for every budget as a line, single switches as dots, and the plan as a star.

    Args:
        problem: what is planned.
        plan: the plan for `budget`.
        budget: bytes of one GPU.
        png: the file to write.
        title: the text above the plot.
    """
    pyplot = import_pyplot()
    curve, switches = list_plans(problem, _NUM_BUDGETS), list_switches(problem)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.step(
        [each.peak_bytes / 2**30 for each in curve],
        [each.seconds * 1e3 for each in curve],
        where="post",
        color=COLOURS[0],
        label="best plan of every budget",
    )
    for number, (name, switch) in enumerate(switches.items()):
        axes.plot(switch.peak_bytes / 2**30, switch.seconds * 1e3, "o", color=f"C{number + 1}", label=name)
    axes.plot(plan.peak_bytes / 2**30, plan.seconds * 1e3, "*", color="black", markersize=12, label="this plan")
    axes.axvline(budget / 2**30, color=INK, linewidth=0.8, linestyle="--", label="--gpu-memory")
    axes.set_xlabel("peak of the fullest GPU, GiB")
    axes.set_ylabel("slowest stage, ms per micro batch")
    tidy(axes, title)
    axes.legend(fontsize=8, frameon=False)
    save(figure, png)

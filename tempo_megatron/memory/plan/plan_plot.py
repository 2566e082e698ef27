"""Draws the figure of the plan command: memory against time."""

from __future__ import annotations

from pathlib import Path

from tempo_megatron.memory.plan.planner import Plan, PlanRequest
from tempo_megatron.memory.plan.switches import list_plans, list_switches
from tempo_megatron.plots import COLOURS, INK, import_pyplot, save, tidy

_NUM_BUDGETS = 60


def plot_plan(request: PlanRequest, plan: Plan, budget: int, png: str | Path, title: str) -> None:
    """Draw the shortest time of every budget as a line, single switches as dots, and the plan.

    Args:
        request: what the plan was made of.
        plan: it.
        budget: its bytes.
        png: the file to write.
        title: above the plot.
    """
    pyplot = import_pyplot()
    curve, switches = list_plans(request, _NUM_BUDGETS), list_switches(request)
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

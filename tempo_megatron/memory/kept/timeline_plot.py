"""Draws a step's memory over its events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tempo_megatron.memory.kept.ledger_plot import choose_shades
from tempo_megatron.memory.kept.timeline import LOSS_HEAD, OTHERS, STANDING, TRANSIENTS, Timeline
from tempo_megatron.plots import GRID, INK, import_pyplot, save, tidy

_COLOURS = {
    **dict(zip(STANDING, ("#444444", "#777777", "#AAAAAA"), strict=True)),
    OTHERS: GRID,
    LOSS_HEAD: "#56B4E9",
    TRANSIENTS: "#882255",
}
_MOST_POINTS = 1500
_MOST_OPERATIONS = 12


def plot_timeline(timeline: Timeline, png: str | Path) -> None:
    """Write a PNG: bytes alive at each event, stacked by category, with the peak marked and named.

    Raises MissingExtraError where matplotlib is missing.
    """
    pyplot = import_pyplot("--timeline")
    levels = _order(timeline)
    events = _choose_events(sum(levels.values()))
    colours = {**choose_shades([name for name in levels if name not in _COLOURS]), **_COLOURS}
    figure, axes = pyplot.subplots(figsize=(11, 5.6), layout="constrained")
    axes.stackplot(
        events,
        *(level[events] / 2**20 for level in levels.values()),
        colors=[colours[name] for name in levels],
        labels=list(levels),
        step="post",
        linewidth=0,
    )
    peak = timeline.peak_bytes / 2**20
    axes.plot(timeline.peak_event, peak, "v", color="#D55E00", markersize=8, clip_on=False)
    axes.annotate(
        f"peak {peak:,.{1 if peak >= 10 else 3}f} MiB\n{timeline.moment}",
        (timeline.peak_event, peak),
        (0, 8),
        textcoords="offset points",
        ha="right" if timeline.peak_event > 0.5 * len(next(iter(levels.values()))) else "left",
        fontsize=9,
        color=INK,
    )
    _mark_phases(axes, timeline)
    axes.set_ylim(0, 1.18 * peak)
    axes.set_xlim(0, events[-1])
    axes.set_xlabel("operation of the step that makes memory")
    axes.set_ylabel("MiB alive")
    tidy(axes, timeline.title)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False, fontsize=8.5, labelcolor=INK)
    save(figure, png)


def _order(timeline: Timeline) -> dict[str, Any]:
    """What stands below what comes and goes; of operations the largest, and the others together."""
    levels = timeline.levels
    operations = sorted((name for name in levels if name not in _COLOURS), key=lambda name: -int(levels[name].max()))
    ordered = {name: levels[name] for name in (*STANDING, OTHERS) if name in levels and levels[name].any()}
    ordered |= {name: levels[name] for name in sorted(operations[:_MOST_OPERATIONS], key=list(levels).index)}
    if rest := operations[_MOST_OPERATIONS:]:
        ordered["other activations"] = np.sum([levels[name] for name in rest], axis=0)
    return ordered | {name: levels[name] for name in (LOSS_HEAD, TRANSIENTS) if name in levels}


def _choose_events(total: Any) -> Any:
    """All events, or of many the highest of each stretch."""
    if len(total) <= _MOST_POINTS:
        return np.arange(len(total))
    parts = np.array_split(np.arange(len(total)), _MOST_POINTS)
    return np.unique([0, *(int(part[np.argmax(total[part])]) for part in parts), len(total) - 1])


def _mark_phases(axes: Any, timeline: Timeline) -> None:
    if len(timeline.marks) > 16:
        return
    for event, name in timeline.marks:
        axes.axvline(event, color=INK, linewidth=0.6, linestyle=":")
        axes.annotate(
            name, (event, 1), (3, -3), xycoords=("data", "axes fraction"), textcoords="offset points", va="top",
            fontsize=8, color=INK,
        )  # fmt: skip

"""Draws what a model keeps for backward: bars of the operations of a layer, and a step's memory over its events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tempo_megatron.html_report import HtmlReport
from tempo_megatron.memory.show.timeline import LOSS_HEAD, OTHERS, STANDING, TRANSIENTS, Timeline
from tempo_megatron.memory.tape.rows import Row
from tempo_megatron.plots import GRID, INK, import_pyplot, save, tidy

Bars = Mapping[str, Mapping[str, int]]
"""Label of a bar -> operation -> bytes, from below."""
_CATEGORY_COLOURS = {
    **dict(zip(STANDING, ("#444444", "#777777", "#AAAAAA"), strict=True)),
    OTHERS: GRID,
    LOSS_HEAD: "#56B4E9",
    TRANSIENTS: "#882255",
}
_MOST_POINTS = 1500
_MOST_OPERATIONS = 12
_MOST_MARKS = 16
_NARROWEST_LABEL = 0.045  # of the axis: a lower part has no room for its name


def list_parts(rows: Iterable[Row]) -> dict[str, int]:
    """One bar: operation -> bytes on the device, and after them those on the host."""
    rows = list(rows)
    on_device = {row.operation: row.num_bytes - row.host_bytes for row in rows}
    return on_device | {f"{row.operation}, on the host": row.host_bytes for row in rows if row.host_bytes}


def list_panels(layers: Bars, outside: Bars) -> dict[str, Bars]:
    """Title -> bars: of one layer, also without its s*s tensors where it has some, and of what the model has once."""
    panels = {"one layer": layers}
    if any("s*s" in operation for bar in layers.values() for operation in bar):
        panels["one layer without s*s"] = {
            label: {name: num_bytes for name, num_bytes in bar.items() if "s*s" not in name}
            for label, bar in layers.items()
        }
    if any(sum(bar.values()) for bar in outside.values()):
        panels["around the layers"] = outside
    return panels


def plot_kept(layers: Bars, outside: Bars, png: str | Path, title: str, sbh_bytes: int) -> None:
    """Write a PNG with a panel for each of `list_panels`, each on its own scale.

    Args:
        layers: what one layer keeps.
        outside: what the model keeps around its layers.
        png: the file.
        title: model, dtype, s, b and layout.
        sbh_bytes: s * b * h.

    Raises MissingExtraError where matplotlib is missing.
    """
    pyplot = import_pyplot()
    panels = list_panels(layers, outside)
    widths = [1.2 + len(bars) for bars in panels.values()]
    figure, (all_axes,) = pyplot.subplots(
        1, len(panels), figsize=(1.9 + 1.5 * sum(widths), 5.8), width_ratios=widths, layout="constrained", squeeze=False
    )
    colours = _choose_colours(
        pyplot, (name for bars in panels.values() for bar in bars.values() for name, size in bar.items() if size)
    )
    for axes, (name, bars) in zip(all_axes, panels.items(), strict=True):
        axes.set_title(name, loc="left", color=INK, fontsize=11)
        _draw_bars(axes, bars, colours, sbh_bytes)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    _draw_legend(figure, handles, list(colours))
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=13, fontweight="bold")
    save(figure, png)


def add_kept(report: HtmlReport, layers: Bars, outside: Bars) -> None:
    """Add the same panels to a report, in MiB."""
    for name, bars in list_panels(layers, outside).items():
        sizes = {label: {part: num_bytes / 2**20 for part, num_bytes in bar.items()} for label, bar in bars.items()}
        report.add_bars(f"kept for backward, {name}", sizes, "MiB")


def add_timeline(report: HtmlReport, timeline: Timeline) -> None:
    """Add the stacked categories to a report, with every event that is drawn and the peak."""
    levels = _order_levels(timeline)
    events = _choose_events(sum(levels.values()))
    titles = "operation of the step that makes memory", "MiB"
    report.add_areas(
        "alive during a step",
        events.tolist(),
        {name: (level[events] / 2**20).round(3).tolist() for name, level in levels.items()},
        titles,
        _CATEGORY_COLOURS,
        [
            *(timeline.marks if len(timeline.marks) <= _MOST_MARKS else ()),
            (timeline.peak_event, f"peak {_format_mib(timeline.peak_bytes / 2**20)}"),
        ],
    )
    if timeline.host_peak_bytes:
        on_host = (timeline.on_host[events] / 2**20).round(3).tolist()
        report.add_curves("on the host during the step", {"on the host": (events.tolist(), on_host)}, titles)


def _draw_bars(axes: Any, bars: Bars, colours: Mapping[str, Any], sbh_bytes: int) -> None:
    highest = max(sum(bar.values()) for bar in bars.values()) / 2**20
    for label, bar in bars.items():
        bottom = 0.0
        for operation, num_bytes in bar.items():
            height = num_bytes / 2**20
            if height:
                part = axes.bar(label, height, 0.9, bottom, color=colours[operation], edgecolor="white", linewidth=0.8)
                if height > _NARROWEST_LABEL * highest:
                    axes.bar_label(part, [operation], label_type="center", fontsize=7.5)
            bottom += height
        total = f"{_format_mib(bottom)}\n{bottom * 2**20 / sbh_bytes:,.2f} sbh"
        axes.annotate(total, (label, bottom), (0, 3), textcoords="offset points", ha="center", fontsize=9, color=INK)
    axes.set_ylim(0, 1.12 * highest)
    axes.set_ylabel("MiB")
    tidy(axes)


def _choose_colours(pyplot: Any, operations: Iterable[str]) -> dict[str, Any]:
    names = dict.fromkeys(operations)
    colours = pyplot.get_cmap("tab20").colors
    return {name: colours[number % len(colours)] for number, name in enumerate(names)}


def _draw_legend(figure: Any, handles: list[Any], labels: list[str]) -> None:
    """From above, as the bars and the areas are."""
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False, fontsize=8.5, labelcolor=INK)


def _format_mib(mib: float) -> str:
    return f"{mib:,.{1 if mib >= 10 else 3}f} MiB"


def plot_timeline(timeline: Timeline, png: str | Path) -> None:
    """Write a PNG: bytes alive at each event, stacked by category, with the peak marked and named.

    Raises MissingExtraError where matplotlib is missing.
    """
    pyplot = import_pyplot("--timeline")
    levels = _order_levels(timeline)
    events = _choose_events(sum(levels.values()))
    colours = {
        **_choose_colours(pyplot, (name for name in levels if name not in _CATEGORY_COLOURS)),
        **_CATEGORY_COLOURS,
    }
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
        f"peak {_format_mib(peak)}\n{timeline.moment}",
        (timeline.peak_event, peak),
        (0, 8),
        textcoords="offset points",
        ha="right" if timeline.peak_event > events[-1] / 2 else "left",
        fontsize=9,
        color=INK,
    )
    if len(timeline.marks) <= _MOST_MARKS:
        for event, name in timeline.marks:
            axes.axvline(event, color=INK, linewidth=0.6, linestyle=":")
            axes.text(event, 0.99, f" {name}", transform=axes.get_xaxis_transform(), va="top", fontsize=8, color=INK)
    if timeline.host_peak_bytes:
        on_host = timeline.on_host[events] / 2**20
        axes.step(events, on_host, where="post", color=INK, linestyle="--", linewidth=1.2, label="on the host, beside")
    axes.set_ylim(0, 1.18 * max(peak, timeline.host_peak_bytes / 2**20))
    axes.set_xlim(0, events[-1])
    axes.set_xlabel("operation of the step that makes memory")
    axes.set_ylabel("MiB alive")
    tidy(axes, timeline.title)
    _draw_legend(figure, *axes.get_legend_handles_labels())
    save(figure, png)


def _order_levels(timeline: Timeline) -> dict[str, Any]:
    """Lasting categories below, then the largest operations and the rest of them as one, then what comes and goes."""
    levels = timeline.levels
    operations = [name for name in levels if name not in _CATEGORY_COLOURS]
    largest = sorted(operations, key=lambda name: -int(levels[name].max()))[:_MOST_OPERATIONS]
    ordered = {name: levels[name] for name in (*STANDING, OTHERS) if name in levels and levels[name].any()}
    ordered |= {name: levels[name] for name in operations if name in largest}
    if rest := [levels[name] for name in operations if name not in largest]:
        ordered["other activations"] = np.sum(rest, axis=0)
    return ordered | {name: levels[name] for name in (LOSS_HEAD, TRANSIENTS) if name in levels}


def _choose_events(total: Any) -> Any:
    """All events, or of many the highest of each stretch."""
    if len(total) <= _MOST_POINTS:
        return np.arange(len(total))
    parts = np.array_split(np.arange(len(total)), _MOST_POINTS)
    return np.unique([0, *(int(part[np.argmax(total[part])]) for part in parts), len(total) - 1])

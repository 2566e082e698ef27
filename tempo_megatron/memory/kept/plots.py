"""Draws what a model keeps for backward: bars of the operations of a layer, and a step's memory over its events."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tempo_megatron.memory.kept.timeline import LOSS_HEAD, OTHERS, STANDING, TRANSIENTS, Timeline
from tempo_megatron.plots import GRID, INK, import_pyplot, save, tidy
from tempo_megatron.settings.activations import ACTIVATIONS

# Okabe and Ito's colours, a hue for each kind of operation. Operations of one kind differ in lightness, and each is
# written beside the bars.
_HUES = {
    "layernorm": ("#0072B2", "#4D9CCB", "#99C6E0", "#CCE3F0"),
    "linear": ("#009E73", "#4DBB9D", "#99D8C7", "#CCECE3"),
    "s*s": ("#D55E00",),
    "attention": ("#E69F00", "#F2CF80", "#F7E2B3"),
    "bda": ("#CC79A7", "#E5BCD3"),
    "mlp": ("#F0E442",),
    "": ("#56B4E9", "#999999", "#BBBBBB", "#666666", "#333333"),
}
_CATEGORY_COLOURS = {
    **dict(zip(STANDING, ("#444444", "#777777", "#AAAAAA"), strict=True)),
    OTHERS: GRID,
    LOSS_HEAD: "#56B4E9",
    TRANSIENTS: "#882255",
}
_MOST_POINTS = 1500
_MOST_OPERATIONS = 12
_NARROWEST_LABEL = 0.045  # of the axis: a part that is lower has no room for its name


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar: operations and their bytes, from below."""

    label: str
    parts: tuple[tuple[str, int], ...]

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.parts)


@dataclasses.dataclass(frozen=True)
class Panel:
    """Bars on one scale."""

    title: str
    bars: tuple[Bar, ...]


def make_panels(layers: Sequence[Bar], outside: Sequence[Bar]) -> list[Panel]:
    """Of one layer, whole and without its s*s tensors where it has some, and of what the model has once."""
    panels = [Panel("one layer", tuple(layers))]
    without = [Bar(bar.label, tuple(part for part in bar.parts if "s*s" not in part[0])) for bar in layers]
    if any(short.num_bytes < bar.num_bytes for short, bar in zip(without, layers, strict=True)):
        panels.append(Panel("one layer without s*s", tuple(without)))
    if any(bar.num_bytes for bar in outside):
        panels.append(Panel("around the layers", tuple(outside)))
    return panels


def plot_panels(panels: Sequence[Panel], png: str | Path, title: str, sbh_bytes: int) -> None:
    """Write a PNG.

    Args:
        panels: side by side, each with its own scale.
        png: the file.
        title: model, dtype, s, b and layout.
        sbh_bytes: s * b * h.

    Raises MissingExtraError where matplotlib is missing.
    """
    pyplot = import_pyplot()
    widths = [1.2 + len(panel.bars) for panel in panels]
    figure, all_axes = pyplot.subplots(
        1,
        len(panels),
        figsize=(2.6 + 1.5 * sum(widths), 5.8),
        width_ratios=widths,
        layout="constrained",
        squeeze=False,
    )
    colours = choose_colours(panels)
    for axes, panel in zip(all_axes[0], panels, strict=True):
        _draw_panel(axes, panel, colours, sbh_bytes)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    # From above, as the bars are.
    figure.legend(
        handles[::-1], list(colours)[::-1], loc="outside right center", frameon=False, fontsize=8.5, labelcolor=INK
    )
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=13, fontweight="bold")
    save(figure, png)


def _draw_panel(axes: Any, panel: Panel, colours: dict[str, str], sbh_bytes: int) -> None:
    highest = max(bar.num_bytes for bar in panel.bars) / 2**20
    for place, bar in enumerate(panel.bars):
        bottom = 0.0
        for operation, num_bytes in bar.parts:
            height = num_bytes / 2**20
            axes.bar(
                place, height, bottom=bottom, color=colours[operation], edgecolor="white", linewidth=0.8, width=0.9
            )
            if height > _NARROWEST_LABEL * highest:
                axes.annotate(
                    operation,
                    (place, bottom + height / 2),
                    ha="center",
                    va="center",
                    fontsize=7.5,
                    color="white" if _is_dark(colours[operation]) else INK,
                )
            bottom += height
        mib = bar.num_bytes / 2**20
        total = f"{mib:,.{1 if mib >= 10 else 3}f} MiB\n{bar.num_bytes / sbh_bytes:,.2f} sbh"
        axes.annotate(total, (place, bottom), (0, 3), textcoords="offset points", ha="center", fontsize=9, color=INK)
    axes.set_ylim(0, 1.12 * highest)
    axes.set_xlim(-0.6, len(panel.bars) - 0.4)
    axes.set_xticks(range(len(panel.bars)), [bar.label for bar in panel.bars], color=INK)
    axes.set_title(panel.title, loc="left", color=INK, fontsize=11)
    axes.set_ylabel("MiB")
    tidy(axes)
    sbh = axes.secondary_yaxis("right", functions=(lambda y: y * 2**20 / sbh_bytes, lambda y: y * sbh_bytes / 2**20))
    sbh.set_ylabel("sbh", color=INK)
    sbh.tick_params(colors=INK, length=0)
    for spine in sbh.spines.values():
        spine.set_visible(False)


def choose_colours(panels: Sequence[Panel]) -> dict[str, str]:
    """Operation -> colour, of all that keep something."""
    operations = dict.fromkeys(
        operation for panel in panels for bar in panel.bars for operation, num_bytes in bar.parts if num_bytes
    )
    return choose_shades(operations)


def choose_shades(operations: Iterable[str]) -> dict[str, str]:
    """Operation -> colour: of one kind the next lightness for each that comes."""
    places: dict[str, int] = {}
    colours = {}
    for operation in operations:
        kind = find_kind(operation)
        place = places[kind] = places.get(kind, -1) + 1
        colours[operation] = _HUES[kind][place % len(_HUES[kind])]
    return colours


def find_kind(operation: str) -> str:
    """What kind of operation a row of the ledger is, as its colour says."""
    if operation.split()[-1] in (*ACTIVATIONS, "relu"):
        return "mlp"
    return next((kind for kind in _HUES if kind and kind in operation), "")


def _is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return 0.3 * red + 0.59 * green + 0.11 * blue < 128


def plot_timeline(timeline: Timeline, png: str | Path) -> None:
    """Write a PNG: bytes alive at each event, stacked by category, with the peak marked and named.

    Raises MissingExtraError where matplotlib is missing.
    """
    pyplot = import_pyplot("--timeline")
    levels = _order(timeline)
    events = _choose_events(sum(levels.values()))
    colours = {**choose_shades([name for name in levels if name not in _CATEGORY_COLOURS]), **_CATEGORY_COLOURS}
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
    operations = sorted(
        (name for name in levels if name not in _CATEGORY_COLOURS), key=lambda name: -int(levels[name].max())
    )
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

"""Draws memory: stacked bars of what it is for, and that of a step over its events.

Each figure is described once, for an HtmlReport and for a PngReport alike.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tempo_megatron.html_report import HtmlReport
from tempo_megatron.memory.show.timeline import LOSS_HEAD, OTHERS, STANDING, TRANSIENTS, Timeline
from tempo_megatron.memory.tape.rows import Row
from tempo_megatron.plots import GRID, INK, import_pyplot, save, tidy

Bars = Mapping[str, Mapping[str, int]]
"""Label of a bar -> part -> bytes, from below."""
_UNITS = {"MiB": 2**20, "GiB": 2**30}
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


class PngReport:
    """Plots side by side in one PNG; its methods are those of an HtmlReport.

    Raises MissingExtraError where matplotlib is missing, which names `option`.
    """

    def __init__(self, title: str, option: str = "--plot") -> None:
        self._pyplot, self._title = import_pyplot(option), title
        self._panels: list[tuple[str, float, Callable[[Any], None]]] = []
        self._colours: dict[str, Any] = {}

    def add_text(self, text: str) -> None:
        """A picture has none."""

    def add_bars(
        self, heading: str, bars: Mapping[str, Mapping[str, float]], unit: str, line: tuple[str, float] | None = None
    ) -> None:
        highest = max(sum(bar.values()) for bar in bars.values())

        def draw(axes: Any) -> None:
            for label, bar in bars.items():
                bottom = 0.0
                for name, height in ((name, height) for name, height in bar.items() if height):
                    colour = self._choose_colour(name)
                    part = axes.bar(label, height, 0.9, bottom, color=colour, edgecolor="white", label=name)
                    if height > _NARROWEST_LABEL * highest:
                        axes.bar_label(part, [name], label_type="center", fontsize=7.5)
                    bottom += height
                total, offset = _format_size(bottom, unit), {"xytext": (0, 3), "textcoords": "offset points"}
                axes.annotate(total, (label, bottom), **offset, ha="center", fontsize=9, color=INK)
            if line is not None:
                axes.axhline(line[1], color=INK, linestyle="--", linewidth=1, label=line[0])
            axes.set_ylim(0, 1.12 * max(highest, line[1] if line else 0))
            axes.set_ylabel(unit)

        self._panels.append((heading, 1.2 + len(bars), draw))

    def add_areas(
        self,
        heading: str,
        places: Sequence[int],
        levels: Mapping[str, Sequence[float]],
        titles: tuple[str, str],
        colours: Mapping[str, str],
        marks: Sequence[tuple[int, str]] = (),
    ) -> None:
        def draw(axes: Any) -> None:
            chosen = [self._choose_colour(name, colours) for name in levels]
            # What is there at the last place is drawn, too.
            ends, heights = [*places, places[-1] + 1], [[*each, each[-1]] for each in levels.values()]
            axes.stackplot(ends, *heights, colors=chosen, labels=list(levels), step="post", linewidth=0)
            for number, (place, name) in enumerate(marks):
                axes.axvline(place, color=INK, linewidth=0.6, linestyle=":")
                side, height = ("right", 0.93) if place > places[-1] / 2 else ("left", 0.99 - 0.06 * (number % 2))
                transform = axes.get_xaxis_transform()
                axes.text(place, height, f" {name} ", transform=transform, ha=side, va="top", fontsize=8, color=INK)
            axes.set(xlim=(0, ends[-1]), xlabel=titles[0], ylabel=titles[1])
            axes.set_ylim(0, 1.18 * max(map(sum, zip(*heights, strict=True))))

        self._panels.append((heading, 6, draw))

    def add_curves(
        self,
        heading: str,
        curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
        titles: tuple[str, str],
        dots: Mapping[str, tuple[float, float]] | None = None,
        line: tuple[str, float] | None = None,
    ) -> None:
        """Steps: name -> x and y; named dots, and a named line: across, or upright where there are dots."""

        def draw(axes: Any) -> None:
            for name, (x, y) in curves.items():
                axes.step(x, y, where="post", color=self._choose_colour(name), label=name)
            for name, place in (dots or {}).items():
                axes.plot(*place, "o", color=self._choose_colour(name), label=name)
            if line is not None:
                draw_line = axes.axvline if dots else axes.axhline
                draw_line(line[1], color=INK, linewidth=0.8, linestyle="--", label=line[0])
            axes.set(xlabel=titles[0], ylabel=titles[1])

        self._panels.append((heading, 4.5, draw))

    def save(self, png: str | Path) -> None:
        """Draws the plots, each on its own scale, and one legend, and writes the file."""
        widths = [width for _, width, _ in self._panels]
        size = 1.9 + 1.5 * sum(widths), 5.8
        figure, (all_axes,) = self._pyplot.subplots(
            1, len(widths), figsize=size, width_ratios=widths, layout="constrained", squeeze=False
        )
        handles: dict[str, Any] = {}
        for axes, (heading, _, draw) in zip(all_axes, self._panels, strict=True):
            axes.set_title(heading, loc="left", color=INK, fontsize=11)
            draw(axes)
            tidy(axes)
            handles |= {name: handle for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
        # From above, as the bars and the areas are.
        legend = [*handles.values()][::-1], [*handles][::-1]
        figure.legend(*legend, loc="outside right center", frameon=False, fontsize=8.5, labelcolor=INK)
        title = textwrap.fill(self._title, int(8 * size[0]))
        figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=13, fontweight="bold")
        save(figure, png)

    def _choose_colour(self, name: str, given: Mapping[str, str] | None = None) -> Any:
        colours = self._pyplot.get_cmap("tab20").colors
        return (given or {}).get(name) or self._colours.setdefault(name, colours[len(self._colours) % len(colours)])


Report = HtmlReport | PngReport


def open_reports(args: Any, title: str) -> dict[str, Report]:
    """File of --plot and of --html -> its report. Raises MissingExtraError where a package is missing."""
    kinds: dict[str, Callable[[str], Report]] = {"plot": PngReport, "html": HtmlReport}
    return {getattr(args, name): kind(title) for name, kind in kinds.items() if getattr(args, name)}


def list_parts(rows: Iterable[Row]) -> dict[str, int]:
    """One bar: operation -> bytes on the device, and after them those on the host."""
    rows = list(rows)
    on_device = {row.operation: row.num_bytes - row.host_bytes for row in rows}
    return on_device | {f"{row.operation}, on the host": row.host_bytes for row in rows if row.host_bytes}


def add_bars(report: Report, heading: str, bars: Bars, unit: str, line: tuple[str, int] | None = None) -> None:
    """Adds bars and a line that are given in bytes."""
    sizes = {label: {part: size / _UNITS[unit] for part, size in bar.items()} for label, bar in bars.items()}
    report.add_bars(heading, sizes, unit, line=None if line is None else (line[0], line[1] / _UNITS[unit]))


def add_kept(report: Report, layers: Bars, outside: Bars) -> None:
    """Adds what one layer keeps, also without its s*s tensors where it has some, and the model around its layers."""
    without = {label: {name: size for name, size in bar.items() if "s*s" not in name} for label, bar in layers.items()}
    panels: dict[str, Bars] = {"one layer": layers}
    if without != layers:
        panels["one layer without s*s"] = without
    if any(sum(bar.values()) for bar in outside.values()):
        panels["around the layers"] = outside
    for name, bars in panels.items():
        add_bars(report, f"kept for backward, {name}", bars, "MiB")


def plot_kept(layers: Bars, outside: Bars, png: str | Path, title: str, sbh_bytes: int) -> None:
    """Writes the same as a PNG, with the whole of each bar in units of `sbh_bytes`, which are s * b * h, too."""

    def name(bars: Bars) -> Bars:
        return {f"{label}\n{sum(bar.values()) / sbh_bytes:,.2f} sbh": bar for label, bar in bars.items()}

    report = PngReport(title)
    add_kept(report, name(layers), name(outside))
    report.save(png)


def add_timeline(report: Report, timeline: Timeline) -> None:
    """Adds the stacked categories, with every event that is drawn and the peak."""
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
            (timeline.peak_event, f"peak {_format_size(timeline.peak_bytes / 2**20)}"),
        ],
    )
    if timeline.host_peak_bytes:
        on_host = (timeline.on_host[events] / 2**20).round(3).tolist()
        report.add_curves("on the host during the step", {"on the host": (events.tolist(), on_host)}, titles)


def plot_timeline(timeline: Timeline, png: str | Path) -> None:
    """Writes the same as a PNG."""
    report = PngReport(f"{timeline.title}; peak: {timeline.moment}", "--timeline")
    add_timeline(report, timeline)
    report.save(png)


def _format_size(size: float, unit: str = "MiB") -> str:
    return f"{size:,.{1 if size >= 10 else 3}f} {unit}"


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

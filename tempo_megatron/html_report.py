"""Writes one HTML file that shows a table and plots to zoom into, and needs neither a server nor a network."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tempo_megatron.extras import check_installed
from tempo_megatron.plots import GRID, INK

_STYLE = (
    "body{font-family:Helvetica,Arial,sans-serif;color:#333;max-width:1200px;margin:24px auto;padding:0 16px}"
    "h1{font-size:20px}h2{font-size:16px;margin:28px 0 0}pre{font-size:12px;overflow-x:auto;line-height:1.45}"
)
_HEIGHT = 460


class HtmlReport:
    """Texts and plots, from above.

    Args:
        title: of the page.
        option: what asked for it, for the error of a missing package.

    Raises MissingExtraError where plotly is missing.
    """

    def __init__(self, title: str, option: str = "--html") -> None:
        check_installed(option, "train", "plotly")
        self._title = title
        self._parts: list[str] = []
        self._num_plots = 0

    def add_text(self, text: str) -> None:
        """A table as it stands on a terminal."""
        self._parts.append(f"<pre>{html.escape(text)}</pre>")

    def add_bars(
        self,
        heading: str,
        bars: Mapping[str, Mapping[str, float]],
        unit: str,
        line: tuple[str, float] | None = None,
    ) -> None:
        """Stacked bars: label -> part, from below -> height; and perhaps a named line across."""
        from plotly import graph_objects

        figure = graph_objects.Figure()
        parts = dict.fromkeys(name for bar in bars.values() for name, height in bar.items() if height)
        for number, name in enumerate(parts):
            figure.add_bar(
                name=name,
                x=[label.replace("\n", "<br>") for label in bars],
                y=[bar.get(name, 0) for bar in bars.values()],
                marker_color=_choose_colour(number),
                hovertemplate=f"{html.escape(name)}<br>%{{y:,.3f}} {unit}<extra>%{{x}}</extra>",
            )
        for label, bar in bars.items():
            total = sum(bar.values())
            figure.add_annotation(
                x=label.replace("\n", "<br>"), y=total, text=f"{total:,.2f}", yshift=10, showarrow=False
            )
        if line is not None:
            figure.add_hline(y=line[1], line_dash="dash", line_color=INK, annotation_text=line[0])
        figure.update_layout(barmode="stack", bargap=0.25)
        self._add(figure, heading, "", unit)

    def add_areas(
        self,
        heading: str,
        places: Sequence[int],
        levels: Mapping[str, Sequence[float]],
        titles: tuple[str, str],
        colours: Mapping[str, str],
        marks: Sequence[tuple[int, str]] = (),
    ) -> None:
        """Stacked areas: name, from below -> heights at the places; marks stand at places, the name of the last one at
        its left. Titles: of x, of y."""
        from plotly import graph_objects

        figure = graph_objects.Figure()
        for number, (name, heights) in enumerate(levels.items()):
            colour = colours.get(name) or _choose_colour(number)
            figure.add_scatter(
                name=name,
                x=places,
                y=heights,
                stackgroup="alive",
                line={"width": 0, "shape": "hv", "color": colour},
                fillcolor=colour,
                hovertemplate=f"%{{y:,.1f}} {titles[1]}<extra>{html.escape(name)}</extra>",
            )
        for number, (place, name) in enumerate(marks, 1):
            side = "top left" if number == len(marks) else "top right"
            figure.add_vline(
                x=place, line_dash="dot", line_width=1, line_color=INK, annotation_text=name, annotation_position=side
            )
        figure.update_layout(hovermode="x unified")
        self._add(figure, heading, *titles)

    def add_curves(
        self,
        heading: str,
        curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
        titles: tuple[str, str],
        dots: Mapping[str, tuple[float, float]] | None = None,
        line: tuple[str, float] | None = None,
    ) -> None:
        """Steps: name -> x and y; named dots, and a named line: across, or upright where there are dots."""
        from plotly import graph_objects

        figure = graph_objects.Figure()
        for number, (name, (x, y)) in enumerate(curves.items()):
            figure.add_scatter(name=name, x=x, y=y, line={"shape": "hv", "color": _choose_colour(number)})
        for number, (name, (left, height)) in enumerate((dots or {}).items()):
            symbol = {"size": 11, "color": _choose_colour(len(curves) + number)}
            figure.add_scatter(name=name, x=[left], y=[height], mode="markers", marker=symbol)
        if line is not None:
            draw = figure.add_vline if dots else figure.add_hline
            draw(**{"x" if dots else "y": line[1]}, line_dash="dash", line_color=INK, annotation_text=line[0])
        self._add(figure, heading, *titles)

    def save(self, path: str | Path) -> None:
        """Writes the file in one step, and makes its folder where that is missing."""
        title = html.escape(self._title)
        text = (
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f'<link rel="icon" href="data:,"><style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n'
        )
        text += "\n".join(self._parts) + "\n</body></html>\n"
        unfinished = Path(f"{path}.tmp")
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)

    def _add(self, figure: Any, heading: str, x_title: str, y_title: str) -> None:
        figure.update_layout(
            template="plotly_white", height=_HEIGHT, margin={"l": 60, "r": 20, "t": 30, "b": 50},
            legend={"traceorder": "reversed"}, font={"color": INK},
        )  # fmt: skip
        figure.update_xaxes(title=x_title, gridcolor=GRID)
        figure.update_yaxes(title=y_title, gridcolor=GRID)
        # The library stands in the file once, with the first plot.
        plot = figure.to_html(full_html=False, include_plotlyjs=not self._num_plots, config={"displaylogo": False})
        self._num_plots += 1
        self._parts.append(f"<h2>{html.escape(heading)}</h2>\n{plot}")


def _choose_colour(number: int) -> str:
    from plotly.colors import qualitative

    # Okabe and Ito's first, then others.
    palette = [*qualitative.Safe, *qualitative.Dark24]
    return str(palette[number % len(palette)])

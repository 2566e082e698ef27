"""Gives all figures the same look, and writes their files in one step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tempo_megatron.extras import check_installed

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK, GRID = "#333333", "#DDDDDD"


def import_pyplot(option: str = "--plot") -> Any:
    """matplotlib.pyplot, which writes files and opens no window.

    Raises MissingExtraError, which names `option`, where matplotlib is missing.
    """
    check_installed(option, "train", "matplotlib")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def tidy(axes: Any, title: str | None = None) -> None:
    """Remove frame and ticks, draw the grid behind everything, and write the title at the left."""
    axes.tick_params(colors=INK, length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if title is not None:
        axes.set_title(title, loc="left", color=INK, fontsize=13, fontweight="bold")


def save(figure: Any, png: str | Path) -> None:
    """Write the figure in one step, make its folder where that is missing, and close the figure."""
    unfinished = Path(f"{png}.tmp")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(unfinished, format="png", dpi=160)
    os.replace(unfinished, png)
    import_pyplot().close(figure)

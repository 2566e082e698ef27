"""The plot of the order command: memory against steps, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tempo_megatron.plots import COLOURS, import_pyplot, save, tidy


def plot_order(given: Sequence[int], planned: Sequence[int], lower_bound: int, png: str | Path, title: str) -> None:
    """Draw what is alive while each operation runs.

    Args:
        given: bytes of each operation of eager mode.
        planned: of the plan's.
        lower_bound: below which no order's peak is.
        png: the file to write.
        title: above the plot.
    """
    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for steps, label, color in ((given, "eager mode", "#888888"), (planned, "this plan", COLOURS[0])):
        sizes = [num_bytes / 2**20 for num_bytes in steps]
        axes.step(range(len(sizes)), sizes, where="mid", color=color, label=f"{label}, peak {max(sizes):.1f} MiB")
    axes.axhline(lower_bound / 2**20, color="black", linewidth=0.8, linestyle="--", label="no order's peak is lower")
    axes.set_xlabel("operation")
    axes.set_ylabel("alive while it runs, MiB")
    tidy(axes, title)
    axes.legend(fontsize=8, frameon=False)
    save(figure, png)

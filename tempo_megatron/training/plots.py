"""Draws the loss curves of one or several runs from their metrics files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tempo_megatron.plots import COLOURS, INK, import_pyplot, save, tidy
from tempo_megatron.training.metrics import read_metrics


def plot_losses(runs: Mapping[str, str | Path], png: str | Path, title: str = "Loss") -> None:
    """Draws the training loss (line) and the validation loss (dots) of each run into a PNG.

    Args:
        runs: label -> metrics file. Equal curves stay visible: later ones are dashed over earlier ones, and their dots
            are rings around the earlier ones'.
        png: the file, replaced in one step.
        title: above the figure.

    Raises ValueError if a run has no training step.
    """
    pyplot = import_pyplot("--loss-plot")
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for number, (label, path) in enumerate(runs.items()):
        _draw_run(axes, label, path, COLOURS[number % len(COLOURS)], number)
    axes.set_xlabel("step")
    axes.set_ylabel("cross entropy per token (nats)")
    tidy(axes, title)
    axes.margins(x=0.01)
    axes.legend(frameon=False, labelcolor=INK)
    save(figure, png)


def _draw_run(axes: Any, label: str, path: str | Path, colour: str, number: int) -> None:
    records = [record for record in read_metrics(path) if record.get("loss") is not None]
    train = [record for record in records if record["kind"] == "train"]
    valid = [record for record in records if record["kind"] == "validation"]
    if not train:
        raise ValueError(f"{path} holds no training step; give the metrics file of a run")
    style: Any = (0, (4, 2)) if number else "solid"
    steps, losses = [record["iteration"] for record in train], [record["loss"] for record in train]
    axes.plot(steps, losses, color=colour, linewidth=1.6, linestyle=style, label=f"{label}, training")
    if valid:
        steps, losses = [record["iteration"] for record in valid], [record["loss"] for record in valid]
        form = {"markerfacecolor": "none", "markeredgewidth": 1.6} if number else {"markeredgecolor": "white"}
        axes.plot(steps, losses, "o", color=colour, markersize=6 + 4 * number, label=f"{label}, validation", **form)

"""Draws stacked bars of an estimate: a bar per kind of rank, stock beside Tempo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tempo_megatron.memory.estimate.estimate import PART_NAMES, RankEstimate
from tempo_megatron.plots import INK, import_pyplot, save, tidy

# Okabe and Ito's colours and greys, one for each part.
_COLOURS = (
    "#0072B2",
    "#56B4E9",
    "#999999",
    "#DDDDDD",
    "#BBBBBB",
    "#444444",
    "#E69F00",
    "#F0E442",
    "#D55E00",
    "#CC79A7",
    "#009E73",
)


def plot_estimates(found: Mapping[str, Sequence[RankEstimate]], png: str | Path, memory: int | None = None) -> None:
    """Write a PNG.

    Args:
        found: label ("stock", "Tempo") -> kinds of ranks, the same for each label.
        png: the file.
        memory: bytes of a device, drawn as a line.

    Raises MissingExtraError where matplotlib is missing.
    """
    pyplot = import_pyplot()
    bars = [
        (f"{ranks[i].name}\n{label}", ranks[i])
        for i in range(len(next(iter(found.values()))))
        for label, ranks in found.items()
    ]
    figure, axes = pyplot.subplots(figsize=(2.5 + 1.1 * len(bars), 4.5), layout="constrained")
    bottom = [0.0] * len(bars)
    for part, colour in zip(PART_NAMES, _COLOURS, strict=True):
        heights = [rank.parts[part] / 2**30 for _, rank in bars]
        if any(heights):
            axes.bar(range(len(bars)), heights, bottom=bottom, color=colour, label=part, width=0.7)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    if memory is not None:
        axes.axhline(memory / 2**30, color=INK, linestyle="--", linewidth=1, label="memory of a device")
    axes.set_xticks(range(len(bars)), [name for name, _ in bars], color=INK)
    axes.set_ylabel("GiB at the peak")
    tidy(axes)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, png)

"""Draws the loss curves of runs, and compares two, stock and Tempo, in a table."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tempo_megatron.plots import COLOURS, INK, import_pyplot, save, tidy
from tempo_megatron.training.metrics import STEP_CPU, read_metrics

LAST_STEPS = 10
_MIB = 2**20


def compare(stock: str | Path, tempo: str | Path, ledger: str | Path) -> str:
    """Returns the table of two runs of the same model on the same data, from their metrics files.

    `ledger` is what `tempo-megatron ledger --json` wrote for the same sizes, layout and dtype.

    Raises ValueError if a file lacks what the table needs.
    """
    runs = [_summarize_run(path) for path in (stock, tempo)]
    if runs[0]["steps"] != runs[1]["steps"]:
        raise ValueError(
            f"{stock} has {runs[0]['steps']} steps and {tempo} has {runs[1]['steps']}; give runs of one length"
        )
    try:
        figures = json.loads(Path(ledger).read_text(encoding="utf-8"))
        kept = [figures["stock"], figures["tempo"]]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{ledger} is no ledger ({error}); write one with tempo-megatron ledger --json {ledger}"
        ) from error
    rows = [(f"training loss, last {LAST_STEPS} steps", [run["loss"] for run in runs], ".4f")]
    if all(run["validation"] is not None for run in runs):
        rows.append(("validation loss", [run["validation"] for run in runs], ".4f"))
    rows += [
        *_pair_intervals("tokens/s, median", [run["tokens_per_s"] for run in runs], ",.0f"),
        *_pair_intervals("CPU ms per step of a rank, median", [run[STEP_CPU] for run in runs], ",.0f"),
        ("kept for backward per layer, sbh", [figures["layer_sbh"] for figures in kept], ".2f"),
        ("kept for backward per layer, MiB", [figures["layer_bytes"] / _MIB for figures in kept], ".2f"),
        ("kept for backward in all, MiB", [figures["model_bytes"] / _MIB for figures in kept], ".1f"),
    ]
    lines = [f"{'':<36}{'stock':>12}{'Tempo':>12}{'Tempo / stock':>16}"]
    lines.append("-" * len(lines[0]))
    for name, (before, after, *ratio), form in rows:
        lines.append(f"{name:<36}{before:>12{form}}{after:>12{form}}{(ratio or [after / before])[0]:>16.3f}")
    return "\n".join(lines)


def _pair_intervals(name: str, intervals: list[list[float]], form: str) -> list[tuple[str, list[float], str]]:
    """Makes the row of a figure of each log interval; its ratio is the median of those of the same steps and data."""
    stock, tempo = intervals
    if not stock or not tempo:
        return []
    ratio = statistics.median(after / before for before, after in zip(stock, tempo, strict=False))
    return [(name, [statistics.median(stock), statistics.median(tempo), ratio], form)]


def _read_run(path: str | Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the steps whose loss is finite, and the validations."""
    train, valid = (
        [record for record in read_metrics(path) if record["kind"] == kind] for kind in ("train", "validation")
    )
    train = [record for record in train if record["loss"] is not None]
    if not train:
        raise ValueError(f"{path} holds no training step; give the metrics file of a run")
    return train, valid


def _summarize_run(path: str | Path) -> dict[str, Any]:
    train, valid = _read_run(path)
    # Speed is measured per interval. The first one includes compilation and the growth of the allocator's cache.
    intervals = list({record["tokens_per_s"]: record for record in train}.values())
    intervals = intervals[1:] or intervals
    return {
        "steps": len(train),
        "loss": statistics.fmean(record["loss"] for record in train[-LAST_STEPS:]),
        "validation": valid[-1]["loss"] if valid else None,
        "tokens_per_s": [record["tokens_per_s"] for record in intervals],
        STEP_CPU: [record[STEP_CPU] for record in intervals if STEP_CPU in record],
    }


def plot_losses(runs: Mapping[str, str | Path], png: str | Path, title: str = "Loss") -> None:
    """Draws the training loss (line) and the validation loss (dots) of each run, label -> metrics file, into a PNG.

    Equal curves stay visible: later ones are dashed over earlier ones, and their dots are rings around the earlier
    ones'. The file is replaced in one step.

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
    train, valid = _read_run(path)
    valid = [record for record in valid if record["loss"] is not None]
    style: Any = (0, (4, 2)) if number else "solid"
    steps, losses = [record["iteration"] for record in train], [record["loss"] for record in train]
    axes.plot(steps, losses, color=colour, linewidth=1.6, linestyle=style, label=f"{label}, training")
    if valid:
        steps, losses = [record["iteration"] for record in valid], [record["loss"] for record in valid]
        form = {"markerfacecolor": "none", "markeredgewidth": 1.6} if number else {"markeredgecolor": "white"}
        axes.plot(steps, losses, "o", color=colour, markersize=6 + 4 * number, label=f"{label}, validation", **form)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tempo_megatron.training.comparison", description="Compare a stock run with a run with Tempo."
    )
    parser.add_argument("--stock", required=True, metavar="JSONL", help="metrics file of the stock run")
    parser.add_argument("--tempo", required=True, metavar="JSONL", help="metrics file of the run with Tempo")
    parser.add_argument("--ledger", required=True, metavar="JSON", help="written by tempo-megatron ledger --json")
    parser.add_argument("--table", metavar="TXT", help="also write the table to this file")
    parser.add_argument("--loss-plot", metavar="PNG", help="draw both loss curves into this file")
    args = parser.parse_args(argv)
    try:
        table = compare(args.stock, args.tempo, args.ledger)
        if args.loss_plot:
            plot_losses({"stock": args.stock, "Tempo": args.tempo}, args.loss_plot, "Loss, stock and Tempo")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.table:
        Path(args.table).write_text(table + "\n", encoding="utf-8")
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

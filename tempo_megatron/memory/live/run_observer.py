"""Prints and writes what `--tempo-ledger` asks for: the first step's ledger and the second step's timeline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from tempo_megatron.memory.kept.plots import Bar, make_panels, plot_panels, plot_timeline
from tempo_megatron.memory.kept.timeline import Timeline, describe_timeline, format_timeline
from tempo_megatron.memory.live.run_ledger import (
    Measured,
    RunLedger,
    describe_measured,
    find_stage,
    format_measured,
    is_printer,
    write_json,
)


class RunObserver:
    """Looks at the first two steps of a run, on the first rank of each pipeline stage.

    Args:
        models: of this rank, perhaps wrapped.
        prefix: of the files: PREFIX.stageN.json and .png.
        sizes: the other arguments of `RunLedger`.
    """

    def __init__(self, models: Sequence[Any], prefix: str, **sizes: Any) -> None:
        self._prefix = prefix
        self._num_steps = 0
        self._ledger = RunLedger(models, **sizes) if is_printer() else None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around each training step."""
        self._num_steps += 1
        if self._ledger is None or self._num_steps > 2:
            yield
        elif self._num_steps == 1:
            yield
            self._publish(self._ledger.measure())
        else:
            with self._ledger.follow_step() as timeline:
                yield
            self._publish_timeline(timeline.finish(self._ledger.write_title()))

    def _publish(self, found: Measured | None) -> None:
        if found is None:
            _say("--tempo-ledger: no model of this rank ran forward in training in the first step")
            return
        _say(format_measured(found))
        name = f"{self._prefix}.stage{found.stage}"
        write_json(describe_measured(found), f"{name}.json")
        plot_measured(found, f"{name}.png")
        _say(f"the ledger is in {name}.json and {name}.png")

    def _publish_timeline(self, timeline: Timeline) -> None:
        _say(format_timeline(timeline))
        name = f"{self._prefix}.stage{find_stage()}.timeline"
        write_json(describe_timeline(timeline), f"{name}.json")
        plot_timeline(timeline, f"{name}.png")
        _say(f"the step's memory is in {name}.json and {name}.png")


def _say(text: str) -> None:
    print(text, flush=True)


def plot_measured(found: Measured, png: str) -> None:
    """A run's layers beside a stock one."""
    stock = [Bar("stock", found.stock)] if found.stock else []
    layers = [
        Bar(
            "this run" if len(found.layers) == 1 else f"layers\n{kind.layers}",
            tuple((row.operation, row.num_bytes) for row in kind.rows),
        )
        for kind in found.layers
    ]
    outside = [Bar("this run", tuple((row.operation, row.num_bytes) for row in found.outside))]
    plot_panels(make_panels([*stock, *layers], outside), png, found.title, found.sbh_bytes)

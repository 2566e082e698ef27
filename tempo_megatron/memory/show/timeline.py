"""Reads the memory of one training step from its tape: what is alive at each step of it, and what made that.

A step of the tape, an operation of torch's dispatcher that makes memory, is an event of the timeline. A storage belongs
to the operation of the model that ran when it was made: in forward the innermost module, in backward the module whose
forward made autograd's node. It counts as long as somebody holds it.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tempo_megatron.memory.run import Run
from tempo_megatron.memory.simulated.chunk import record_step
from tempo_megatron.memory.tape.rows import find_row, format_size, name_row
from tempo_megatron.memory.tape.scopes import ACCUMULATION
from tempo_megatron.memory.tape.tape import Storage, Tape

WEIGHTS, GRADIENTS, STATES = "weights", "gradients", "optimizer states"
LOSS_HEAD, OTHERS, TRANSIENTS = "loss head", "micro batch and others", "transients"
STANDING = (WEIGHTS, STATES, GRADIENTS)
_HEAD_ROWS = ("output_layer", "loss", "lm_head", "pooler", "binary_head")
_LEAST_SHARE = 0.002  # of the peak: smaller parts of a category are one line of the table


class PeakPart(NamedTuple):
    """Bytes of one category and origin that are alive at the peak."""

    category: str
    """One of STANDING, LOSS_HEAD, OTHERS, TRANSIENTS, or, for activations, the operation of the layer."""
    operation: str
    """The operation that made them: `backward of linear_fc2`."""
    num_bytes: int


class LivedStorage(NamedTuple):
    """One storage of the step. The first two fields are those of a PeakPart."""

    category: str
    made_by: str
    num_bytes: int
    start: int
    """The event that makes it; -1 where it was there before the step."""
    end: int | None
    """The event from which it is no longer there; None where the step leaves it."""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One step of one rank."""

    title: str
    levels: dict[str, np.ndarray]
    """Category -> bytes alive at each event."""
    marks: tuple[tuple[int, str], ...]
    """(event, "forward" or "backward") where each begins."""
    peak_event: int
    moment: str
    """What ran at the peak: `backward of the loss head`."""
    at_peak: tuple[PeakPart, ...]
    """The largest first."""
    storages: tuple[LivedStorage, ...]
    """What the step makes, and what was there before."""
    on_host: np.ndarray
    """Bytes of the layers' activations that have a place on the host, at each event."""

    @property
    def host_peak_bytes(self) -> int:
        return int(self.on_host.max())

    @property
    def peak_bytes(self) -> int:
        return sum(each.num_bytes for each in self.at_peak)


def read_timeline(tape: Tape, standing: Mapping[str, int], *, activation: str, title: str) -> Timeline:
    """The timeline of a step whose follower had scopes.

    `standing` is what exists before the step: one of STANDING -> bytes; `activation` the name of the MLP's.
    """

    def name(operation: str) -> str:
        """The title of the operation's row in the ledger."""
        return operation if operation == ACCUMULATION else name_row(find_row(operation), activation)

    storages, num_events = [], tape.num_steps + 1
    for made in tape.storages:
        row = name(made.operation)
        place = f"{made.phase} of {'the model' if row == 'loss' else row}"
        made_by = place if made.phase else "outside of forward and backward"
        category = _categorize(made, row, tape.forward_ends)
        storages.append(LivedStorage(category, made_by, made.num_bytes, made.born, made.freed))
    storages += [LivedStorage(kind, "there before the step", size, -1, None) for kind, size in standing.items()]
    levels: dict[str, np.ndarray] = {}
    for lived in storages:
        change = levels.setdefault(lived.category, np.zeros(num_events + 1, dtype=np.int64))
        change[max(lived.start, 0)] += lived.num_bytes
        change[num_events if lived.end is None else lived.end] -= lived.num_bytes
    levels = {category: np.cumsum(change)[:num_events] for category, change in levels.items()}
    peak = int(np.argmax(sum(levels.values())))
    at_peak = collections.Counter[tuple[str, str]]()
    for lived in storages:
        if lived.num_bytes and lived.start <= peak and (lived.end is None or lived.end > peak):
            at_peak[lived.category, lived.made_by] += lived.num_bytes
    return Timeline(
        title=title,
        levels=levels,
        marks=tuple(tape.begins),
        peak_event=peak,
        moment=next((lived.made_by for lived in reversed(storages) if lived.start == peak), ""),
        at_peak=tuple(PeakPart(*key, num_bytes) for key, num_bytes in at_peak.most_common()),
        storages=tuple(storages),
        on_host=np.array(tape.on_host or [0] * num_events, dtype=np.int64),
    )


def simulate_timeline(run: Run, *, title: str) -> Timeline:
    """The timeline of what `record_step` runs."""
    tape, weights = record_step(run)
    return read_timeline(tape, {WEIGHTS: weights}, activation=run.model.activation, title=title)


def _categorize(made: Storage, name: str, forward_ends: list[int]) -> str:
    if made.is_gradient:
        return GRADIENTS
    if not made.phase:
        return OTHERS
    if name in _HEAD_ROWS:
        return LOSS_HEAD
    if made.phase == "forward":
        place = bisect.bisect_left(forward_ends, made.born)
        if place < len(forward_ends) and (made.freed is None or made.freed > forward_ends[place] + 1):
            return name
    return TRANSIENTS


def format_timeline(timeline: Timeline) -> str:
    """A table of what is alive at the peak."""
    lines = [f"memory at the peak of one step ({timeline.moment}): {timeline.title}"]
    lines.append(f"{'category':<28}{'made by':<44}{'bytes':>17}{'share':>8}")
    rule = "-" * len(lines[-1])
    lines.append(rule)
    parts, small = [], collections.Counter[str]()
    for each in timeline.at_peak:
        if each.num_bytes >= _LEAST_SHARE * timeline.peak_bytes:
            parts.append(each)
        else:
            small[each.category] += each.num_bytes
    for each in [*parts, *(PeakPart(category, "smaller ones", small[category]) for category in sorted(small))]:
        share = each.num_bytes / timeline.peak_bytes
        lines.append(f"{each.category:<28}{each.operation:<44}{format_size(each.num_bytes):>17}{share:>8.1%}")
    lines += [rule, f"{'peak':<72}{format_size(timeline.peak_bytes):>17}{1:>8.0%}"]
    if timeline.host_peak_bytes:
        lines.append(f"{'on the host, not among these, at most':<72}{format_size(timeline.host_peak_bytes):>17}")
    return "\n".join(lines)


def describe_timeline(timeline: Timeline) -> dict[str, Any]:
    """The timeline as JSON."""
    return {
        "title": timeline.title,
        "peak_bytes": timeline.peak_bytes,
        "peak_event": timeline.peak_event,
        "moment": timeline.moment,
        "at_peak": [each._asdict() for each in timeline.at_peak],
        "marks": [{"event": event, "begins": name} for event, name in timeline.marks],
        "levels": {category: level.tolist() for category, level in timeline.levels.items()},
        "on_host": timeline.on_host.tolist(),
    }

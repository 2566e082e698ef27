"""The order in which a pipeline stage runs the micro batches of a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Event(NamedTuple):
    """The forward or the backward of one micro batch through one chunk of a stage."""

    is_forward: bool
    micro_batch: int
    chunk: int


def list_events(
    stage: int,
    num_stages: int,
    num_chunks: int,
    num_micro_batches: int,
    group: int | None = None,
    *,
    is_combined: bool = False,
) -> Iterator[Event]:
    """What a stage does in one step, in Megatron's order (schedules.py: get_schedule_table of megatron-core 0.16.1).

    Args:
        stage: from 0.
        num_stages: p.
        num_chunks: chunks of layers per stage; 1 is 1F1B without interleaving.
        num_micro_batches: of a step.
        group: how many micro batches pass through one chunk before the next chunk begins; None is p.
        is_combined: whether a forward runs beside the backward of another micro batch; of chunks one more goes ahead.
    """
    if num_chunks == 1:
        places = [(micro_batch, 0) for micro_batch in range(num_micro_batches)]
        warmup = num_stages - stage - 1
    else:
        group = group or num_stages
        places = [
            (micro_batch, chunk)
            for first in range(0, num_micro_batches, group)
            for chunk in range(num_chunks)
            for micro_batch in range(first, min(first + group, num_micro_batches))
        ]
        warmup = 2 * (num_stages - stage - 1) + (num_chunks - 1) * group + is_combined
    warmup = min(warmup, len(places))
    for number in range(len(places) + warmup):
        if number < len(places):
            micro_batch, chunk = places[number]
            yield Event(True, micro_batch, chunk)
        if number >= warmup:
            micro_batch, chunk = places[number - warmup]
            yield Event(False, micro_batch, num_chunks - 1 - chunk)


def list_until_full(events: Sequence[Event]) -> Sequence[Event]:
    """The events of a stage of one chunk until a step has twice had as many micro batches in flight as it ever has.

    Later ones repeat them, with the same blocks.
    """
    if any(event.chunk for event in events):
        return events
    levels = list(itertools.accumulate(1 if event.is_forward else -1 for event in events))
    full = [place for place, level in enumerate(levels) if level == max(levels)]
    return events[: full[:2][-1] + 2]


def list_turns(events: Sequence[Event], *, is_combined: bool) -> list[list[Event]]:
    """Events that run at a time; what is in flight behind the last one has its backward then."""
    in_flight = {each[1:] for each in events if each.is_forward} - {each[1:] for each in events if not each.is_forward}
    last = sorted((Event(False, *each) for each in in_flight), key=lambda each: (-each.chunk, each.micro_batch))
    turns: list[list[Event]] = []
    for event in [*events, *last]:
        if is_combined and event.is_forward and turns and not turns[-1][0].is_forward:
            # The forward's segment is over when the backward's runs.
            turns[-1].insert(0, event)
        else:
            turns.append([event])
    return turns

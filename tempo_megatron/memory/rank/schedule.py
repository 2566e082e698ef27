"""The order in which a pipeline stage runs the micro batches of a step."""

from __future__ import annotations

from collections.abc import Iterator
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

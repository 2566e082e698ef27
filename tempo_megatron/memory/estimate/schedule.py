"""Lists the order in which a pipeline stage runs its micro batches: 1F1B, plain and interleaved."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Event:
    """The forward or the backward of one micro batch through one chunk of a stage."""

    is_forward: bool
    micro_batch: int
    chunk: int


def list_events(stage: int, num_stages: int, num_chunks: int, num_micro_batches: int) -> Iterator[Event]:
    """What a stage does in one step, in Megatron's order.

    Args:
        stage: from 0.
        num_stages: p.
        num_chunks: chunks of layers per stage; 1 is 1F1B without interleaving.
        num_micro_batches: of a step; with several chunks a multiple of p.
    """
    total = num_micro_batches * num_chunks
    warmup = num_stages - stage - 1
    if num_chunks > 1:
        # Groups of p micro batches pass through one chunk after another.
        warmup = 2 * warmup + (num_chunks - 1) * num_stages
    warmup = min(warmup, total)
    for number in range(total + warmup):
        if number < total:
            yield _locate(number, num_stages, num_chunks, is_forward=True)
        if number >= warmup:
            yield _locate(number - warmup, num_stages, num_chunks, is_forward=False)


def _locate(number: int, num_stages: int, num_chunks: int, *, is_forward: bool) -> Event:
    group, place = divmod(number, num_stages * num_chunks)
    chunk, micro_batch = divmod(place, num_stages)
    if num_chunks == 1:
        return Event(is_forward, number, 0)
    return Event(is_forward, group * num_stages + micro_batch, chunk if is_forward else num_chunks - 1 - chunk)

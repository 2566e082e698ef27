"""Fills the layers of a pipeline stage with two options, as many of the one that keeps more as fit, and bounds others.

The layers of a stage are alike, so a choice is a number of layers for each option. Only one layer is recomputed at a
time, so what its recomputation makes again counts once; of what layers send to the host that of two layers is on the
device at a time, and the last layer, which has none behind it to run meanwhile, sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tempo_megatron.memory.plan.choices import LayerOption


class Stage(NamedTuple):
    """One pipeline stage without what its layers' options add."""

    num_layers: int
    in_flight: int
    fixed_bytes: int
    """While a layer's backward runs, without what its recomputation makes again."""
    head_bytes: int
    """More than that, at the highest moment before any layer's backward."""
    base_seconds: float
    """Of one micro batch: products, and the weights' bytes."""
    host_bytes: int
    """For one micro batch."""


class Mode:
    """One kind of recomputation by Megatron, and every two options of its layers.

    Args:
        recompute: what Megatron recomputes.
        options: of the layers that are not recomputed as a whole, by ascending time.
        fulls: what layers that are recomputed as a whole have: lists with an option for each of `options`, which stand
            for the second of a pair; in the first list its own values. Empty without "full".
        numbers: how many layers of a stage may be recomputed as a whole.
        moves: whether some option sends something to the host.
    """

    def __init__(
        self,
        recompute: frozenset[str],
        options: Sequence[LayerOption],
        fulls: Sequence[Sequence[LayerOption]],
        numbers: Iterable[int],
        *,
        moves: bool,
    ) -> None:
        self.recompute, self.options, self.moves = recompute, options, moves
        self.fulls: Sequence[Sequence[LayerOption] | None] = fulls or (None,)
        self.numbers = tuple(numbers) if fulls else (0,)
        self.corrections: tuple[int, ...] = ()
        """Bytes that the estimate found beyond the search's figure, by stage; empty before it was asked."""
        first, second = np.triu_indices(len(options))
        kept = np.array([option.kept_bytes for option in options], float)
        is_mix = (first == second) | (kept[first] > kept[second])
        self.first, self.second = first[is_mix], second[is_mix]
        self.is_single = self.first == self.second

    def fill(self, stage: Stage, left_bytes: int, num_full: int, full: Sequence[LayerOption] | None) -> tuple[Any, Any]:
        """For each pair of options: how many layers behind the first `num_full`, which have options of `full`, have the
        first one, as many as fit into `left_bytes`; and the seconds of the stage, infinite where nothing fits."""

        def read(name: str, options: Sequence[LayerOption], places: Any) -> Any:
            return np.array([getattr(option, name) for option in options], float)[places]

        def read_both(name: str) -> tuple[Any, Any]:
            return read(name, self.options, self.first), read(name, self.options, self.second)

        m, n = stage.in_flight, stage.num_layers - num_full
        kept, kept_second = read_both("kept_bytes")
        moved, moved_second = read_both("moved_bytes")
        seconds, seconds_second = read_both("seconds")
        replay = np.maximum(*read_both("replay_bytes"))
        zero = np.zeros(len(self.first))
        full_kept, full_moved, full_seconds, full_replay, full_copy = (
            zero if full is None else read(name, full, self.second)
            for name in ("kept_bytes", "moved_bytes", "seconds", "replay_bytes", "copy_seconds")
        )
        # The last layer of a stage sends nothing, as nothing runs behind it meanwhile.
        last_moved = moved_second if n else full_moved
        num_moving_full = num_full if n else num_full - 1
        staging = 2 * np.maximum(np.maximum(moved, moved_second) if n else zero, full_moved if num_full else zero)
        of_full = num_full * full_kept + (0 if n else last_moved)
        room = (left_bytes - np.maximum(replay + staging if n else zero, stage.head_bytes)) / m - of_full
        if num_full and m > 1:
            room = np.minimum(room, (left_bytes - full_replay - staging - m * of_full) / (m - 1))
        fits = np.full(len(zero), True)
        if num_full and m == 1:
            fits &= of_full + full_replay + staging <= left_bytes
        host = stage.host_bytes - num_moving_full * full_moved
        if n:
            room = room - last_moved
            with np.errstate(divide="ignore", invalid="ignore"):
                number = np.floor((room - n * kept_second) / (kept - kept_second))
                of_host = np.floor((host - (n - 1) * moved_second) / (moved - moved_second))
            number = np.minimum(number, np.where(moved > moved_second, of_host, n))
            number = np.where(self.is_single, n, np.minimum(number, n - 1))
            fits &= np.where(self.is_single, room >= n * kept_second, number >= 1)
            sent = (
                np.where(self.is_single, n - 1, number) * moved
                + np.where(self.is_single, 0, n - 1 - number) * moved_second
            )
            fits &= sent <= host
        else:
            number = zero
            fits &= (room >= 0) & (host >= 0)
        number = np.where(fits, number, 0)
        total = stage.base_seconds + num_full * full_seconds + number * seconds + (n - number) * seconds_second
        total -= read("copy_seconds", self.options, self.second) if n else full_copy
        return number.astype(int), np.where(fits, total, math.inf)

    def bound(self, stage: Stage, left_bytes: int) -> float:
        """Seconds below which no choice for the layers of a stage takes: that of any two options in any fractions."""
        options = [*self.options, *(option for full in self.fulls for option in full or ())]
        kept = np.array([option.kept_bytes for option in options], float)
        seconds = np.array([option.seconds for option in options])
        # Whole layers that are recomputed last have freed what the others kept.
        replay = np.array([0 if "full" in each.choice.recompute else each.replay_bytes for each in options], float)
        room = (left_bytes - np.maximum(np.maximum.outer(replay, replay), stage.head_bytes)) / stage.in_flight
        each = room / stage.num_layers
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.clip((each - kept[None]) / (kept[:, None] - kept[None]), 0, 1)
        share = np.where(kept[:, None] <= each, 1, share)
        mixed = share * seconds[:, None] + (1 - share) * seconds[None]
        is_possible = (np.minimum.outer(kept, kept) <= each) & (kept[:, None] >= kept[None])
        return stage.base_seconds + stage.num_layers * float(np.min(mixed, where=is_possible, initial=math.inf))


def count_peak(stage: Stage, options: Sequence[LayerOption], num_full: int) -> int:
    """The peak of a stage: the highest of three moments.

    They are the loss head; the begin of the last layer's backward, with what its recomputation makes again and what two
    layers send to the host; and that of the last layer that is recomputed as a whole, when the layers behind it have
    freed what they kept of this micro batch.
    """
    m, kept = stage.in_flight, sum(option.kept_bytes for option in options)
    staging = 2 * max(option.moved_bytes for option in options)
    replay = max((option.replay_bytes for option in options[num_full:]), default=0)
    peak = m * kept + max(replay + staging if num_full < len(options) else 0, stage.head_bytes)
    if num_full:
        of_full = sum(option.kept_bytes for option in options[:num_full])
        peak = max(peak, (m - 1) * kept + of_full + options[0].replay_bytes + staging)
    return stage.fixed_bytes + peak

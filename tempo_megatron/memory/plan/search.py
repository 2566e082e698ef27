"""Fills pipeline stages with layers of two options, as many of the one that keeps more as fit, and bounds others.

The layers of a stage are alike, so a choice is a number of layers for each option. `count_peak` says what the numbers
need, also for arrays: of all numbers of every two options of every stage at once. Only one layer is recomputed at a
time, so what its recomputation makes again counts once; of what layers send to the host that of two layers is on the
device at a time, and the last layer of a stage, which has none behind it to run meanwhile, sends nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tempo_megatron.memory.plan.choices import LayerOption

Groups = Sequence[tuple[Any, LayerOption]]
"""How many layers have which option."""


class Stage(NamedTuple):
    """One pipeline stage without what its layers' options add; or all stages, as arrays."""

    in_flight: Any
    head_bytes: Any
    """More than while a layer's backward runs, at the highest moment before that."""
    base_seconds: Any
    """Of one micro batch: products, and the weights' bytes."""


class Mode:
    """One kind of recomputation by Megatron, and every two options of its layers.

    Args:
        recompute: what Megatron recomputes.
        options: of the layers that are not recomputed as a whole, by ascending time.
        fulls: what layers that are recomputed as a whole have: lists with an option for each of `options`, which stand
            for the second of a pair; in the first list its own values. Without "full" none.
        numbers: how many layers of a stage may be recomputed as a whole.
        fixed_bytes: of each stage while a layer's backward runs, without what its recomputation makes again.
    """

    def __init__(
        self,
        recompute: frozenset[str],
        options: Sequence[LayerOption],
        fulls: Sequence[Sequence[LayerOption]],
        numbers: Sequence[int],
        fixed_bytes: Sequence[int],
    ) -> None:
        self.recompute, self.options, self.fulls = recompute, options, fulls
        self.ways = [(number, full) for full in fulls for number in numbers] or [(0, options)]
        self.fixed_bytes = np.array(fixed_bytes)
        first, second = np.triu_indices(len(options))
        kept = stack_options(options).kept_bytes
        is_mix = (first == second) | (kept[first] > kept[second])
        self.first, self.second = first[is_mix], second[is_mix]
        self.is_single = self.first == self.second

    def fill(
        self, stages: Stage, budget: int, host_bytes: int, num_layers: int, num_full: int, full: Sequence[LayerOption]
    ) -> tuple[Any, Any]:
        """For each stage and pair of options: how many layers behind the first `num_full`, which have options of
        `full`, have the first one, as many as fit; and the seconds of the stage, infinite where nothing fits."""
        first, second = stack_options(self.options, self.first), stack_options(self.options, self.second)
        whole, n = stack_options(full, self.second), num_layers - num_full
        # The most layers first, as they take least time.
        number, is_last = np.arange(max(n, 1))[::-1, None], int(n > 0)
        wholes = [(num_full - 1 + is_last, whole), (1 - is_last, whole.keep_all())]
        others = [(number, first), (n - is_last - number, second), (is_last, second.keep_all())]
        fits = count_peak(stages, wholes, others) <= budget - self.fixed_bytes[:, None, None]
        fits &= stages.in_flight * _add_up("moved_bytes", wholes, others) <= host_bytes
        # Of two options each has a layer.
        fits &= (number > 0) != self.is_single
        seconds = np.where(fits, stages.base_seconds + _add_up("seconds", wholes, others), math.inf)
        best = seconds.argmin(axis=1)
        return np.where(self.is_single, n, number[best, 0]), seconds.min(axis=1)

    def bound(self, stages: Stage, budget: int, num_layers: int) -> float:
        """Seconds of the slowest stage below which no choice takes: that of any two options in any fractions."""
        # Whole layers that are recomputed last have freed what the others kept.
        wholes = [option._replace(replay_bytes=0) for full in self.fulls for option in full]
        _, seconds, kept, replay, *_ = stack_options([*self.options, *wholes])
        more = np.maximum(np.maximum.outer(replay, replay), stages.head_bytes)
        each = (budget - self.fixed_bytes[:, None, None] - more) / stages.in_flight / num_layers
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.clip((each - kept) / (kept[:, None] - kept), 0, 1)
        share = np.where(kept[:, None] <= each, 1, share)
        mixed = share * seconds[:, None] + (1 - share) * seconds
        is_possible = (np.minimum.outer(kept, kept) <= each) & (kept[:, None] >= kept)
        least = np.min(mixed, axis=(1, 2), where=is_possible, initial=math.inf)
        return float(np.max(stages.base_seconds[:, 0, 0] + num_layers * least))


def count_peak(stage: Stage, wholes: Groups, others: Groups) -> Any:
    """What a stage holds beyond its fixed bytes, at the highest of three moments.

    They are the loss head; the begin of the last layer's backward, with what its recomputation makes again and what two
    layers send to the host; and that of the last layer that is recomputed as a whole, when the layers behind it have
    freed what they kept of this micro batch. `wholes` are those layers, `others` the layers behind them.
    """
    most = [(_get_most("replay_bytes", groups), _add_up("kept_bytes", groups)) for groups in (wholes, others)]
    (whole_replay, whole_kept), (replay, kept) = most
    again = np.maximum(replay, whole_replay - kept) + 2 * _get_most("moved_bytes", [*wholes, *others])
    return stage.in_flight * (whole_kept + kept) + np.maximum(again, stage.head_bytes)


def _add_up(name: str, *groups: Groups) -> Any:
    return sum(number * getattr(option, name) for group in groups for number, option in group)


def _get_most(name: str, groups: Groups) -> Any:
    """Of the layers that there are."""
    each: list[Any] = [np.where(np.greater(number, 0), getattr(option, name), 0) for number, option in groups]
    return functools.reduce(np.maximum, [0, *each])


def stack_options(options: Sequence[LayerOption], places: Any = slice(None)) -> LayerOption:
    """Options as one, of arrays."""
    return LayerOption(options[0].choice, *np.array([option[1:] for option in options], float).T[:, places])

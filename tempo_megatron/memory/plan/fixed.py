"""Takes from the estimate of a step what a rank holds whatever its layers keep, and the whole peak of a plan.

A plan is sought with the bytes that a formula gives for each layer, thousands of times a second. The estimate, which
follows the step of the real modules and takes a second or more, gives what stands around the layers, once, and then
the peak of the plan that was found (`tempo_megatron.memory.plan.verify`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from tempo_megatron.memory.estimate.estimate import RankEstimate, estimate_ranks
from tempo_megatron.memory.plan.formula import LayerShape, count_layer_bytes, count_stack_bytes
from tempo_megatron.memory.plan.planner import FixedBytes, LayerChoice, Plan
from tempo_megatron.memory.run import OptimizerSettings, Run
from tempo_megatron.models.shape import ModelShape
from tempo_megatron.settings.config import TempoConfig

_REFERENCE = {"activation": "inplace", "norm": "inplace", "dropout": "recompute", "attention": "flash"}


class PlanEstimates:
    """The estimates of one model and layout.

    Args:
        shape: the model.
        layout: without recomputation.
        layer: its layer, likewise.
        values: operation -> the values that the model can have.
        optimizer: who holds gradients and states.
        stock: whose modules stock ones are, as `count_layer_bytes` takes it.
        stock_attention: likewise.
    """

    def __init__(
        self,
        shape: ModelShape,
        layout: Run,
        layer: LayerShape,
        values: Mapping[str, Sequence[str]],
        optimizer: OptimizerSettings,
        *,
        stock: str,
        stock_attention: str = "fused",
    ) -> None:
        self._shape, self._layout, self._layer, self._optimizer = shape, layout, layer, optimizer
        self._stock, self._stock_attention = stock, stock_attention
        known: dict[str, Any] = {name: value for name, value in _REFERENCE.items() if value in values[name]}
        self._reference = dataclasses.replace(TempoConfig.off(), **known)
        self.estimate = functools.cache(self._estimate)

    def choose_loss(self, forms: Sequence[str]) -> str:
        """The form of the loss head with which the last stage needs less; of equals the first."""
        return min(forms, key=lambda form: self._estimate_reference(form, ())[-1].peak_bytes)

    def count_fixed_bytes(self, stage: int, loss: str) -> FixedBytes:
        """What the estimates of the model in Tempo's forms have beyond what its layers keep.

        Both estimates, without recomputation and with all layers recomputed as a whole, are the higher of two moments:
        in the loss head, and in a layer's backward, where the recomputed layer is there once more.
        """
        plain, full = (
            self._estimate_reference(loss, recompute)[stage].peak_bytes - self._count_kept(stage, recompute)
            for recompute in ((), ("full",))
        )
        again = self._count_layer(self._reference, frozenset())
        return FixedBytes(in_layers=min(plain, full - again), at_head=plain)

    def estimate_plan(self, plan: Plan) -> list[int]:
        """The peak of each stage of a plan, or a bound that is no lower.

        The estimate knows layers that are all recomputed as a whole, or none. Where a plan recomputes the first N of a
        stage, each moment of its step is one of these two: before the backward of the first N begins it is that of the
        step without recomputation, less what the N do not keep; after it, that of the step in which all are recomputed,
        with what the others keep of the micro batches that wait. The higher of the two peaks is no lower than the
        plan's.
        """
        config, per_stage = TempoConfig.from_dict(plan.block), len(plan.stages[0].layers)
        recompute = () if plan.num_full else tuple(sorted(plan.recompute))
        peaks = [each.peak_bytes for each in self.estimate(config, recompute)] if plan.num_full < per_stage else None
        full = [each.peak_bytes for each in self.estimate(config, ("full",))] if plan.num_full else None
        found = []
        for index, stage in enumerate(plan.stages):
            kept = [self._count_layer(choice.make_config(), choice.recompute) for choice in stage.choices]
            plain = [self._count_layer(choice.make_config(), frozenset()) for choice in stage.choices]
            candidates = []
            of_full, angles = slice(plan.num_full), self._count_stack_bytes(plan.recompute)
            if peaks is not None:
                saved = sum(plain[of_full]) - sum(kept[of_full]) - (angles if plan.num_full else 0)
                candidates.append(peaks[index] - stage.in_flight * saved)
            if full is not None:
                more = sum(kept[plan.num_full :]) - len(kept[plan.num_full :]) * self._layer.hidden_bytes
                candidates.append(full[index] + (stage.in_flight - 1) * more)
            found.append(max(candidates) + stage.in_flight * self._count_unseen(stage.choices))
        return found

    def _count_unseen(self, choices: Sequence[LayerChoice]) -> int:
        """What FlashAttention 2 keeps twice, of which the estimate does not know."""
        if self._stock_attention != "flash":
            return 0
        return sum(
            self._count_layer(choice.make_config(), choice.recompute)
            - count_layer_bytes(
                dataclasses.replace(self._layer, recompute=choice.recompute), choice.make_config(), stock=self._stock
            )
            for choice in choices
        )

    def _estimate_reference(self, loss: str, recompute: tuple[str, ...]) -> tuple[RankEstimate, ...]:
        return self.estimate(dataclasses.replace(self._reference, loss=loss), recompute)

    def _estimate(self, config: TempoConfig, recompute: tuple[str, ...]) -> tuple[RankEstimate, ...]:
        run = dataclasses.replace(self._layout, tempo=config, recompute=recompute, recompute_num_layers=None)
        return estimate_ranks(run)

    def _count_kept(self, stage: int, recompute: tuple[str, ...]) -> int:
        """What the reference's layers keep of all micro batches in flight."""
        stages = self._layout.pipeline_parallel
        in_flight = min(stages - stage, self._layout.num_micro_batches or stages)
        of_layer = self._count_layer(self._reference, frozenset(recompute))
        num_layers = self._shape.num_layers // stages
        return in_flight * (num_layers * of_layer + self._count_stack_bytes(frozenset(recompute)))

    def _count_layer(self, config: TempoConfig, recompute: frozenset[str]) -> int:
        layer = dataclasses.replace(self._layer, recompute=recompute)
        return count_layer_bytes(layer, config, stock=self._stock, stock_attention=self._stock_attention)

    def _count_stack_bytes(self, recompute: frozenset[str]) -> int:
        return count_stack_bytes(dataclasses.replace(self._layer, recompute=recompute), self._reference)

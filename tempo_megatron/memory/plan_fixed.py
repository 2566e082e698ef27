"""What a rank holds at its peak whatever its layers keep, from the estimate of a step.

The estimate follows one model, whose layers all have Tempo's forms; what the formula counts of these layers, and what
the planner counts of their recomputation, is taken away from its peak. The rest is weights, gradients, optimizer
states, buffers, embedding and head, and what a layer's backward makes for itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tempo_megatron.config import TempoConfig
from tempo_megatron.memory.estimate import RankEstimate, RankLayout, estimate_ranks
from tempo_megatron.memory.formula import LayerShape, count_layer_bytes, count_stack_bytes
from tempo_megatron.memory.model_states import OptimizerSettings
from tempo_megatron.models.shape import ModelShape

_REFERENCE = {"activation": "inplace", "norm": "inplace", "dropout": "recompute", "attention": "flash"}


class EstimatedFixedBytes:
    """`CountFixedBytes` of a model and a layout. Of a stage whose peak is the optimizer's step it is too large, by as
    much as that step has above the layers' backward: a plan never needs more than it says.

    Args:
        shape: the model.
        layout: without recomputation.
        layer: its layer, likewise.
        values: operation -> the values that the model can have.
        optimizer: who holds gradients and states.
    """

    def __init__(
        self,
        shape: ModelShape,
        layout: RankLayout,
        layer: LayerShape,
        values: Mapping[str, Sequence[str]],
        optimizer: OptimizerSettings,
    ) -> None:
        self._shape, self._layout, self._layer, self._optimizer = shape, layout, layer, optimizer
        self._values = {name: value if value in values[name] else "off" for name, value in _REFERENCE.items()}
        self._estimates = dict[tuple[str, frozenset[str]], tuple[RankEstimate, ...]]()

    def __call__(self, stage: int, loss: str, recompute: frozenset[str]) -> int:
        config = TempoConfig.from_dict({**self._values, "loss": loss})
        key = loss, recompute
        if key not in self._estimates:
            layout = dataclasses.replace(self._layout, recompute=tuple(sorted(recompute)))
            self._estimates[key] = estimate_ranks(self._shape, layout, config, optimizer=self._optimizer)
        layer = dataclasses.replace(self._layer, recompute=recompute)
        kept, without = (count_layer_bytes(each, config) for each in (layer, self._layer))
        stages = self._layout.pipeline_parallel
        num_layers = self._shape.num_layers // stages
        in_flight = min(stages - stage, self._layout.num_micro_batches or stages)
        replay = without if "full" in recompute else max(0, without - kept)
        of_layers = in_flight * (num_layers * kept + count_stack_bytes(layer, config)) + replay
        return self._estimates[key][stage].peak_bytes - of_layers

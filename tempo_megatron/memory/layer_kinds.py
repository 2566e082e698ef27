"""The ledger of a model in which single layers have values of their own: one layer of each kind is measured."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from tempo_megatron.config import TempoConfig
from tempo_megatron.layer_values import LAYER_OPERATIONS, write_layers
from tempo_megatron.memory.ledger import LayerKind, Ledger, measure
from tempo_megatron.slots.choices import choose
from tempo_megatron.slots.layer_spec import tempo_block_spec
from tempo_megatron.slots.report import report_on


def measure_model(
    transformer_config: TransformerConfig, tempo_config: TempoConfig, *, num_layers: int | None = None, **sizes: Any
) -> Ledger:
    """As `measure`, for a `tempo_config` that may have `layers`.

    Args:
        transformer_config, tempo_config: as `measure`'s.
        num_layers: layers of the whole model (default: transformer_config.num_layers).
        sizes: `measure`'s vocab_size, seq_length and micro_batch_size.

    Returns:
        The ledger of the first kind of layer, whose `layer_kinds` are all of them and whose `model_bytes` counts each.

    Raises ValueError as `tempoize`.
    """
    num_layers = num_layers or transformer_config.num_layers
    whole = dataclasses.replace(transformer_config, num_layers=num_layers)
    choices = choose(whole, tempo_config)
    report = report_on(tempo_block_spec(whole, tempo_config))
    kinds: dict[TempoConfig, list[int]] = {}
    for layer in range(num_layers):
        kinds.setdefault(choices.config.for_layer(layer), []).append(layer)
    measured = []
    for kind, layers in kinds.items():
        # The model around the layer has the values of the fields, whatever those of the layer are.
        values = {name: getattr(kind, name) for name in LAYER_OPERATIONS}
        config = dataclasses.replace(choices.config, layers={"0": values} if choices.config.layers else {})
        measured.append((layers, measure(transformer_config, config, num_layers=num_layers, **sizes)))
    return dataclasses.replace(
        measured[0][1],
        choices=choices,
        report=report,
        layer_kinds=tuple(
            LayerKind(write_layers(layers), len(layers), ledger.layer_bytes) for layers, ledger in measured
        ),
    )

"""Measures a model whose layers may have different settings: one layer of each kind."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from tempo_megatron.memory.kept.ledger import LayerKind, Ledger, make_gpt_shape, measure
from tempo_megatron.models.build import choose_for_model, make_specs
from tempo_megatron.models.shape import ModelShape
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.layer_values import LAYER_OPERATIONS, write_layers
from tempo_megatron.slots.report import TempoReport, report_on


def measure_model(
    transformer_config: TransformerConfig,
    tempo_config: TempoConfig,
    *,
    vocab_size: int,
    micro_batch_size: int = 1,
    shape: ModelShape | None = None,
    seq_length: int | None = None,
    num_layers: int | None = None,
) -> Ledger:
    """As `measure`, for a `tempo_config` that may have `layers`.

    Args:
        transformer_config, tempo_config, vocab_size, micro_batch_size: as `measure`'s.
        shape: the model, which is then measured at its own length (default: a GPT's as GPT-2).
        seq_length: the length of a model without a shape.
        num_layers: layers of the whole model (default: transformer_config.num_layers).

    Returns:
        The ledger of the first kind of layer, whose `layer_kinds` are all of them and whose `model_bytes` counts each.

    Raises ValueError as `tempoize`.
    """
    num_layers = num_layers or transformer_config.num_layers
    whole = dataclasses.replace(transformer_config, num_layers=num_layers)
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "micro_batch_size": micro_batch_size, "num_layers": num_layers}

    length = shape.seq_length if seq_length is None and shape is not None else seq_length
    assert length is not None
    sizes["seq_length"] = length
    one = shape or make_gpt_shape(whole, length)
    choices = choose_for_model(one, whole, tempo_config)
    specs = make_specs(one, whole, tempo_config)
    kinds: dict[tuple[TempoConfig, ...], list[int]] = {}
    for layer in range(num_layers):
        kinds.setdefault(tuple(choices.config.for_layer(layer, stack) for stack in specs), []).append(layer)
    measured = []
    for kind, layers in kinds.items():
        # The model around the layer has the values of the fields, whatever those of the layer are.
        values = {
            f"{stack} 0": {name: getattr(config, name) for name in LAYER_OPERATIONS}
            for stack, config in zip(specs, kind, strict=True)
        }
        config = dataclasses.replace(choices.config, layers=values if choices.config.layers else {})
        measured.append((layers, measure(transformer_config, config, shape=shape, on_fake_tensors=True, **sizes)))
    return dataclasses.replace(
        measured[0][1],
        choices=choices,
        report=sum((report_on(spec, choices) for spec in specs.values()), TempoReport()),
        layer_kinds=tuple(
            LayerKind(write_layers(layers), len(layers), ledger.layer_bytes) for layers, ledger in measured
        ),
    )

"""Adds Megatron's multi-token prediction to a chunk on fake tensors: further layers behind the last, each with a loss.

References are to megatron-core 0.16.1, from megatron/core/.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MTPLossLoggingHelper,
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from tempo_megatron.memory.run import Run
from tempo_megatron.models.build import prepare_for_recomputation
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.slots.block_slots import find_inner_name
from tempo_megatron.slots.dropout_rng import count_depths
from tempo_megatron.slots.layer_spec import tempoize


def note_losses(config: Any, number: int) -> None:
    """Let a chunk's head find the losses of `number` further tokens."""
    config.mtp_num_layers = number
    # Where losses are noted for a log, which else is made on a GPU.
    MTPLossLoggingHelper.tracker = {"values": torch.zeros(number, dtype=torch.float32)}


def place_final_norm(decoder: Any, *, has_norm: bool) -> None:
    """With multi-token prediction the final norm is in the chunk of the last layer (core/transformer/
    transformer_block.py: has_final_layernorm_in_this_stage), not in that of the head."""
    if not has_norm:
        decoder.final_layernorm = None
    elif decoder.final_layernorm is None:
        config = decoder.config
        values = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        decoder.final_layernorm = build_module(decoder.submodules.layer_norm, config=config, **values)


def put_multi_token_prediction(model: Any, layer_spec: Any, run: Run, tempo_config: TempoConfig) -> None:
    """Let the GPTModel of a chunk predict more tokens.

    Args:
        model: of the chunk. Where it has no embedding, it gets a copy (models/gpt/gpt_model.py:149).
        layer_spec: of the layer that each further token takes.
        run: whose multi-token prediction it is.
        tempo_config: the values of its layers, without "auto".
    """
    config, number = model.config, run.mtp_num_layers
    norm = WrappedTorchNorm
    of_layer = {find_inner_name(MultiTokenPredictionLayerSubmodules): layer_spec}
    layer = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=norm, hnorm=norm, eh_proj=ColumnParallelLinear, layer_norm=norm, **of_layer
        ),
    )
    layers = [layer] * (1 if run.mtp_repeats_layer else number)
    spec = tempoize(MultiTokenPredictionBlockSubmodules(layer_specs=layers), config, tempo_config)
    model.mtp = MultiTokenPredictionBlock(config, spec)
    if run.mtp_repeats_layer:
        # One layer, which runs for every token (--mtp-use-repeated-layer).
        model.mtp.layers = torch.nn.ModuleList([*model.mtp.layers] * number)
    count_depths(model.mtp.layers)
    prepare_for_recomputation(model.mtp, config)
    model.mtp_process = True
    if not model.pre_process:
        model.embedding = LanguageModelEmbedding(
            config,
            vocab_size=run.padded_vocab_size,
            max_sequence_length=run.model.max_position_embeddings,
            position_embedding_type=run.built_model.position_embedding_type,
        )

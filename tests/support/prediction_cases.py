"""A small GPT with multi-token prediction, and what a training step of it gives; as a script of script_ranks.py how
Tempo and stock differ in another Megatron, from 0.19 on."""

from __future__ import annotations

from typing import Any

import script_ranks
import torch
from gpt import (
    FULL,
    SEQ_LENGTH,
    build_gpt,
    differentiate,
    gpt_config,
    largest_gradient_error_eps,
    tokens_of,
)
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from sequence_parts import take_part

from tempo_megatron import TempoConfig, set_micro_batch, tempoize
from tempo_megatron.slots.dropout_rng import derive_site_key
from tempo_megatron.slots.megatron_versions import find_version

OFF = TempoConfig.off()
DEPTHS = 2
BATCH = 2
TOKENS = 4
REPEATED = {"mtp_use_repeated_layer": True, "mtp_detach_heads": True}


def make_prediction_spec(config: Any, tempo_config: TempoConfig | None) -> Any:
    """Megatron's own with None."""
    stock = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    spec = get_gpt_mtp_block_spec(config, stock, use_transformer_engine=False)
    return spec if tempo_config is None else tempoize(spec, config, tempo_config)


def build(tempo_config: TempoConfig, *, is_tied: bool = True, **settings: Any) -> Any:
    """In training mode, with weights that depend on the shapes only."""
    config = gpt_config(mtp_num_layers=DEPTHS, **settings)
    prediction = make_prediction_spec(config, tempo_config)
    model = build_gpt(config, tempo_config, share_embeddings_and_output_weights=is_tied, mtp_block_spec=prediction)
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        # The model often predicts one of the tokens that there are.
        rows = model.embedding.word_embeddings if is_tied else model.output_layer
        with torch.no_grad():
            rows.weight[:TOKENS] *= 8
    return model


def forward(model: Any, *, gives_mask: bool, gives_loss_mask: bool) -> Any:
    """The losses [b, s] of this context-parallel rank's tokens."""
    MTPLossLoggingHelper.tracker.clear()  # sized by the first model of a process
    set_micro_batch(5, 3)
    tokens = tokens_of(3, BATCH) % TOKENS
    positions = torch.arange(SEQ_LENGTH).expand(BATCH, -1)
    loss_mask = torch.ones(BATCH, SEQ_LENGTH)
    loss_mask[0, 2:5] = 0
    mask = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).triu(1) if gives_mask else None
    inputs, positions, labels, loss_mask = take_part(
        tokens[:, :-1].contiguous(), positions, tokens[:, 1:].contiguous(), loss_mask
    )
    more = {"loss_mask": loss_mask} if gives_loss_mask else {}
    return model(inputs, positions, mask, labels=labels, **more), loss_mask


def train(tempo_config: TempoConfig, *, gives_mask: bool, gives_loss_mask: bool = True, **settings: Any) -> Any:
    """(loss, gradients by name), what Megatron logs of the further tokens, and how many masks were drawn."""
    derive_site_key.cache_clear()  # of each mask it is asked for one
    model = build(tempo_config, **settings)
    losses, loss_mask = forward(model, gives_mask=gives_mask, gives_loss_mask=gives_loss_mask)
    num_masks = derive_site_key.cache_info().currsize
    result = differentiate(model, (losses * loss_mask).sum())
    logged = {name: value.tolist() for name, value in MTPLossLoggingHelper.tracker.items() if name.endswith("values")}
    return result, logged, num_masks


def measure_all(_: int) -> dict[str, Any]:
    found = {}
    for name, settings in {"layers": {}, "repeated, detached": REPEATED}.items():
        stock, log, _ = train(OFF, gives_mask=True, **settings)
        tempo, tempo_log, _ = train(TempoConfig(), gives_mask=False, **settings)
        plain, _, num_masks = train(TempoConfig(), gives_mask=False, dropout=0.1, **settings)
        again, _, _ = train(TempoConfig(), gives_mask=False, dropout=0.1, **settings, **FULL)
        found[name] = {
            "losses": [stock[0], tempo[0]],
            "gradient_error_eps": largest_gradient_error_eps(tempo[1], stock[1]),
            "logs": [log, tempo_log],
            "masks": num_masks,
            "recomputed": [plain[0] - again[0], largest_gradient_error_eps(again[1], plain[1])],
        }
    return {"version": str(find_version()), "found": found}


if __name__ == "__main__":
    script_ranks.main(measure_all)

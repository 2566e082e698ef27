"""One layer of GPT, BERT and T5, stock beside Tempo, in whatever megatron-core this process finds.

A script of script_ranks.py, which megatron_versions.py starts for each version.
"""

from __future__ import annotations

import functools
from typing import Any

import script_ranks
import torch
from beside_stock import compare
from gpt import (
    RECOMPUTE,
    bert_losses,
    build_bert,
    build_gpt,
    build_t5,
    gpt_config,
    losses,
    t5_losses,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch.nn import functional as F

from tempo_megatron import TempoConfig, tempo_block_spec, tempoize
from tempo_megatron.slots.megatron_versions import find_version
from tempo_megatron.slots.report import report_on

OFF = TempoConfig.off()
SWIGLU = {"activation_func": F.silu, "gated_linear_unit": True, "normalization": "RMSNorm"}
AGAIN = TempoConfig(
    activation="recompute", norm="recompute", attention="recompute", linear_fc1="recompute", linear_qkv="recompute"
)
RECOMPUTED_MLP = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}


def build(kind: str, config: Any, tempo_config: TempoConfig) -> Any:
    """Where Tempo is off nothing of ours stands in the model that ours is held against, and else no slot is left."""
    if kind == "GPT":
        stock = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
        model: Any = build_gpt(config, tempo_config, spec=stock if tempo_config.is_off else None)
    else:
        model = {"BERT": build_bert, "T5": build_t5}[kind](config, tempo_config)
    if not tempo_config.is_off:
        assert [slot for slot in report_on(model).left if slot.operation != "loss"] == []
    return model


def run(kind: str, model: Any, is_stock: bool) -> torch.Tensor:
    if kind == "GPT":
        return losses(model, 0, 2, gives_mask=is_stock)
    return {"BERT": bert_losses, "T5": t5_losses}[kind](model)


# Name -> (kind of model, settings of both, settings of Tempo's alone, which operations).
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], TempoConfig]] = {
    "GPT, in place": ("GPT", {}, {}, TempoConfig()),
    "GPT, recompute": ("GPT", {}, {}, RECOMPUTE),
    "GPT, SwiGLU and RMSNorm": ("GPT", SWIGLU, {}, RECOMPUTE),
    "GPT, linears again": ("GPT", SWIGLU, {}, AGAIN),
    # Some stock Megatrons never end here, so that their layer without recomputation is the reference.
    "GPT, mlp recomputed": ("GPT", {}, RECOMPUTED_MLP, TempoConfig()),
    "BERT": ("BERT", {}, {}, TempoConfig(loss="off")),
    "T5": ("T5", {}, {}, TempoConfig(loss="off")),
}


def measure(
    kind: str, settings: dict[str, Any], tempo_settings: dict[str, Any], tempo_config: TempoConfig
) -> dict[str, Any]:
    def make(chosen: TempoConfig) -> Any:
        return build(kind, gpt_config(num_layers=1, **settings, **({} if chosen.is_off else tempo_settings)), chosen)

    return compare(make, functools.partial(run, kind), tempo_config)


def dropped_loss(
    kind: str, settings: dict[str, Any], tempo_settings: dict[str, Any], tempo_config: TempoConfig
) -> float:
    """The loss at dropout 0.1, whose masks are a function of seed and place and so the same in every Megatron."""
    model = build(kind, gpt_config(num_layers=1, dropout=0.1, **settings, **tempo_settings), tempo_config)
    loss = run(kind, model, False).mean()
    loss.backward()
    return float(loss)


def what_is_left() -> dict[str, list[str]]:
    """Per kind of model, the lines of its report: Megatron writes what Tempo leaves in another way in each version."""
    experts = {"num_moe_experts": 2, "moe_layer_freq": [0, 1], "moe_router_topk": 2, "add_bias_linear": False}
    latent = MLATransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, qk_layernorm=True)
    latent_spec = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True)
    predicting = gpt_config(num_layers=1, mtp_num_layers=1)
    stock = get_gpt_decoder_block_spec(predicting, use_transformer_engine=False)
    prediction = get_gpt_mtp_block_spec(predicting, stock, use_transformer_engine=False)
    single = TempoConfig(layers={"0": {"activation": "recompute"}, "1": {"attention": "off"}})
    reports = {
        "experts": report_on(tempo_block_spec(gpt_config(**experts), TempoConfig())),
        "latent attention": report_on(tempoize(latent_spec, latent, TempoConfig())),
        "multi-token prediction": report_on(tempoize(prediction, predicting, TempoConfig())),
        "single layers": report_on(tempo_block_spec(gpt_config(num_layers=3), single)),
    }
    return {name: [report.describe_counts(), *report.describe_left()] for name, report in reports.items()}


def measure_all(_: int) -> dict[str, Any]:
    return {
        "version": str(find_version()),
        "cases": {name: measure(*case) for name, case in CASES.items()},
        "dropped": {name: dropped_loss(*case) for name, case in CASES.items()},
        "left": what_is_left(),
    }


if __name__ == "__main__":
    script_ranks.main(measure_all)

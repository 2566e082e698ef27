"""Layers of Qwen3-30B-A3B, DeepSeek-V3 and Llama at a small width: what they keep, by the allocator's own count."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import expert_cases
import torch
from gpt import gpt_config
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from tempo_megatron import TempoConfig

SEQ_LENGTH = 48
RECOMPUTED = TempoConfig(activation="recompute", norm="recompute", attention="flash")
GATHERED = dataclasses.replace(RECOMPUTED, moe_permute="recompute")
COMMON = {
    **expert_cases.FUSED,
    **expert_cases.HALF,
    **{"num_layers": 1, "normalization": "RMSNorm", "kv_channels": 8},
}
MIXTURE = {**COMMON, **expert_cases.ALL_TO_ALL, "moe_router_load_balancing_type": "aux_loss", "moe_router_topk": 8}
# A sixteenth of the width and of the heads' size, and as many heads and experts.
QWEN = {
    **{**MIXTURE, "moe_aux_loss_coeff": 1e-3, "qk_layernorm": True},
    **{"hidden_size": 128, "num_attention_heads": 32, "num_query_groups": 4},
    **{"num_moe_experts": 128, "moe_ffn_hidden_size": 48},
}
DEEPSEEK = {
    **{**MIXTURE, "moe_aux_loss_coeff": 1e-3, "qk_layernorm": True, "multi_latent_attention": True},
    **{"hidden_size": 448, "num_attention_heads": 128, "rope_type": "rope"},
    **{"q_lora_rank": 96, "kv_lora_rank": 32, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8},
    **{"num_moe_experts": 256, "moe_ffn_hidden_size": 128, "moe_shared_expert_intermediate_size": 128},
    **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32"},
    **{"moe_router_num_groups": 8, "moe_router_group_topk": 4},
    **{"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
}
LLAMA = {
    **COMMON,
    **{"hidden_size": 256, "ffn_hidden_size": 896, "num_attention_heads": 32, "num_query_groups": 8},
}
CASES: dict[str, tuple[dict[str, Any], TempoConfig]] = {
    "Qwen3-30B-A3B": (QWEN, RECOMPUTED),
    "Qwen3-30B-A3B, gathered again": (QWEN, GATHERED),
    "DeepSeek-V3": (DEEPSEEK, RECOMPUTED),
    "Llama-3-8B": (LLAMA, RECOMPUTED),
    "Llama-3-8B, fc1 again": (LLAMA, dataclasses.replace(RECOMPUTED, linear_fc1="recompute")),
}


def count_token(settings: dict[str, Any], tempo_config: TempoConfig, *, is_local: bool) -> int:
    """The bytes that a layer keeps for each token, in bf16: what the modules above keep where is_local, and those of
    Transformer Engine, whose attention's statistics the estimate leaves out beside recomputed up projections, where
    not."""
    h, a, d = (settings[name] for name in ("hidden_size", "num_attention_heads", "kv_channels"))
    found = 2 * (2 * h + 4)  # two norms' inputs, and a statistic of each
    if settings.get("multi_latent_attention"):
        q, kv, rope = (settings[name] for name in ("q_lora_rank", "kv_lora_rank", "qk_pos_emb_head_dim"))
        found += 2 * (q + kv + rope) + 2 * a * settings["v_head_dim"]  # both latent vectors, attention's output
        if is_local:
            # Behind norms of their own the up projections, which run again, start from the norms' output; logsumexp.
            found += 2 * (q + kv) + 2 * 4 + 4 * a
    else:
        found += 2 * (a + 2 * settings["num_query_groups"]) * d  # the projection's output
        found += 2 * a * d + 4 * a  # attention's output and its logsumexp
    if "num_moe_experts" not in settings:
        return found + (0 if tempo_config.linear_fc1 == "recompute" else 2 * 2 * settings["ffn_hidden_size"])
    k, width = settings["moe_router_topk"], 4 if settings.get("moe_router_dtype") == "fp32" else 2
    found += width * settings["num_moe_experts"]  # logits
    found += k * width  # the probabilities of its experts
    found += k * 2 * 2 * settings["moe_ffn_hidden_size"]  # the output of the first linear
    found += 2 * 2 * settings.get("moe_shared_expert_intermediate_size", 0)
    return found if tempo_config.moe_permute == "recompute" else found + k * 2 * h


def measure_all() -> dict[str, tuple[int, int]]:
    """Of each case, as `measure`."""
    expert_cases.prepare()
    return {name: measure(*case) for name, case in CASES.items()}


def measure(settings: dict[str, Any], tempo_config: TempoConfig) -> tuple[int, int]:
    """The bytes that a layer's forward takes from the allocator and does not give back, but for its output and with its
    input: of a token, and of a micro batch however many tokens it has."""
    config: TransformerConfig = gpt_config(
        MLATransformerConfig if "multi_latent_attention" in settings else TransformerConfig, **settings
    )
    # Without Transformer Engine Megatron does not define what its latent attention looks for.
    with mock.patch.object(multi_latent_attention, "TELinear", torch.nn.Bilinear):
        kind = "grouped" if "num_moe_experts" in settings else "sequential"
        model = expert_cases.build(config, tempo_config, kind)
    (layer,) = model.decoder.layers
    angles = None if "multi_latent_attention" in settings else model.rotary_pos_emb(SEQ_LENGTH)

    def run(batch: int) -> Tensor:
        x = torch.zeros(SEQ_LENGTH, batch, config.hidden_size, dtype=torch.bfloat16)
        out: Tensor = layer(x.normal_().requires_grad_(), attention_mask=None, rotary_pos_emb=angles)[0]
        return out

    kept = []
    for batch in (1, 1, 2):  # at first what exists once for all micro batches is made
        out, num_bytes = count_allocated(functools.partial(run, batch))
        kept.append(num_bytes - out.nbytes)
        out.float().sum().backward()
        del out
    growth = kept[2] - kept[1]
    assert growth % SEQ_LENGTH == 0
    return growth // SEQ_LENGTH, kept[1] - growth


def count_allocated(function: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """What function returns, and how many bytes of those that the CPU's allocator gave it are not free behind it."""
    gc.collect()
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        out = function()
        gc.collect()
    assert profile.kineto_results is not None
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    return out, sum(event.nbytes() for event in events)

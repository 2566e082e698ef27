"""Mixtral and Qwen 3's mixtures of experts: layers of Mistral and Qwen 3 with a router and experts as their MLP.

Their files have three weights of each expert. transformers 5 holds those of all experts of a layer in two tensors,
[experts, rows, columns], and may save them so (`save_original_format=False`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tempo_megatron.models.huggingface import llama
from tempo_megatron.models.huggingface.family import Config, Family, Fields
from tempo_megatron.words.expert_layers import parse_layer_frequency

_MIXTRAL, _QWEN = "MixtralForCausalLM", "Qwen3MoeForCausalLM"
# What neither has, beside latent attention and sinks; sinkhorn chooses experts otherwise, and capacity drops tokens.
_MODEL = {
    **{**llama.MODEL, "activation": "swiglu", "moe_router_score_function": "softmax"},
    **{"moe_shared_expert_intermediate_size": None, "moe_router_num_groups": None, "moe_router_group_topk": None},
    **{"moe_router_topk_scaling_factor": None, "moe_router_enable_expert_bias": False},
    **{"moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")},
    "moe_expert_capacity_factor": None,
}


def _name_modules(block: str, gate: str, up: str, down: str) -> dict[str, tuple[str, ...]]:
    """Names of a router and of experts, which `block` has in transformers' layer."""
    theirs, ours = f"model.layers.*.{block}", "decoder.layers.*.mlp"
    return {
        f"{ours}.router": (f"{theirs}.gate",),
        f"{ours}.experts.local_experts.*.linear_fc1": tuple(f"{theirs}.experts.*.{name}" for name in (gate, up)),
        f"{ours}.experts.local_experts.*.linear_fc2": (f"{theirs}.experts.*.{down}",),
    }


def _name_stacks(block: str, gate: str, up: str, down: str) -> dict[str, tuple[str, ...]]:
    return {
        "mlp.experts.gate_up_proj": tuple(f"{block}.experts.*.{name}.weight" for name in (gate, up)),
        "mlp.experts.down_proj": (f"{block}.experts.*.{down}.weight",),
    }


def _read_config(config: Config) -> Fields:
    config.check("hidden_act", "silu", "silu", "Megatron's experts have SwiGLU here")
    fields = llama.read_config(config)
    number = config.get("num_local_experts", None)
    config.get("output_router_logits", False)  # whether transformers adds the auxiliary loss; the trainer does
    fields |= {
        "num_experts": config.get("num_experts") if number is None else number,
        "moe_router_topk": config.get("num_experts_per_tok"),
        # With tokens spread evenly transformers' loss is the experts per token, Megatron's is 1.
        "moe_aux_loss_coeff": config.get("router_aux_loss_coef", 0.001) * config.get("num_experts_per_tok"),
    }
    if config.get("model_type") == "mixtral":
        config.check("router_jitter_noise", 0.0, 0.0, "the trainer's routers have no noise")
        return fields
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", None) or ()
    has = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(fields["num_layers"])]
    return {
        **fields,
        "moe_ffn_hidden_size": config.get("moe_intermediate_size"),
        "moe_layer_freq": "1" if all(has) else str(has).replace(" ", ""),
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
    }


def _build_config(run: Mapping[str, Any], name: str) -> dict[str, Any]:
    size = run["moe_ffn_hidden_size"] or run["ffn_hidden_size"]
    config = {
        **llama.build_config(run, name),
        "num_experts_per_tok": run["moe_router_topk"],
        "router_aux_loss_coef": run["moe_aux_loss_coeff"] / run["moe_router_topk"],
    }
    if name == _MIXTRAL:
        return {**config, "model_type": "mixtral", "intermediate_size": size, "num_local_experts": run["num_experts"]}
    has = parse_layer_frequency(run["moe_layer_freq"], run["num_layers"])
    return {
        **config,
        "model_type": "qwen3_moe",
        "num_experts": run["num_experts"],
        "moe_intermediate_size": size,
        "norm_topk_prob": not run["moe_router_pre_softmax"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, has_experts in enumerate(has) if not has_experts],
    }


def _make_family(kind: str, name: str, modules: tuple[str, str, str, str], **values: Any) -> Family:
    return Family(
        model_types=(kind,),
        prefix="model.",
        names={**llama.FAMILY.names, **_name_modules(*modules)},
        classes={name: {**_MODEL, **values}},
        read_config=_read_config,
        build_config=_build_config,
        has_head_size=True,
        has_experts=True,
        stacks=_name_stacks(*modules),
        buffers=llama.FAMILY.buffers,
    )


MIXTRAL = _make_family(
    "mixtral", _MIXTRAL, ("block_sparse_moe", "w1", "w3", "w2"), moe_layer_freq="1", moe_router_pre_softmax=False
)
QWEN = _make_family("qwen3_moe", _QWEN, ("mlp", "gate_proj", "up_proj", "down_proj"), qk_layernorm=True)

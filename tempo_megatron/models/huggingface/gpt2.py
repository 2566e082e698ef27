"""GPT-2: absolute positions, LayerNorm, GELU; linears are [in, out], and c_attn has queries, keys and values in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tempo_megatron.models.huggingface.family import GELU_FORMS, Config, Family, Fields, read_fields, write_fields

_NAMES = {
    "embedding.word_embeddings": ("transformer.wte",),
    "embedding.position_embeddings": ("transformer.wpe",),
    "decoder.layers.*.input_layernorm": ("transformer.h.*.ln_1",),
    "decoder.layers.*.self_attention.linear_qkv": ("transformer.h.*.attn.c_attn",),
    "decoder.layers.*.self_attention.linear_proj": ("transformer.h.*.attn.c_proj",),
    "decoder.layers.*.pre_mlp_layernorm": ("transformer.h.*.ln_2",),
    "decoder.layers.*.mlp.linear_fc1": ("transformer.h.*.mlp.c_fc",),
    "decoder.layers.*.mlp.linear_fc2": ("transformer.h.*.mlp.c_proj",),
    "decoder.final_layernorm": ("transformer.ln_f",),
    "output_layer": ("lm_head",),
}
_SIZES = {
    **{"num_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head"},
    **{"max_position_embeddings": "n_positions", "vocab_size": "vocab_size"},
}
# What MegatronBert has too.
GELU_MODEL = {
    **{"activation": "gelu", "normalization": "LayerNorm", "qk_layernorm": False, "add_bias_linear": True},
    **{"position_embedding_type": "learned_absolute", "window_size": None},
}


def _read_config(config: Config) -> Fields:
    scaling = "Megatron divides scores by the square root of a head's size"
    config.check("scale_attn_weights", True, True, scaling)
    config.check("scale_attn_by_inverse_layer_idx", False, False, scaling)
    config.check("reorder_and_upcast_attn", False, False, scaling)
    config.check("add_cross_attention", False, False, "Megatron's GPT has a decoder only")
    sizes = read_fields(config, _SIZES)
    config.get("embd_pdrop", 0.1)  # Megatron has one probability for embedding and layers
    return {
        "family": "gpt",
        **sizes,
        "ffn_hidden_size": config.get("n_inner", None) or 4 * sizes["hidden_size"],
        "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "activation": "gelu",
        "gelu_form": config.choose("activation_function", "gelu_new", GELU_FORMS),
        "init_method_std": config.get("initializer_range", 0.02),
        "hidden_dropout": config.get("resid_pdrop", 0.1),
        "attention_dropout": config.get("attn_pdrop", 0.1),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", True),
    }


def _build_config(run: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": [name],
        **write_fields(run, _SIZES),
        "n_inner": run["ffn_hidden_size"],
        "activation_function": {"tanh": "gelu_new", "erf": "gelu"}[run["gelu_form"]],
        "layer_norm_epsilon": run["norm_epsilon"],
        "initializer_range": run["init_method_std"],
        "attn_pdrop": run["attention_dropout"],
        "embd_pdrop": run["hidden_dropout"],
        "resid_pdrop": run["hidden_dropout"],
    }


FAMILY = Family(
    model_types=("gpt2",),
    prefix="transformer.",
    names=_NAMES,
    classes={"GPT2LMHeadModel": {"family": "gpt", **GELU_MODEL}},
    read_config=_read_config,
    build_config=_build_config,
    has_transposed_linears=True,
    buffers=(r"(.*\.)?attn\.(bias|masked_bias)",),
)

"""Llama, Mistral, Qwen 2 and Qwen 3: rope, RMSNorm, a gated MLP, grouped heads of keys and values.

Mistral has a sliding window, Qwen 2 biases of queries, keys and values, Qwen 3 norms of queries and keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tempo_megatron.models.huggingface.family import (
    GELU_FORMS,
    SIZES,
    Config,
    Family,
    Fields,
    read_fields,
    write_fields,
)

_LAYER = "model.layers.*"
_NAMES = {
    "embedding.word_embeddings": ("model.embed_tokens",),
    "decoder.layers.*.input_layernorm": (f"{_LAYER}.input_layernorm",),
    "decoder.layers.*.self_attention.linear_qkv": tuple(f"{_LAYER}.self_attn.{name}_proj" for name in "qkv"),
    "decoder.layers.*.self_attention.q_layernorm": (f"{_LAYER}.self_attn.q_norm",),
    "decoder.layers.*.self_attention.k_layernorm": (f"{_LAYER}.self_attn.k_norm",),
    "decoder.layers.*.self_attention.linear_proj": (f"{_LAYER}.self_attn.o_proj",),
    "decoder.layers.*.pre_mlp_layernorm": (f"{_LAYER}.post_attention_layernorm",),
    "decoder.layers.*.mlp.linear_fc1": (f"{_LAYER}.mlp.gate_proj", f"{_LAYER}.mlp.up_proj"),
    "decoder.layers.*.mlp.linear_fc2": (f"{_LAYER}.mlp.down_proj",),
    "decoder.final_layernorm": ("model.norm",),
    "output_layer": ("lm_head",),
}
_LLAMA, _MISTRAL = "LlamaForCausalLM", "MistralForCausalLM"
_WINDOWED = ("mistral", "mixtral")  # where a window is all that it takes
_UNIFORM = (*_WINDOWED, "qwen3_moe")  # all layers have it
_GATES = {"silu": ("swiglu", None), **{name: ("geglu", form) for name, form in GELU_FORMS.items()}}
MODEL = {
    **{"family": "gpt", "activation": ("swiglu", "geglu"), "normalization": "RMSNorm", "add_bias_linear": False},
    **{"position_embedding_type": "rope", "rotary_percent": 1.0, "qk_layernorm": False, "add_qkv_bias": False},
    "window_attn_skip_freq": None,
}
# Llama 3's scaling of rope. In Megatron all but the factor are constants.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_config(config: Config) -> Fields:
    """Returns what a model with this attention, with or without experts, has of ModelShape's fields."""
    kind, sizes = config.get("model_type"), read_fields(config, SIZES)
    heads, hidden_size = sizes["num_attention_heads"], sizes["hidden_size"]
    has_biases = bool(config.get("attention_bias", False))
    if has_biases != bool(config.get("mlp_bias", False)):
        config.refuse(
            "attention_bias", has_biases, "mlp_bias is another, and Megatron has biases in all linears or in q, k and v"
        )
    activation, gelu_form = config.choose("hidden_act", "silu", _GATES)
    base, scaling_factor = _read_rope(config)
    window = _read_window(config, kind)
    return {
        "family": "gpt",
        **sizes,
        "num_query_groups": config.get("num_key_value_heads", None) or heads,
        "kv_channels": config.get("head_dim", None) or (128 if kind == "qwen3" else hidden_size // heads),
        "normalization": "RMSNorm",
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "activation": activation,
        "gelu_form": gelu_form,
        "position_embedding_type": "rope",
        "rotary_base": base,
        "use_rope_scaling": scaling_factor is not None,
        **({} if scaling_factor is None else {"rope_scaling_factor": scaling_factor}),
        "qk_layernorm": kind in ("qwen3", "qwen3_moe"),
        "add_bias_linear": has_biases,
        "add_qkv_bias": kind == "qwen2",
        # transformers counts the token itself, Megatron only those before it.
        "window_size": [window - 1, 0] if window else None,
        "init_method_std": config.get("initializer_range", 0.02),
        "hidden_dropout": 0.0,
        "attention_dropout": config.get("attention_dropout", 0.0),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
    }


def _read_rope(config: Config) -> tuple[int, float | None]:
    """Returns rope's base and the factor of Llama 3's scaling, None without it.

    transformers 5 writes both as rope_parameters, transformers 4 as rope_theta and rope_scaling.
    """
    of_5, of_4 = config.get("rope_parameters", None), config.get("rope_scaling", None)
    name, scaling = ("rope_scaling", of_4) if of_5 is None else ("rope_parameters", of_5)
    scaling = dict(scaling or {})
    base = scaling.pop("rope_theta", config.get("rope_theta", 10000.0))
    if base != int(base):
        config.refuse("rope_theta", base, "expected a whole number, as Megatron's --rotary-base is")
    config.check("partial_rotary_factor", 1.0, 1.0, "rope turns all channels of a head in these models")
    if (share := scaling.pop("partial_rotary_factor", 1.0)) != 1.0:
        config.refuse(name, of_5 or of_4, f"partial_rotary_factor is {share}, and rope turns all channels of a head")
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    if kind == "default":
        return int(base), None
    factor = scaling.pop("factor", None)
    if kind != "llama3" or factor is None or scaling != _LLAMA3:
        wanted = ", ".join(f"{key} {value}" for key, value in _LLAMA3.items())
        config.refuse(name, of_5 or of_4, f"Megatron scales rope as Llama 3 does or not at all: llama3 with {wanted}")
    return int(base), float(factor)


def _read_window(config: Config, kind: str) -> int | None:
    window, is_used = config.get("sliding_window", None), config.get("use_sliding_window", False)
    layers = set(config.get("layer_types", None) or ())
    if not window or not (kind in _WINDOWED or is_used):
        if layers - {"full_attention"}:
            config.refuse("layer_types", sorted(layers), "expected full_attention, as there is no sliding window")
        return None
    if layers - {"sliding_attention"} or (not layers and kind not in _UNIFORM and config.get("max_window_layers", 28)):
        config.refuse(
            "sliding_window",
            window,
            "max_window_layers or layer_types leaves layers without it; Megatron has one for all",
        )
    return int(window)


def build_config(run: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The opposite of read_config, for one of the classes."""
    gate = "silu" if run["activation"] == "swiglu" else {"tanh": "gelu_pytorch_tanh", "erf": "gelu"}[run["gelu_form"]]
    config = {
        "model_type": name.removesuffix("ForCausalLM").lower(),
        "architectures": [name],
        **write_fields(run, SIZES),
        "num_key_value_heads": run["num_query_groups"],
        "head_dim": run["kv_channels"],
        "initializer_range": run["init_method_std"],
        "hidden_act": gate,
        "rms_norm_eps": run["norm_epsilon"],
        "attention_dropout": run["attention_dropout"],
        "rope_theta": float(run["rotary_base"]),
    }
    if run["use_rope_scaling"]:
        config["rope_scaling"] = {"rope_type": "llama3", "factor": run["rope_scaling_factor"], **_LLAMA3}
    if name == _LLAMA:
        config |= {"attention_bias": run["add_bias_linear"], "mlp_bias": run["add_bias_linear"]}
    elif run["window_size"] is not None:
        # Layers from max_window_layers on use it.
        config |= {"sliding_window": run["window_size"][0] + 1, "use_sliding_window": True, "max_window_layers": 0}
    return config


FAMILY = Family(
    model_types=("llama", "mistral", "qwen2", "qwen3"),
    prefix="model.",
    names=_NAMES,
    classes={
        _LLAMA: {**MODEL, "add_bias_linear": (False, True), "window_size": None},
        _MISTRAL: MODEL,
        "Qwen2ForCausalLM": {**MODEL, "add_qkv_bias": True},
        "Qwen3ForCausalLM": {**MODEL, "qk_layernorm": True},
    },
    read_config=read_config,
    build_config=build_config,
    has_head_size=True,
    buffers=(r".*\.rotary_emb\.inv_freq",),
)

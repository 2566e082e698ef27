"""Reads the shape of a model from the config.json of a Hugging Face model that Megatron's GPTModel can be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tempo_megatron.words.json_text import read_object

_GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
_LLAMAS = ("llama", "mistral", "qwen2", "qwen3")


def read_huggingface_config(path: str | Path) -> dict[str, Any]:
    """Values for `make_shape`, without seq_length, of which a config.json says nothing.

    path: the file, or the folder of a model.

    Raises ValueError for a model that no ModelShape is.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    config = read_object(file)
    kind = config.get("model_type")
    try:
        if kind == "gpt2":
            return _read_gpt2(config)
        if kind in _LLAMAS:
            return _read_llama(config, kind)
    except KeyError as error:
        raise ValueError(f"--hf {file} has no {error.args[0]}, which a {kind} has; give a whole config.json") from error
    raise ValueError(
        f"--hf {file} is of model_type {kind!r}, which the estimate does not know; it knows gpt2, {', '.join(_LLAMAS)}"
    )


def _read_gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": config["n_layer"],
        "hidden_size": config["n_embd"],
        "num_attention_heads": config["n_head"],
        "ffn_hidden_size": config.get("n_inner") or 4 * config["n_embd"],
        "max_position_embeddings": config["n_positions"],
        "vocab_size": config["vocab_size"],
        "make_vocab_size_divisible_by": 1,
        # One for what Megatron has one for.
        "hidden_dropout": config.get("resid_pdrop", 0.1),
        "attention_dropout": config.get("attn_pdrop", 0.1),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", True),
    }


def _read_llama(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Llama, Mistral, Qwen 2 and Qwen 3. Raises ValueError for biases and windows that no ModelShape has."""
    heads = config["num_attention_heads"]
    has_biases = config.get("attention_bias", False)
    if has_biases != config.get("mlp_bias", False):
        raise ValueError(
            "attention_bias and mlp_bias of the config.json differ, and a ModelShape has biases in all linears, in q, "
            "k and v, or in none"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in _GATED:
        raise ValueError(f"hidden_act of the config.json is {activation!r}; expected one of {', '.join(_GATED)}")
    window = config.get("sliding_window") if kind == "mistral" or config.get("use_sliding_window") else None
    if window and kind != "mistral" and config.get("max_window_layers", 0):
        raise ValueError("max_window_layers of the config.json leaves layers without a window, which no ModelShape has")
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "max_position_embeddings": config["max_position_embeddings"],
        "vocab_size": config["vocab_size"],
        "make_vocab_size_divisible_by": 1,
        "normalization": "RMSNorm",
        "activation": _GATED[activation],
        "position_embedding_type": "rope",
        "qk_layernorm": kind == "qwen3",
        "add_bias_linear": bool(has_biases),
        "add_qkv_bias": kind == "qwen2",
        # transformers counts the token itself, Megatron only those before it.
        "window_size": [window - 1, 0] if window else None,
        "hidden_dropout": 0.0,
        "attention_dropout": config.get("attention_dropout", 0.0),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
    }

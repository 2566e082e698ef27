"""The weights of the trainer's GPT: Megatron's names and shapes, how tensor parallelism divides them, GPT-2's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tempo_megatron.models.shape import complete_description

# Module -> the dimension of its weight that tensor parallelism divides; its bias is divided where that is 0.
_DIVIDED = {
    "word_embeddings": 0,
    "linear_qkv": 0,
    "linear_fc1": 0,
    "linear_proj": 1,
    "linear_fc2": 1,
    "output_layer": 0,
}
# Module of a layer -> GPT-2's name in Hugging Face's transformers.
_GPT2_LAYER = {
    "input_layernorm": "ln_1",
    "self_attention.linear_qkv": "attn.c_attn",
    "self_attention.linear_proj": "attn.c_proj",
    "pre_mlp_layernorm": "ln_2",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}
_GPT2_NORMS = ("ln_1", "ln_2")


# What `list_weight_shapes` knows: a GPT-2's parts. Other models train and resume, and cannot be exported yet.
_GPT2_PARTS = {
    "family": "gpt",
    "activation": "gelu",
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "qk_layernorm": False,
    "add_bias_linear": True,
    "window_size": None,
}


def find_export_obstacle(run: Mapping[str, Any]) -> str | None:
    """One sentence, what of the model that run.json describes no export is for; None where it is a GPT-2."""
    described = complete_description(run)
    parts = {**_GPT2_PARTS, "num_query_groups": run["num_attention_heads"]}
    parts["kv_channels"] = run["hidden_size"] // run["num_attention_heads"]
    for name, expected in parts.items():
        if described[name] != expected:
            return f"its {name} is {described[name]}, but what can be exported is a GPT-2, whose {name} is {expected}"
    return None


def list_weight_shapes(run: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape, not divided, of every weight of the model that run.json describes."""
    h, ffn, vocab = run["hidden_size"], run["ffn_hidden_size"], run["padded_vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (vocab, h),
        "embedding.position_embeddings.weight": (run["max_position_embeddings"], h),
        "decoder.final_layernorm.weight": (h,),
        "decoder.final_layernorm.bias": (h,),
    }
    for layer in range(run["num_layers"]):
        for module, weight in (
            ("input_layernorm", (h,)),
            ("self_attention.linear_qkv", (3 * h, h)),
            ("self_attention.linear_proj", (h, h)),
            ("pre_mlp_layernorm", (h,)),
            ("mlp.linear_fc1", (ffn, h)),
            ("mlp.linear_fc2", (h, ffn)),
        ):
            shapes[f"decoder.layers.{layer}.{module}.weight"] = weight
            shapes[f"decoder.layers.{layer}.{module}.bias"] = weight[:1]
    if run["untie_embeddings_and_output_weights"]:
        shapes["output_layer.weight"] = (vocab, h)
    return shapes


def join_ranks(parts: list[Tensor], name: str) -> tuple[Tensor, float]:
    """Join one weight from its tensor-parallel parts; also returns how far apart ranks are that each hold the whole.

    Such weights get equal gradients, but a GPU may add those of the positions in another order on each rank; rank 0's
    is the one returned.
    """
    module, kind = name.split(".")[-2:]
    dimension = _DIVIDED.get(module)
    if dimension is not None and (kind == "weight" or dimension == 0):
        return torch.cat(parts, dim=dimension), 0.0
    return parts[0], max((part - parts[0]).abs().max().item() for part in parts)


def convert_to_gpt2(weights: Mapping[str, Tensor], run: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights under GPT-2's names in transformers, in its layout, without the vocabulary's padding.

    Megatron's linear_qkv has, per head, rows of q, k and v; GPT-2's c_attn has all of q, then of k, then of v, and
    GPT-2's linears are [in, out]. A tied output layer has no weight of its own.
    """
    vocab_size, heads = run["vocab_size"], run["num_attention_heads"]
    renamed = {
        "transformer.wte.weight": weights["embedding.word_embeddings.weight"][:vocab_size],
        "transformer.wpe.weight": weights["embedding.position_embeddings.weight"],
        "transformer.ln_f.weight": weights["decoder.final_layernorm.weight"],
        "transformer.ln_f.bias": weights["decoder.final_layernorm.bias"],
    }
    for layer in range(run["num_layers"]):
        for ours, theirs in _GPT2_LAYER.items():
            for kind in ("weight", "bias"):
                value = weights[f"decoder.layers.{layer}.{ours}.{kind}"]
                if theirs == "attn.c_attn":
                    value = value.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
                if kind == "weight" and theirs not in _GPT2_NORMS:
                    value = value.t()
                renamed[f"transformer.h.{layer}.{theirs}.{kind}"] = value
    if "output_layer.weight" in weights:
        renamed["lm_head.weight"] = weights["output_layer.weight"][:vocab_size]
    return renamed


def build_gpt2_config(run: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """config.json of the same model in transformers; what it leaves out is as GPT-2's defaults have it."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": run["vocab_size"],
        "n_positions": run["max_position_embeddings"],
        "n_embd": run["hidden_size"],
        "n_layer": run["num_layers"],
        "n_head": run["num_attention_heads"],
        "n_inner": run["ffn_hidden_size"],
        "activation_function": {"tanh": "gelu_new", "erf": "gelu"}[run["gelu_form"]],
        "layer_norm_epsilon": run.get("norm_epsilon", 1e-5),
        "attn_pdrop": run["attention_dropout"],
        "embd_pdrop": run["hidden_dropout"],
        "resid_pdrop": run["hidden_dropout"],
        "tie_word_embeddings": not run["untie_embeddings_and_output_weights"],
        "bos_token_id": run["end_of_document"],
        "eos_token_id": run["end_of_document"],
        "torch_dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
    }

"""Tiny random models of transformers, a family each, and what Megatron computes with the weights of one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from tempo_megatron import TempoConfig

GPT2_SIZES = {"vocab_size": 90, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
SIZES = {
    **{"vocab_size": 90, "max_position_embeddings": 32, "hidden_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "intermediate_size": 48},
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# What is built -> its class in transformers and its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", {**GPT2_SIZES, "n_inner": 80}),
    "GPT-2, erf, untied": (
        "GPT2LMHeadModel",
        {**GPT2_SIZES, "activation_function": "gelu", "tie_word_embeddings": False},
    ),
    "Llama 2": ("LlamaForCausalLM", {**SIZES, "rms_norm_eps": 1e-5}),
    "Llama 3.2": (
        "LlamaForCausalLM",
        {
            **{**GROUPED, "tie_word_embeddings": True},
            "rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 32.0, **_LLAMA3},
        },
    ),
    "Llama, biases, geglu": (
        "LlamaForCausalLM",
        {**GROUPED, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "Mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 5}),
    "Qwen 2": ("Qwen2ForCausalLM", SIZES | {"num_key_value_heads": 1}),
    "Qwen 3": ("Qwen3ForCausalLM", {**GROUPED, "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}}),
    "Mixtral": ("MixtralForCausalLM", {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "sliding_window": 5}),
    "Qwen 3, experts": (
        "Qwen3MoeForCausalLM",
        {
            **{**GROUPED, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{"mlp_only_layers": [0], "norm_topk_prob": False},
        },
    ),
    "BERT": ("MegatronBertForPreTraining", {**SIZES, "pad_token_id": None}),
    "RoBERTa": ("MegatronBertForMaskedLM", {**SIZES, "type_vocab_size": 1, "tie_word_embeddings": False}),
}
EXPERTS = ("Mixtral", "Qwen 3, experts")
OFTEN = ("GPT-2", "Llama 3.2", "Mistral", "Qwen 2", "Qwen 3", *EXPERTS, "BERT", "RoBERTa")
"""One of each family and way to convert; the others have what these have, otherwise combined."""


def build(name: str, **changes: Any) -> Any:
    """The model of a row of MODELS in evaluation, with weights at which no norm and no bias is what it starts as."""
    import transformers

    kind, values = MODELS[name]
    config = getattr(transformers, kind).config_class(**{**values, **changes})
    torch.manual_seed(len(name))
    model = getattr(transformers, kind)(config).eval()
    for key, parameter in model.named_parameters():
        parameter.data.normal_(0, 0.2)
        if "norm" in key.lower() or ".ln" in key:
            parameter.data += 1
    if values.get("type_vocab_size") == 1:
        model.bert.embeddings.token_type_embeddings.weight.data.zero_()
        model.cls.predictions.bias.data.copy_(model.cls.predictions.decoder.bias.data)  # nothing reads the first
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, **options)
    return folder


def call(model: Any, tokens: torch.Tensor, types: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """The logits of a model of transformers, and those of its binary head if it has one."""
    segments = {} if types is None else {"token_type_ids": types}
    with torch.no_grad():
        found: tuple[torch.Tensor, ...] = model(tokens, **segments).to_tuple()
    return found[:2] if type(model).__name__ == "MegatronBertForPreTraining" else found[:1]


def megatron_logits(
    run_json: dict[str, Any], weights: dict[str, torch.Tensor], tokens: torch.Tensor, types: torch.Tensor | None = None
) -> Any:
    """[b, s, padded vocabulary] of a stock model with these weights; a BERT's with those of its binary head."""
    from tempo_megatron.models.build import build_model, build_transformer_config
    from tempo_megatron.models.shape import NAMES, make_shape

    length = tokens.size(1)
    shape = make_shape(**{"seq_length": length, **{name: run_json[name] for name in NAMES if name in run_json}})
    config = build_transformer_config(shape, fuse_gelu=run_json["gelu_form"] == "tanh")
    model = build_model(shape, config, TempoConfig.off(), run_json["padded_vocab_size"]).eval()
    left = model.load_state_dict(weights, strict=False)
    assert not left.unexpected_keys and all(name.endswith("_extra_state") for name in left.missing_keys)
    with torch.no_grad():
        if shape.family == "bert":
            found, binary = model(tokens, torch.ones_like(tokens), tokentype_ids=types)
            return found if binary is None else (found, binary)
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        return model(tokens, torch.arange(length).expand_as(tokens), mask)


def megatron_logits_of_all(cases: list[tuple[Any, ...]]) -> list[Any]:
    """megatron_logits of several models in one process, which does not wait for a compiler of Megatron's fused GELU."""
    with torch.compiler.set_stance("force_eager"):
        return [megatron_logits(*case) for case in cases]

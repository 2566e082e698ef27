"""Megatron-BERT: BERT as Megatron trains it, whose norms come before attention and MLP; RoBERTa has no binary head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tempo_megatron.models.huggingface.family import SIZES, Config, Family, Fields, read_fields, write_fields
from tempo_megatron.models.huggingface.gpt2 import GELU_MODEL

_LAYER = "bert.encoder.layer.*"
_NAMES = {
    "embedding.word_embeddings": ("bert.embeddings.word_embeddings",),
    "embedding.position_embeddings": ("bert.embeddings.position_embeddings",),
    "embedding.tokentype_embeddings": ("bert.embeddings.token_type_embeddings",),
    "encoder.layers.*.input_layernorm": (f"{_LAYER}.attention.ln",),
    "encoder.layers.*.self_attention.linear_qkv": tuple(
        f"{_LAYER}.attention.self.{name}" for name in ("query", "key", "value")
    ),
    "encoder.layers.*.self_attention.linear_proj": (f"{_LAYER}.attention.output.dense",),
    "encoder.layers.*.pre_mlp_layernorm": (f"{_LAYER}.ln",),
    "encoder.layers.*.mlp.linear_fc1": (f"{_LAYER}.intermediate.dense",),
    "encoder.layers.*.mlp.linear_fc2": (f"{_LAYER}.output.dense",),
    "encoder.final_layernorm": ("bert.encoder.ln",),
    "lm_head.dense": ("cls.predictions.transform.dense",),
    "lm_head.layer_norm": ("cls.predictions.transform.LayerNorm",),
    "output_layer": ("cls.predictions.decoder",),
    "pooler.dense": ("bert.pooler.dense",),
    "binary_head": ("cls.seq_relationship",),
}
_MASKED, _WITH_BINARY_HEAD = "MegatronBertForMaskedLM", "MegatronBertForPreTraining"
# The head's GELU is the erf form, and the config has one activation for both.
_MODEL = {"family": "bert", **GELU_MODEL, "gelu_form": "erf"}


def _read_config(config: Config) -> Fields:
    names = config.get("architectures")
    if names not in ([_MASKED], [_WITH_BINARY_HEAD]):
        config.refuse("architectures", names, f"expected {_MASKED} or {_WITH_BINARY_HEAD}, which have a head to train")
    config.check("hidden_act", "gelu", "gelu", "the head of Megatron's BERT has the erf form of GELU")
    config.check("position_embedding_type", "absolute", "absolute", "Megatron's BERT has no other that is in files")
    for name in ("is_decoder", "add_cross_attention"):
        config.check(name, False, False, "Megatron's BERT is an encoder")
    kinds = config.get("type_vocab_size", 2)
    return {
        "family": "bert",
        **read_fields(config, SIZES),
        "norm_epsilon": config.get("layer_norm_eps", 1e-12),
        "activation": "gelu",
        "gelu_form": "erf",
        "init_method_std": config.get("initializer_range", 0.02),
        "hidden_dropout": config.get("hidden_dropout_prob", 0.1),
        "attention_dropout": config.get("attention_probs_dropout_prob", 0.1),
        # transformers has at least one kind of segment; see tensors.list_zeros.
        "num_tokentypes": 0 if kinds == 1 else kinds,
        "add_binary_head": names == [_WITH_BINARY_HEAD],
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", True),
    }


def _build_config(run: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {
        "model_type": "megatron-bert",
        "architectures": [name],
        **write_fields(run, SIZES),
        "initializer_range": run["init_method_std"],
        "type_vocab_size": run["num_tokentypes"] or 1,
        "hidden_act": "gelu",
        "layer_norm_eps": run["norm_epsilon"],
        "attention_probs_dropout_prob": run["attention_dropout"],
        "hidden_dropout_prob": run["hidden_dropout"],
        "pad_token_id": None,
    }


FAMILY = Family(
    model_types=("megatron-bert",),
    prefix="bert.",
    names=_NAMES,
    classes={
        _MASKED: {**_MODEL, "add_binary_head": False},
        _WITH_BINARY_HEAD: {**_MODEL, "add_binary_head": True},
    },
    read_config=_read_config,
    build_config=_build_config,
    buffers=(r"(bert\.)?embeddings\.position_ids",),
)

"""The shape that is read from a config.json is that of the model whose export wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tempo_megatron.models.huggingface_config import read_huggingface_config
from tempo_megatron.models.shape import make_shape
from tempo_megatron.training.checkpoint_files import huggingface

COMMON = {
    **{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "max_position_embeddings": 32},
    **{"vocab_size": 100, "make_vocab_size_divisible_by": 1, "attention_dropout": 0.0, "hidden_dropout": 0.0},
}
LLAMA = {
    **{"normalization": "RMSNorm", "position_embedding_type": "rope", "activation": "swiglu", "num_query_groups": 2},
    **{"add_bias_linear": False, "untie_embeddings_and_output_weights": True, "kv_channels": 32},
}
SHAPES = {
    huggingface.GPT2: {},
    huggingface.LLAMA: LLAMA,
    huggingface.MISTRAL: {**LLAMA, "window_size": (15, 0)},
    huggingface.QWEN2: {**LLAMA, "add_qkv_bias": True},
    huggingface.QWEN3: {**LLAMA, "qk_layernorm": True, "activation": "geglu"},
}


@pytest.mark.parametrize("name", SHAPES)
def test_what_export_writes_is_read_back(name: str, tmp_path: Path) -> None:
    shape = make_shape(**COMMON, **SHAPES[name])
    build = huggingface._build_gpt2_config if name == huggingface.GPT2 else huggingface._build_llama_config
    run: dict[str, Any] = {**shape.describe(), "gelu_form": "tanh"}
    config = build(run, name) | {"tie_word_embeddings": not shape.untie_embeddings_and_output_weights}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert make_shape(**read_huggingface_config(tmp_path), seq_length=32) == shape


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "mamba"}, "which the estimate does not know"),
        ({"model_type": "llama"}, "has no num_attention_heads"),
        ({"model_type": "llama", "num_attention_heads": 2, "attention_bias": True, "mlp_bias": False}, "differ"),
        ({"model_type": "qwen2", "num_attention_heads": 2, "hidden_act": "relu"}, "hidden_act"),
    ],
)
def test_what_no_shape_is_is_refused(config: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match=sentence):
        read_huggingface_config(tmp_path / "config.json")

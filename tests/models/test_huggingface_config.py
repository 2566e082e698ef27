"""The shape that is read from a config.json is that of the model whose export wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func
from run_configs import NEEDED, decide
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tempo_megatron.cli import main
from tempo_megatron.models.huggingface.config import build_config, find_class, read_config
from tempo_megatron.models.shape import make_shape
from tempo_megatron.models.shape_file import read_shape_file

COMMON = {
    **{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "max_position_embeddings": 32},
    **{"vocab_size": 100, "make_vocab_size_divisible_by": 1, "attention_dropout": 0.0, "hidden_dropout": 0.0},
}
LLAMA = {
    **{"normalization": "RMSNorm", "position_embedding_type": "rope", "activation": "swiglu", "num_query_groups": 2},
    **{"add_bias_linear": False, "untie_embeddings_and_output_weights": True, "kv_channels": 32},
}
SCALED = {"use_rope_scaling": True, "rope_scaling_factor": 32.0, "rotary_base": 500000}
EXPERTS = {"num_experts": 6, "moe_router_topk": 3, "moe_aux_loss_coeff": 0.02}
SHAPES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"norm_epsilon": 1e-6, "init_method_std": 0.01},
    "LlamaForCausalLM": {**LLAMA, **SCALED},
    "MistralForCausalLM": {**LLAMA, "window_size": (15, 0)},
    "Qwen2ForCausalLM": {**LLAMA, "add_qkv_bias": True, "rotary_base": 1000000},
    "Qwen3ForCausalLM": {**LLAMA, "qk_layernorm": True, "activation": "geglu"},
    "MixtralForCausalLM": {**LLAMA, **EXPERTS, "window_size": (15, 0)},
    "Qwen3MoeForCausalLM": {
        **{**LLAMA, **EXPERTS, "qk_layernorm": True, "moe_ffn_hidden_size": 24},
        **{"moe_layer_freq": "[0,1]", "moe_router_pre_softmax": True},
    },
    "MegatronBertForMaskedLM": {"family": "bert"},
    "MegatronBertForPreTraining": {"family": "bert", "num_tokentypes": 2, "add_binary_head": True},
}


@pytest.mark.parametrize("name", SHAPES)
def test_what_export_writes_is_read_back(name: str, tmp_path: Path) -> None:
    shape = make_shape(**COMMON, **SHAPES[name])
    gelu_form = {"gelu": "erf" if shape.family == "bert" else "tanh", "geglu": "tanh"}.get(shape.activation)
    run: dict[str, Any] = {**shape.describe(), "gelu_form": gelu_form, "end_of_document": 7}
    assert find_class(run)[0] == name
    (tmp_path / "config.json").write_text(json.dumps(build_config(run, "float32")), encoding="utf-8")
    found = read_config(tmp_path)
    assert make_shape(**{**found.fields, "make_vocab_size_divisible_by": 1}, seq_length=32) == shape
    assert (found.gelu_form, found.unread) == (gelu_form, [])
    assert found.special_tokens == {"bos_token_id": 7, "eos_token_id": 7}
    for path in (tmp_path, tmp_path / "config.json"):  # what --model takes
        assert make_shape(**read_shape_file(path), seq_length=32) == shape


@pytest.mark.parametrize("command", ["estimate", "flops"])
def test_model_takes_a_config_json_or_its_folder_as_hf_does(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = make_shape(**COMMON, **SHAPES["LlamaForCausalLM"])
    run: dict[str, Any] = {**shape.describe(), "gelu_form": None, "end_of_document": 7}
    (tmp_path / "config.json").write_text(json.dumps(build_config(run, "float32")), encoding="utf-8")
    of_ours = {**COMMON, **SHAPES["LlamaForCausalLM"]}
    (folder := tmp_path / "ours").mkdir()
    (folder / f"{tmp_path.name}.json").write_text(json.dumps(of_ours), encoding="utf-8")
    given = [["--model", str(path)] for path in (folder / f"{tmp_path.name}.json", tmp_path, tmp_path / "config.json")]
    given += [["--hf", str(tmp_path)]] if command == "estimate" else []
    told = set()
    for words in given:
        assert main([command, *words, "--seq-length", "32"]) == 0
        told.add(capsys.readouterr().out)
    assert len(told) == 1


def test_a_model_type_that_is_not_known_is_told_of_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"], "model_type": "bert"}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"^--model .* is of model_type 'bert', which is no model of the trainer"):
        read_shape_file(tmp_path)


@pytest.mark.parametrize(("activation", "is_fused"), [("gelu_new", True), ("gelu", False)])
def test_the_trainer_takes_sizes_and_the_form_of_gelu_of_a_config_json(
    activation: str, is_fused: bool, tmp_path: Path
) -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": 100}
    content = {**config, "activation_function": activation, "architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    run = decide(tmp_path, *NEEDED, "--model", str(tmp_path), "--seq-length", "32", "--num-attention-heads", "2")
    assert (run.model.num_layers, run.model.hidden_size, run.model.num_attention_heads) == (3, 64, 2)
    assert run.bias_gelu_fusion == is_fused


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "mamba"}, "which is no model of the trainer; expected one of gpt2, llama"),
        ({"model_type": "llama"}, "has no num_attention_heads"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "expected False: Megatron divides scores"),
        ({"model_type": "megatron-bert", "architectures": ["MegatronBertModel"]}, "which have a head to train"),
    ],
)
def test_what_no_shape_is_is_refused(config: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match=sentence):
        read_config(tmp_path / "config.json")


def test_the_auxiliary_loss_weighs_as_much_in_both() -> None:
    """Of three experts for each token, transformers' loss is three times Megatron's."""
    shape = make_shape(**COMMON, **SHAPES["MixtralForCausalLM"])
    top_k, num_experts = shape.moe_router_topk, EXPERTS["num_experts"]
    logits = torch.randn(10, num_experts)
    scores = logits.softmax(dim=-1)
    counts = torch.zeros_like(scores).scatter_(1, scores.topk(top_k).indices, 1.0).sum(dim=0)
    ours = switch_load_balancing_loss_func(scores, counts, len(logits), top_k, num_experts, shape.moe_aux_loss_coeff)
    written = build_config({**shape.describe(), "gelu_form": None, "end_of_document": 7}, "float32")
    theirs = written["router_aux_loss_coef"] * load_balancing_loss_func((logits,), num_experts, top_k)
    assert theirs.item() == pytest.approx(ours.item(), rel=1e-5)

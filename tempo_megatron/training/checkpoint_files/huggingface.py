"""Converts the weights of a trained GPT or BERT to those of a class of Hugging Face's transformers, with config.json.

A class is used only if it computes exactly what was trained, activation and norms included.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

LLAMA, MISTRAL, QWEN2, QWEN3 = (f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3"))
GPT2 = "GPT2LMHeadModel"
BERT, BERT_WITH_HEAD = "MegatronBertForMaskedLM", "MegatronBertForPreTraining"

_GELU = {"family": "gpt", "activation": "gelu", "normalization": "LayerNorm", "qk_layernorm": False}
_GELU |= {"position_embedding_type": "learned_absolute", "add_bias_linear": True, "window_size": None}
_BERT = {**_GELU, "family": "bert", "gelu_form": "erf"}  # the head's form is erf, and the config has one for both
_HEADS, _GATES = "num_attention_heads", ("swiglu", "geglu")
_GATED = {"family": "gpt", "activation": _GATES, "normalization": "RMSNorm", "add_bias_linear": False}
_GATED |= {"position_embedding_type": "rope", "rotary_percent": 1.0, "qk_layernorm": False, "add_qkv_bias": False}
Modules = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]
"""Megatron's name of a module -> the shape of its weight, and which of "weight" and "bias" it has."""
# Class -> the values that run.json must have for it; a tuple allows any of its values. The first that fits is used.
_CLASSES: dict[str, dict[str, Any]] = {
    GPT2: _GELU,
    LLAMA: {**_GATED, "add_bias_linear": (False, True), "window_size": None},
    MISTRAL: _GATED,
    QWEN2: {**_GATED, "add_qkv_bias": True},
    QWEN3: {**_GATED, "qk_layernorm": True},
    BERT: {**_BERT, "add_binary_head": False},
    BERT_WITH_HEAD: {**_BERT, "add_binary_head": True},
}

# Megatron's module -> the modules of transformers that share the rows of its weight; * is a layer's number.
_GPT2_NAMES: dict[str, tuple[str, ...]] = {
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
_LLAMA_NAMES: dict[str, tuple[str, ...]] = {
    "embedding.word_embeddings": ("model.embed_tokens",),
    "decoder.layers.*.input_layernorm": ("model.layers.*.input_layernorm",),
    "decoder.layers.*.self_attention.linear_qkv": tuple(f"model.layers.*.self_attn.{name}_proj" for name in "qkv"),
    "decoder.layers.*.self_attention.q_layernorm": ("model.layers.*.self_attn.q_norm",),
    "decoder.layers.*.self_attention.k_layernorm": ("model.layers.*.self_attn.k_norm",),
    "decoder.layers.*.self_attention.linear_proj": ("model.layers.*.self_attn.o_proj",),
    "decoder.layers.*.pre_mlp_layernorm": ("model.layers.*.post_attention_layernorm",),
    "decoder.layers.*.mlp.linear_fc1": ("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"),
    "decoder.layers.*.mlp.linear_fc2": ("model.layers.*.mlp.down_proj",),
    "decoder.final_layernorm": ("model.norm",),
    "output_layer": ("lm_head",),
}
_BERT_LAYER = "bert.encoder.layer.*"
_BERT_NAMES: dict[str, tuple[str, ...]] = {
    "embedding.word_embeddings": ("bert.embeddings.word_embeddings",),
    "embedding.position_embeddings": ("bert.embeddings.position_embeddings",),
    "embedding.tokentype_embeddings": ("bert.embeddings.token_type_embeddings",),
    "encoder.layers.*.input_layernorm": (f"{_BERT_LAYER}.attention.ln",),
    "encoder.layers.*.self_attention.linear_qkv": tuple(
        f"{_BERT_LAYER}.attention.self.{name}" for name in ("query", "key", "value")
    ),
    "encoder.layers.*.self_attention.linear_proj": (f"{_BERT_LAYER}.attention.output.dense",),
    "encoder.layers.*.pre_mlp_layernorm": (f"{_BERT_LAYER}.ln",),
    "encoder.layers.*.mlp.linear_fc1": (f"{_BERT_LAYER}.intermediate.dense",),
    "encoder.layers.*.mlp.linear_fc2": (f"{_BERT_LAYER}.output.dense",),
    "encoder.final_layernorm": ("bert.encoder.ln",),
    "lm_head.dense": ("cls.predictions.transform.dense",),
    "lm_head.layer_norm": ("cls.predictions.transform.LayerNorm",),
    "output_layer": ("cls.predictions.decoder",),
    "pooler.dense": ("bert.pooler.dense",),
    "binary_head": ("cls.seq_relationship",),
}
_NAMES = {GPT2: _GPT2_NAMES, BERT: _BERT_NAMES, BERT_WITH_HEAD: _BERT_NAMES}


def find_class(run: Mapping[str, Any]) -> str:
    """Returns the class of transformers that computes what the model of `run` does.

    Raises ValueError if there is none; it names the nearest class and the first difference.
    """
    of_family = [name for name, expected in _CLASSES.items() if expected["family"] == run["family"]]
    differences = {name: list(_list_differences(name, run)) for name in of_family}
    nearest = min(differences, key=lambda name: len(differences[name]))
    if not differences[nearest]:
        return nearest
    field, expected = differences[nearest][0]
    raise ValueError(
        f"no class of transformers that export knows is this model: its {field} is {run[field]}, and that of the "
        f"nearest one, {nearest}, is {expected}; give --format megatron"
    )


def _list_differences(name: str, run: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    expected = dict(_CLASSES[name])
    if name in (GPT2, BERT, BERT_WITH_HEAD):
        heads = run["num_attention_heads"]
        expected |= {"num_query_groups": heads, "kv_channels": run["hidden_size"] // heads}
    for field, values in expected.items():
        if run[field] not in (values if isinstance(values, tuple) else (values,)):
            yield field, " or ".join(map(str, values)) if isinstance(values, tuple) else values


def convert(weights: Mapping[str, Tensor], run: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the weights by their names in transformers, in its order of rows, without the vocabulary's padding.

    Megatron's linear_qkv has, for each group of heads, the rows of its queries, its key and its value. transformers has
    all queries, then all keys, then all values: as three weights, or in GPT-2 as one, whose linears are [in, out]. A
    gated linear_fc1 begins with the rows of the gate. A tied output layer has no weight of its own.

    Raises ValueError if a weight is missing, has another shape than in this model, or does not belong to it.
    """
    name, left, converted = find_class(run), dict(weights), {}
    heads, groups = run["num_attention_heads"], run["num_query_groups"]
    names = _NAMES.get(name, _LLAMA_NAMES)
    for module, (shape, kinds) in list_modules(run).items():
        pattern = re.sub(r"\.\d+\.", ".*.", module)
        layer = "".join(re.findall(r"\.(\d+)\.", module))
        for kind in kinds:
            key, expected = f"{module}.{kind}", shape if kind == "weight" else shape[:1]
            value = left.pop(key, None)
            if value is None:
                raise ValueError(f"the model of run.json has {key}, the checkpoint has not; {_UNCHANGED}")
            if value.shape != expected:
                raise ValueError(f"{key} has the shape {list(value.shape)}, expected {list(expected)}; {_UNCHANGED}")
            parts: Iterable[Tensor] = (value,)
            if module in ("embedding.word_embeddings", "output_layer"):
                parts = (value[: run["vocab_size"]],)
            elif pattern.endswith("linear_qkv"):
                parts = value.unflatten(0, (groups, heads // groups + 2, -1)).split([heads // groups, 1, 1], dim=1)
                parts = [part.flatten(0, 2) for part in parts]
            elif pattern.endswith("linear_fc1"):
                parts = value.chunk(len(names[pattern]))
            if name == GPT2 and ".linear_" in module:
                whole = torch.cat(list(parts))
                parts = (whole.t() if kind == "weight" else whole,)
            for theirs, part in zip(names[pattern], parts, strict=True):
                converted[f"{theirs.replace('*', layer)}.{kind}"] = part
    if left:
        raise ValueError(f"the checkpoint has {min(left)}, the model of run.json has not; {_UNCHANGED}")
    if names is _BERT_NAMES:
        converted["cls.predictions.bias"] = converted["cls.predictions.decoder.bias"].clone()
        if not run["num_tokentypes"]:  # transformers has at least one kind of segment, and adds its embedding
            converted["bert.embeddings.token_type_embeddings.weight"] = torch.zeros(
                1, run["hidden_size"], dtype=torch.float32
            )
    return converted


_UNCHANGED = "give a checkpoint whose files were not changed"


def list_modules(run: Mapping[str, Any]) -> Modules:
    """Lists Megatron's modules of the model that `run` describes."""
    h, ffn, vocab, heads = (run[name] for name in ("hidden_size", "ffn_hidden_size", "padded_vocab_size", _HEADS))
    head, is_bert, gates = run["kv_channels"], run["family"] == "bert", 2 if run["activation"] in _GATES else 1
    queries, rows = heads * head, (heads + 2 * run["num_query_groups"]) * head
    weight: tuple[str, ...] = ("weight",)
    both = ("weight", "bias")
    norm = both if run["normalization"] == "LayerNorm" else weight
    linear = both if run["add_bias_linear"] else weight
    stack = "encoder" if is_bert else "decoder"
    modules: Modules = {"embedding.word_embeddings": ((vocab, h), weight)}
    if run["position_embedding_type"] == "learned_absolute":
        modules["embedding.position_embeddings"] = (run["max_position_embeddings"], h), weight
    if run["num_tokentypes"]:
        modules["embedding.tokentype_embeddings"] = (run["num_tokentypes"], h), weight
    for layer in (f"{stack}.layers.{number}" for number in range(run["num_layers"])):
        modules[f"{layer}.input_layernorm"] = (h,), norm
        modules[f"{layer}.self_attention.linear_qkv"] = (rows, h), both if run["add_qkv_bias"] else linear
        if run["qk_layernorm"]:
            modules |= {f"{layer}.self_attention.{name}_layernorm": ((head,), norm) for name in "qk"}
        modules[f"{layer}.self_attention.linear_proj"] = (h, queries), linear
        modules[f"{layer}.pre_mlp_layernorm"] = (h,), norm
        modules[f"{layer}.mlp.linear_fc1"] = (gates * ffn, h), linear
        modules[f"{layer}.mlp.linear_fc2"] = (h, ffn), linear
    modules[f"{stack}.final_layernorm"] = (h,), norm
    own = weight if run["untie_embeddings_and_output_weights"] else ()
    modules["output_layer"] = (vocab, h), (*own, "bias") if is_bert else own
    if is_bert:
        modules |= {"lm_head.dense": ((h, h), both), "lm_head.layer_norm": ((h,), both)}
    if run["add_binary_head"]:
        modules |= {"pooler.dense": ((h, h), both), "binary_head": ((2, h), both)}
    return modules


def build_config(run: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Returns the config.json of the model; fields that it leaves out have the defaults of its class."""
    name = find_class(run)
    build: Callable[[Mapping[str, Any], str], dict[str, Any]] = _build_llama_config
    if name in (GPT2, BERT, BERT_WITH_HEAD):
        build = _build_gpt2_config if name == GPT2 else _build_bert_config
    return {
        **build(run, name),
        "tie_word_embeddings": not run["untie_embeddings_and_output_weights"],
        "bos_token_id": run["end_of_document"],
        "eos_token_id": run["end_of_document"],
        "torch_dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
    }


def _build_gpt2_config(run: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": [name],
        "vocab_size": run["vocab_size"],
        "n_positions": run["max_position_embeddings"],
        "n_embd": run["hidden_size"],
        "n_layer": run["num_layers"],
        "n_head": run["num_attention_heads"],
        "n_inner": run["ffn_hidden_size"],
        "activation_function": {"tanh": "gelu_new", "erf": "gelu"}[run["gelu_form"]],
        "layer_norm_epsilon": run["norm_epsilon"],
        "attn_pdrop": run["attention_dropout"],
        "embd_pdrop": run["hidden_dropout"],
        "resid_pdrop": run["hidden_dropout"],
    }


def _build_sizes(run: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {
        "architectures": [name],
        "vocab_size": run["vocab_size"],
        "hidden_size": run["hidden_size"],
        "intermediate_size": run["ffn_hidden_size"],
        "num_hidden_layers": run["num_layers"],
        "num_attention_heads": run["num_attention_heads"],
        "max_position_embeddings": run["max_position_embeddings"],
        "initializer_range": run["init_method_std"],
    }


def _build_bert_config(run: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {
        "model_type": "megatron-bert",
        **_build_sizes(run, name),
        "type_vocab_size": run["num_tokentypes"] or 1,
        "hidden_act": "gelu",
        "layer_norm_eps": run["norm_epsilon"],
        "attention_probs_dropout_prob": run["attention_dropout"],
        "hidden_dropout_prob": run["hidden_dropout"],
        "pad_token_id": None,
    }


def _build_llama_config(run: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Builds the config of Llama, Mistral, Qwen 2 or Qwen 3."""
    gate = "silu" if run["activation"] == "swiglu" else {"tanh": "gelu_pytorch_tanh", "erf": "gelu"}[run["gelu_form"]]
    config = {
        "model_type": name.removesuffix("ForCausalLM").lower(),
        **_build_sizes(run, name),
        "num_key_value_heads": run["num_query_groups"],
        "head_dim": run["kv_channels"],
        "hidden_act": gate,
        "rms_norm_eps": run["norm_epsilon"],
        "attention_dropout": run["attention_dropout"],
        "rope_theta": float(run["rotary_base"]),
    }
    if run["use_rope_scaling"]:  # Llama 3's; in Megatron all but the factor are constants
        config["rope_scaling"] = {"rope_type": "llama3", "factor": run["rope_scaling_factor"]}
        config["rope_scaling"] |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        config["rope_scaling"]["original_max_position_embeddings"] = 8192
    if name == LLAMA:
        config |= {"attention_bias": run["add_bias_linear"], "mlp_bias": run["add_bias_linear"]}
    elif name == MISTRAL or run["window_size"] is not None:
        # transformers counts the token itself, Megatron only those before it. Layers from max_window_layers on use it.
        config |= {"sliding_window": run["window_size"][0] + 1, "use_sliding_window": True, "max_window_layers": 0}
    return config

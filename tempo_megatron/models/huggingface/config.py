"""Reads the config.json of a model that Megatron computes exactly, and writes that of a model that it has trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tempo_megatron.models.huggingface import experts, gpt2, llama, megatron_bert
from tempo_megatron.models.huggingface.family import Config, Family, Fields
from tempo_megatron.words.json_text import read_object

_FAMILIES = (gpt2.FAMILY, llama.FAMILY, experts.MIXTRAL, experts.QWEN, megatron_bert.FAMILY)
_NORMS = "its norms come after attention and MLP, and those of Megatron's BERT before them; megatron-bert has them so"
_POSITIONS = "its embedding has a norm, which Megatron's BERT lacks; megatron-bert has none"
_T5 = (
    "its scores are not scaled and have a bias by relative position, its norms are RMSNorm and no linear has a bias; "
    "Megatron's T5, as the trainer builds it, scales them and has learned positions, LayerNorm and biases"
)
_LATENT = "its attention is latent and a bias balances its experts; import has no names for their weights"
_GPT_OSS = "its attention has sinks and its experts have biases; import has no names for these"
# Model types that people will try, and why there is no table for them.
_REFUSED = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "albert", "electra"), _NORMS),
    "roberta-prelayernorm": _POSITIONS,
    **dict.fromkeys(("t5", "mt5", "umt5"), _T5),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _LATENT),
    "gpt_oss": _GPT_OSS,
}
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclasses.dataclass(frozen=True)
class ReadModel:
    """What a config.json says."""

    family: Family
    fields: Fields
    """For `make_shape`, without seq_length, of which a config.json says nothing."""
    gelu_form: str | None
    """tanh or erf; None without a GELU."""
    special_tokens: Mapping[str, Any]
    """Those of its bos_token_id, eos_token_id and pad_token_id that it has; one may be a list."""
    unread: list[str]
    """Names that are not known here; a model that depends on them computes something else."""


def is_config(path: str | Path) -> bool:
    """Whether `path` is a model's config.json or its folder, and no file of configs/model.

    Raises OSError if it cannot be read, ValueError if it is no JSON object.
    """
    return Path(path).is_dir() or not read_object(path).keys().isdisjoint(("architectures", "model_type"))


def read_config_fields(path: str | Path) -> Fields:
    """Returns what read_config says, for `make_shape`; the vocabulary is not padded, as the weights' is not."""
    return {"make_vocab_size_divisible_by": 1, **read_config(path).fields}


def read_config(path: str | Path) -> ReadModel:
    """Reads a config.json.

    path: the file, or the folder of a model.

    Raises ValueError, in one sentence, for a model that no ModelShape is. Raises OSError if it cannot be read.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    config = Config(file)
    kind = config.get("model_type", None)
    for family in _FAMILIES:
        if kind in family.model_types:
            fields = family.read_config(config)
            gelu_form = fields.pop("gelu_form")
            special = {name: config.get(name) for name in _SPECIAL if config.get(name, None) is not None}
            if config.get("quantization_config", None):
                config.refuse("quantization_config", "given", "its weights are quantised; give a folder of whole ones")
            return ReadModel(family, fields, gelu_form, special, config.list_unread())
    known = ", ".join(name for family in _FAMILIES for name in family.model_types)
    why = f" ({_REFUSED[kind]})" if kind in _REFUSED else ""
    raise ValueError(
        f"{file} is of model_type {kind!r}, which is no model of the trainer{why}; expected one of {known}"
    )


def find_class(run: Mapping[str, Any]) -> tuple[str, Family]:
    """Returns the class of transformers that computes what the model of `run` does, and its family.

    Args:
        run: the content of a checkpoint's run.json: the fields of ModelShape, and gelu_form.

    Raises ValueError if there is none; it names the nearest class and the first difference.
    """
    candidates = {
        name: (family, list(_list_differences(family, name, run)))
        for family in _FAMILIES
        for name, expected in family.classes.items()
        if expected["family"] == run["family"]
    }
    if not candidates:
        raise ValueError(f"transformers' T5 is another model: {_T5}; give --format megatron")
    has_experts = run.get("num_experts") is not None

    def rank(name: str) -> tuple[bool, int]:
        family, differences = candidates[name]
        return family.has_experts != has_experts, len(differences)

    nearest = min(candidates, key=rank)
    family, differences = candidates[nearest]
    if not differences:
        return nearest, family
    field, expected = differences[0]
    raise ValueError(
        f"no class of transformers that export knows is this model: its {field} is {run[field]}, and that of the "
        f"nearest one, {nearest}, is {expected}; give --format megatron"
    )


def _list_differences(family: Family, name: str, run: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    expected = dict(family.classes[name])
    if not family.has_head_size:
        heads = run["num_attention_heads"]
        expected |= {"num_query_groups": heads, "kv_channels": run["hidden_size"] // heads}
    has_experts = run.get("num_experts") is not None
    if has_experts != family.has_experts:
        yield "num_experts", "a number" if family.has_experts else None
    for field, value in {"multi_latent_attention": False, "softmax_type": "vanilla"}.items():
        if run.get(field, value) != value:
            yield field, value
    for field, values in expected.items():
        if run[field] not in (values if isinstance(values, tuple) else (values,)):
            yield field, " or ".join(map(str, values)) if isinstance(values, tuple) else values


def build_config(run: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Returns the config.json of the model; fields that it leaves out have the defaults of its class.

    Args:
        run: as for find_class, also vocab_size and end_of_document, or special_tokens where they are known.
        dtype: of the weights, as torch calls it.

    Raises ValueError as find_class does.
    """
    name, family = find_class(run)
    return {
        **family.build_config(run, name),
        "tie_word_embeddings": not run["untie_embeddings_and_output_weights"],
        **find_special_tokens(run),
        "torch_dtype": dtype,
    }


def find_special_tokens(run: Mapping[str, Any]) -> dict[str, Any]:
    """Returns bos_token_id, eos_token_id and perhaps pad_token_id of a model's tokenizer."""
    known: Mapping[str, Any] | None = run.get("special_tokens")
    return dict.fromkeys(_SPECIAL[:2], run["end_of_document"]) if known is None else dict(known)

"""Family: the table of one family of transformers' models, and what its file uses to read a config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tempo_megatron.words.json_text import read_object

Fields = dict[str, Any]
"""Fields of ModelShape, and gelu_form: tanh or erf, or None without a GELU."""
_MISSING = object()
# They change nothing of what a model computes, or are read elsewhere.
_HARMLESS = {
    *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp", "task_specific_params", "n_ctx", "return_dict"),
    *("output_attentions", "output_hidden_states", "chunk_size_feed_forward", "classifier_dropout", "id2label"),
    *("label2id", "problem_type", "max_window_layers", "summary_type", "summary_use_proj", "summary_activation"),
    *("summary_proj_to_labels", "summary_first_dropout", "_attn_implementation_autoset", "gradient_checkpointing"),
}


class Config:
    """A config.json. It remembers which names were read, so that one that nobody reads can be reported.

    Raises ValueError, in one sentence, where the file is no JSON object or a value is not as it is wanted.
    """

    def __init__(self, file: Path) -> None:
        self.file, self._values = file, read_object(file)
        self._read: set[str] = set()

    def get(self, name: str, default: Any = _MISSING) -> Any:
        """Returns a value; raises ValueError if it is not there and has no default."""
        self._read.add(name)
        value = self._values.get(name, default)
        if value is _MISSING:
            kind = self._values.get("model_type")
            raise ValueError(f"{self.file} has no {name}, which a {kind} has; give a whole config.json")
        return value

    def check(self, name: str, default: Any, expected: Any, why: str) -> None:
        """Raises ValueError unless a value, or its default, is `expected`."""
        if (found := self.get(name, default)) != expected:
            self.refuse(name, found, f"expected {expected!r}: {why}")

    def choose(self, name: str, default: Any, choices: Mapping[str, Any]) -> Any:
        """Returns what `choices` have for a value; raises ValueError if they have nothing."""
        if (found := self.get(name, default)) not in choices:
            self.refuse(name, found, f"expected one of {', '.join(choices)}")
        return choices[found]

    def refuse(self, name: str, found: Any, wanted: str) -> None:
        raise ValueError(f"{self.file}: {name} is {found!r}; {wanted}")

    def list_unread(self) -> list[str]:
        """Lists the names that nobody read and that may mean something."""
        return sorted(self._values.keys() - self._read - _HARMLESS)


SIZES = {
    **{"num_attention_heads": "num_attention_heads", "hidden_size": "hidden_size", "num_layers": "num_hidden_layers"},
    **{"ffn_hidden_size": "intermediate_size", "max_position_embeddings": "max_position_embeddings"},
    "vocab_size": "vocab_size",
}
"""Field of ModelShape -> its name in the config.json of Llama, BERT and most others, which always has it."""


def read_fields(config: Config, names: Mapping[str, str]) -> Fields:
    """Returns the fields of a table such as SIZES; raises ValueError if the config.json lacks one."""
    return {field: config.get(name) for field, name in names.items()}


def write_fields(run: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns what a config.json has of the fields of a table such as SIZES."""
    return {name: run[field] for field, name in names.items()}


GELU_FORMS = {"gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
"""transformers' name of a GELU -> its form."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How the models of one family are called and built on both sides."""

    model_types: tuple[str, ...]
    """The values of model_type in config.json."""
    prefix: str
    """Of all modules but the head. The files of some base models leave it out."""
    names: Mapping[str, tuple[str, ...]]
    """Megatron's module -> the modules of transformers that share the rows of its weight; the first * is a layer's
    number, the second an expert's."""
    classes: Mapping[str, Mapping[str, Any]]
    """Class of transformers -> the values that a model must have for it; a tuple allows any of its values. The first
    class that fits is used."""
    read_config: Callable[[Config], Fields]
    """Raises ValueError for a model that no ModelShape is."""
    build_config: Callable[[Mapping[str, Any], str], dict[str, Any]]
    """From the description of a model and a class, what of config.json is not the same for all families."""
    has_transposed_linears: bool = False
    """Whether the weights of the layers' linears are [in, out]."""
    has_head_size: bool = False
    """Whether config.json says the size of a head and the number of groups of heads."""
    has_experts: bool = False
    stacks: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """End of the name of a tensor, [experts, rows, columns] -> the ends of those that share its rows; * is an expert's
    number."""
    buffers: tuple[str, ...] = ()
    """Patterns of names that older versions of transformers saved and that are no weights."""

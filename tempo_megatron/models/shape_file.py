"""Reads the fields of a ModelShape from a file: one of configs/model, a Hugging Face model's, or a checkpoint's."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tempo_megatron.models.huggingface.config import is_config, read_config_fields
from tempo_megatron.models.shape import DEFAULTS, NAMES, check_value
from tempo_megatron.words.json_text import read_object


def describe_unreadable(option: str, path: str | Path, error: OSError) -> str:
    """Returns one sentence on a model's file that an option names and nobody can read."""
    return (
        f"{option} {path} cannot be read ({error.strerror}); give a file of configs/model, or the folder or "
        "config.json of a Hugging Face model"
    )


def read_shape_file(path: str | Path) -> dict[str, Any]:
    """The fields of ModelShape in a file of configs/model, or in the config.json of a Hugging Face model or its folder;
    names and types are checked.

    Raises ValueError, which begins with --model, where it cannot be read or has something that no model has.
    """
    try:
        if is_config(path):
            return read_config_fields(path)
        values = read_object(path)
    except OSError as error:
        raise ValueError(describe_unreadable("--model", path, error)) from error
    except ValueError as error:
        raise ValueError(f"--model {error}") from error
    for name, value in values.items():
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.0)[0]
            raise ValueError(f"--model {path}: {name} is unknown; the nearest known name is {near}")
        if (expected := check_value(name, value)) is not None:
            raise ValueError(f"--model {path}: {name} is {json.dumps(value)}; expected {expected}")
    return values


def name_shape_file(path: str | Path) -> str:
    """For people: the name of a file of configs/model, or of the folder of a config.json."""
    file = Path(path).absolute()
    return file.parent.name if file.name == "config.json" else file.name if file.is_dir() else file.stem


def complete_description(described: Mapping[str, Any]) -> dict[str, Any]:
    """`described` with the fields of ModelShape that did not exist when it was written.

    Models then had a GPT-2's values for these fields.
    """
    heads, hidden_size = described.get("num_attention_heads"), described.get("hidden_size")
    older = {name: value for name, value in DEFAULTS.items() if value is not dataclasses.MISSING}
    older |= {"family": "gpt", "num_query_groups": heads}
    if heads and hidden_size:
        older["kv_channels"] = hidden_size // heads
    return {**older, **described}

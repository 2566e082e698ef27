"""deepspeed.initialize that honours a "tempo" block for any PyTorch model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
from torch import nn

from tempo_megatron.words.deepspeed_json import load_deepspeed_json
from tempo_megatron.words.json_text import find_near_name
from tempo_torch import CHOICES, tempoize

_KEYS = ("enabled", "seed", *CHOICES, "offload")


def initialize(
    args: Any = None, model: nn.Module | None = None, *others: Any, config: Any = None, **kwargs: Any
) -> Any:
    """What deepspeed.initialize returns, after `tempo_torch.tempoize` of the model by the "tempo" block of `config`.

    Args:
        args, model, others, config, kwargs: deepspeed.initialize's own. The block has "enabled" (default true), "seed"
            and the arguments of tempoize; without a block the model stays as it is.

    A Megatron-core model gets its block when it is built (`tempo_block_spec`); one that Tempo built passes through.
    Raises ValueError for an unknown key or value, for a model that tempoize refuses, and for a Megatron-core model that
        has none of Tempo's modules although the block is enabled.
    """
    given = config if config is not None else kwargs.get("config_params")
    block = read_block(given if given is not None else getattr(args, "deepspeed_config", None))
    if model is not None and block is not None:
        _apply(model, block)
    return deepspeed.initialize(args, model, *others, config=config, **kwargs)


def read_block(config: Any) -> dict[str, Any] | None:
    """The "tempo" block of a DeepSpeed configuration, a dictionary or the path of a JSON file; None without one or
    where it is not enabled. Raises ValueError for an unknown key, and for a name that is nearly "tempo"."""
    if isinstance(config, str | Path):
        config = load_deepspeed_json(config)
    if not isinstance(config, Mapping):
        return None
    if "tempo" not in config:
        if near := [key for key in config if find_near_name(str(key), ("tempo",))]:
            raise ValueError(
                f'"{near[0]}" is unknown, and Tempo would stay off; expected "tempo"; correct or remove it'
            )
        return None
    block = config["tempo"]
    if not isinstance(block, Mapping):
        raise ValueError(f'"tempo" is {block!r}; expected a block such as {{"activation": "auto"}}')
    for key in block:
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, 1) or [", ".join(_KEYS)]
            raise ValueError(f"tempo.{key} is not known for a PyTorch model; expected {near[0]}; correct or remove it")
    if not isinstance(block.get("enabled", True), bool):
        raise ValueError(f"tempo.enabled is {block['enabled']!r}; expected true or false")
    return {key: value for key, value in block.items() if key != "enabled"} if block.get("enabled", True) else None


def _apply(model: nn.Module, block: dict[str, Any]) -> None:
    homes = {base.__module__.partition(".")[0] for module in model.modules() for base in type(module).__mro__}
    if "megatron" not in homes:
        tempoize(model, **block)
    elif "tempo_megatron" not in homes:
        raise ValueError(
            f'{type(model).__name__} is made of Megatron-core\'s modules, which the "tempo" block is for when they are '
            "built; expected a model with Tempo's; build it with tempo_block_spec, or set tempo.enabled to false"
        )

"""Reads the DeepSpeed JSON of a run, has DeepSpeed's own models check it, and replaces each "auto"."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from tempo_megatron.words.deepspeed_json import BATCH_KEYS, NAMES_IN, REFUSED, parse_boolean, read_deepspeed_json
from tempo_megatron.words.json_text import find_near_name

_REFUSED_CHECKPOINT = ("writer", "use_node_local_storage", "load_universal")


def read_deepspeed_config(path: str) -> dict[str, Any]:
    """Reads the JSON. Raises ValueError if it cannot be read, is not an object, or has a refused name or value."""
    # The import takes seconds, which a run needs anyway; an error in the command line has been reported by now.
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = read_deepspeed_json(path, zero_names=list(_list_fields(DeepSpeedZeroConfig)), refused=REFUSED)
    for key in _REFUSED_CHECKPOINT:
        value = config.get("checkpoint", {}).get(key)
        if value if key == "writer" else value is not None and parse_boolean(path, f"checkpoint.{key}", value):
            raise ValueError(f'--deepspeed_config {path}: "checkpoint.{key}" is not used here; use --save and --load')
    return config


def check_with_deepspeed(path: str, config: Mapping[str, Any]) -> None:
    """Raises ValueError for what DeepSpeed's own models of its blocks refuse; `config` is completed."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    total_key = BATCH_KEYS[0]  # follows from the other two and the ranks, which DeepSpeed does not know yet
    own = {key: value for key, value in copy_deepspeed_config(config).items() if key != total_key}
    try:
        DeepSpeedConfig(own)
    except ValidationError as error:
        raise ValueError(f"--deepspeed_config {path}: {_describe_refusal(error, own)}") from None
    except (DeepSpeedConfigError, AssertionError, TypeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"--deepspeed_config {path}: DeepSpeed refuses it ({reason}); correct it") from error


def _describe_refusal(error: ValidationError, config: Mapping[str, Any]) -> str:
    """One clause for the first thing that a model of DeepSpeed's refuses."""
    first = error.errors()[0]
    inside = [str(part) for part in first["loc"]]
    message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ").rstrip(".")
    if not inside:
        return f"DeepSpeed refuses it ({message}); correct it"
    place = inside
    if inside[0] not in config:  # the model of one block, which does not say its name
        blocks = [name for name, block in config.items() if isinstance(block, Mapping) and inside[0] in block]
        place = [next((name for name in blocks if name in error.title.lower()), blocks[0]), *inside]
    name, key = ".".join(place), inside[-1]
    if first["type"] != "extra_forbidden":
        return f'"{name}" is {first["input"]!r}, which DeepSpeed refuses ({message}); correct it'
    if others := [f'"{block}"' for block, names in NAMES_IN.items() if key in names.split()]:
        return f'"{name}" is unknown to DeepSpeed; it belongs into {" or ".join(others)}: move or remove it'
    near = find_near_name(key, _list_names(error.title, inside[:-1]))
    advice = "remove it" if near is None else f'the nearest known name is "{".".join([*place[:-1], near])}"'
    return f'"{name}" is unknown to DeepSpeed; {advice}'


def _list_names(title: str, path: list[str]) -> list[str]:
    """Returns the names in DeepSpeed's model of this class name, or in the one that lies at `path` in it."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    models: list[Any] = [DeepSpeedConfigModel]
    for each in models:  # which grows
        models += each.__subclasses__()
    model = next(each for each in models if each.__name__ == title)
    for part in path:
        annotation = _list_fields(model)[part].annotation
        kinds = (annotation, *get_args(annotation))
        model = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return list(_list_fields(model))


def _list_fields(model: Any) -> dict[str, Any]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def read_zero_stage(config: Mapping[str, Any]) -> int:
    return int(config.get("zero_optimization", {}).get("stage", 0))


def is_given(config: Mapping[str, Any], key: str) -> bool:
    """Whether the JSON has a value other than "auto" for a key."""
    return config.get(key, "auto") not in (None, "auto")


def read_precision(config: Mapping[str, Any]) -> str:
    """Returns `fp32`, `bf16` or `fp16`. Raises ValueError if both are enabled."""
    enabled = [name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled") is True]
    if len(enabled) == 2:
        raise ValueError("the DeepSpeed JSON enables bf16 and fp16; enable one of them")
    return enabled[0] if enabled else "fp32"


def read_offload_device(config: Mapping[str, Any], block: str = "offload_optimizer") -> str:
    """Returns where the optimizer's states ("offload_param": the weights) are: `none` (the device), `cpu` or `nvme`."""
    return str((config.get("zero_optimization", {}).get(block) or {}).get("device", "none"))


def offloads_optimizer(config: Mapping[str, Any]) -> bool:
    return read_offload_device(config) in ("cpu", "nvme")


def complete_deepspeed_config(
    config: Mapping[str, Any], given: Mapping[str, Any], data_parallel_size: int
) -> dict[str, Any]:
    """Returns a copy of `config` with batch sizes, clipping and precision decided.

    `given` has micro_batch_size, global_batch_size and clip_grad of the command line or the checkpoint, None if they
    have no value, and bf16 and fp16.

    Raises ValueError if the command line and the JSON contradict each other or the sizes do not divide.
    """
    filled = {**config, **_decide_batch_sizes(config, given, data_parallel_size), **_decide_precision(config, given)}
    filled["gradient_clipping"] = float(_agree("--clip-grad", given["clip_grad"], config, "gradient_clipping"))
    filled.setdefault("steps_per_print", 10**9)  # the trainer prints its own line
    zero = dict(filled.get("zero_optimization", {}))
    zero.setdefault("stage", 0)
    # DeepSpeed would replace torch.nn.functional.linear by one that keeps other tensors for backward.
    zero.setdefault("memory_efficient_linear", False)
    filled["zero_optimization"] = zero
    return filled


def copy_deepspeed_config(deepspeed: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same content as dicts that DeepSpeed may write into."""
    copied: dict[str, Any] = json.loads(json.dumps(deepspeed))
    return copied


def _agree(option: str, given: Any, config: Mapping[str, Any], key: str) -> Any:
    """Returns what the command line and the JSON say together; None if neither says anything."""
    configured = config[key] if is_given(config, key) else None
    if given is not None and configured is not None and given != configured:
        raise ValueError(
            f'{option} is {given} but "{key}" in the DeepSpeed JSON is {configured}; make them equal or say "auto"'
        )
    return configured if given is None else given


def _decide_batch_sizes(config: Mapping[str, Any], given: Mapping[str, Any], data_parallel_size: int) -> dict[str, int]:
    total_key, micro_key, steps_key = BATCH_KEYS
    micro = _agree("--micro-batch-size", given["micro_batch_size"], config, micro_key)
    total = _agree("--global-batch-size", given["global_batch_size"], config, total_key)
    steps = config[steps_key] if is_given(config, steps_key) else None
    if micro is None:
        raise ValueError(f'--micro-batch-size is missing; give it, or "{micro_key}" in the DeepSpeed JSON')
    per_round = micro * data_parallel_size
    if total is None:
        total = per_round * (steps or 1)
    if total % per_round:
        raise ValueError(
            f"--global-batch-size {total} is not a multiple of micro batch size {micro} x data parallel size "
            f"{data_parallel_size}; choose a multiple of {per_round}"
        )
    if steps is not None and steps != total // per_round:
        raise ValueError(
            f'"{steps_key}" in the DeepSpeed JSON is {steps}, but global batch {total} / (micro batch {micro} x data '
            f'parallel {data_parallel_size}) is {total // per_round}; set it to "auto"'
        )
    return {total_key: total, micro_key: micro, steps_key: total // per_round}


def _decide_precision(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    if given["bf16"] and given["fp16"]:
        raise ValueError("--bf16 and --fp16 are both given; give one of them")
    blocks = {}
    for name in ("bf16", "fp16"):
        block = dict(config.get(name, {}))
        asked = given[name]
        if block.get("enabled") is False and asked:
            raise ValueError(
                f'--{name} is given but "{name}.enabled" in the DeepSpeed JSON is false; remove one of them'
            )
        if block.get("enabled") in (None, "auto") and (block or asked):
            block["enabled"] = asked
        if block:
            blocks[name] = block
    precision = read_precision({**config, **blocks})
    for name in ("bf16", "fp16"):
        if given[name] and precision != name:
            raise ValueError(f"--{name} is given but the DeepSpeed JSON enables {precision}; make them agree")
    return blocks

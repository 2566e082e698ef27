"""The DeepSpeed JSON: read as DeepSpeed reads it, checked against the command line, its "auto" values filled in.

Nothing here imports deepspeed, so that a wrong configuration is reported before the slow imports.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import hjson
from pydantic import TypeAdapter, ValidationError

from tempo_megatron.training.run.arguments import DEFAULTS
from tempo_megatron.training.run.deepspeed_names import BATCH_KEYS, check_kinds, check_names
from tempo_megatron.words.json_text import decode, read_finite, refuse_duplicates

_REFUSED_CHECKPOINT = ("writer", "use_node_local_storage", "load_universal")


def read_deepspeed_config(path: str) -> dict[str, Any]:
    """The JSON as a dict. Raises ValueError where it cannot be read, is no object, or holds what is refused."""
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"--deepspeed_config {path} cannot be read ({reason}); give a file such as "
            "configs/deepspeed/zero1_bf16.json"
        ) from error
    try:
        config = _parse(decode(content))
    except ValueError as error:
        raise ValueError(f"--deepspeed_config {path} is not valid JSON ({error}); correct it") from error
    if not isinstance(config, dict):
        raise ValueError(f"--deepspeed_config {path} holds a {type(config).__name__}; expected a JSON object")
    check_names(path, config)
    check_kinds(path, config)
    if "memory_breakdown" in config:
        config["memory_breakdown"] = _parse_boolean(path, "memory_breakdown", config["memory_breakdown"])
    for name in ("bf16", "fp16"):
        if (enabled := config.get(name, {}).get("enabled")) not in (None, "auto"):
            config[name]["enabled"] = _parse_boolean(path, f"{name}.enabled", enabled)
    for key in _REFUSED_CHECKPOINT:
        value = config.get("checkpoint", {}).get(key)
        if value if key == "writer" else value is not None and _parse_boolean(path, f"checkpoint.{key}", value):
            raise ValueError(f'--deepspeed_config {path}: "checkpoint.{key}" is not used here; use --save and --load')
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if not isinstance(stage, int) or isinstance(stage, bool):
        raise ValueError(f'--deepspeed_config {path}: "zero_optimization.stage" is {stage!r}; expected 0, 1, 2 or 3')
    return config


def _parse_boolean(path: str, key: str, value: Any) -> bool:
    """As DeepSpeed, whose configuration is made of pydantic models, reads it: 1, "true" and "yes" are true as well."""
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValidationError:
        raise ValueError(f'--deepspeed_config {path}: "{key}" is {value!r}; expected true or false') from None


def _parse(text: str) -> Any:
    """As DeepSpeed, which takes Hjson too: comments, and no quotes where none are needed."""
    if not text.strip():
        raise ValueError("it is empty")
    try:
        return hjson.loads(text, object_pairs_hook=refuse_duplicates, parse_float=read_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_zero_stage(config: Mapping[str, Any]) -> int:
    return int(config.get("zero_optimization", {}).get("stage", 0))


def is_given(config: Mapping[str, Any], key: str) -> bool:
    """Whether the JSON gives a key a value, rather than "auto"."""
    return config.get(key, "auto") not in (None, "auto")


def decides_batch_size(config: Mapping[str, Any]) -> bool:
    """Whether the JSON has a number that the size of a global batch follows from."""
    total_key, _, steps_key = BATCH_KEYS
    return any(is_given(config, key) for key in (total_key, steps_key))


def read_precision(config: Mapping[str, Any]) -> str:
    """`fp32`, `bf16` or `fp16`. Raises ValueError where both are enabled."""
    enabled = [name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled") is True]
    if len(enabled) == 2:
        raise ValueError("the DeepSpeed JSON enables bf16 and fp16; enable one of them")
    return enabled[0] if enabled else "fp32"


def read_offload_device(config: Mapping[str, Any], block: str = "offload_optimizer") -> str:
    """Where the optimizer's states are, with "offload_param" the weights: `none` (on the device), `cpu` or `nvme`."""
    return str((config.get("zero_optimization", {}).get(block) or {}).get("device", "none"))


def offloads_optimizer(config: Mapping[str, Any]) -> bool:
    return read_offload_device(config) in ("cpu", "nvme")


def complete_deepspeed_config(
    config: Mapping[str, Any], given: Mapping[str, Any], data_parallel_size: int
) -> dict[str, Any]:
    """A copy of `config` with batch sizes, clipping and precision decided.

    `given` holds micro_batch_size, global_batch_size and clip_grad of the command line or the checkpoint, None where
    they say nothing, and bf16 and fp16.
    Raises ValueError where the command line and the JSON contradict each other or the sizes do not divide.
    """
    filled = {**config, **_decide_batch_sizes(config, given, data_parallel_size), **_decide_precision(config, given)}
    clip = _agree("--clip-grad", given["clip_grad"], "gradient_clipping", _read_number(config, "gradient_clipping"))
    filled["gradient_clipping"] = DEFAULTS["clip_grad"] if clip is None else float(clip)
    filled.setdefault("steps_per_print", 10**9)  # the trainer prints its own line
    zero = dict(filled.get("zero_optimization", {}))
    zero.setdefault("stage", 0)
    # DeepSpeed would exchange torch.nn.functional.linear for one that keeps other tensors for backward.
    zero.setdefault("memory_efficient_linear", False)
    filled["zero_optimization"] = zero
    return filled


def freeze_deepspeed_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same content, which nobody can change: mappings that are only read, tuples for lists."""
    return MappingProxyType({key: _freeze(value) for key, value in config.items()})


def copy_deepspeed_config(frozen: Mapping[str, Any]) -> dict[str, Any]:
    """The dict and its lists that freeze_deepspeed_config was given, for DeepSpeed, which may write into its own."""
    return {key: _thaw(value) for key, value in frozen.items()}


def _freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return freeze_deepspeed_config(value)
    return tuple(map(_freeze, value)) if isinstance(value, list) else value


def _thaw(value: Any) -> Any:
    if isinstance(value, Mapping):
        return copy_deepspeed_config(value)
    return list(map(_thaw, value)) if isinstance(value, tuple) else value


def _read_number(config: Mapping[str, Any], key: str) -> Any:
    """The JSON's value; None where it is absent or "auto"."""
    value = config.get(key)
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f'"{key}" in the DeepSpeed JSON is {value!r}; expected a number or "auto"')
    return value


def _agree(option: str, given: Any, key: str, configured: Any) -> Any:
    if given is not None and configured is not None and given != configured:
        raise ValueError(
            f'{option} is {given} but "{key}" in the DeepSpeed JSON is {configured}; make them equal or say "auto"'
        )
    return configured if given is None else given


def _decide_batch_sizes(config: Mapping[str, Any], given: Mapping[str, Any], data_parallel_size: int) -> dict[str, int]:
    total_key, micro_key, steps_key = BATCH_KEYS
    micro = _agree("--micro-batch-size", given["micro_batch_size"], micro_key, _read_number(config, micro_key))
    total = _agree("--global-batch-size", given["global_batch_size"], total_key, _read_number(config, total_key))
    steps = _read_number(config, steps_key)
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

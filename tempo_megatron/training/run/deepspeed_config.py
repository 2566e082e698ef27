"""Reads the DeepSpeed JSON as DeepSpeed does, checks its names and values, and replaces each "auto".

DeepSpeed ignores unknown names at the top, and refuses those in its blocks late and in its own words. Here an error
names the nearest known name. The names in a block that is a pydantic model come from DeepSpeed; its code reads the
others one by one (`get_scalar_param`) and has no list of them, so they are listed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import hjson
from pydantic import TypeAdapter, ValidationError

from tempo_megatron.training.run.arguments import DEFAULTS
from tempo_megatron.words.json_text import decode, find_near_name, read_finite, refuse_duplicates

# Names whose decision belongs to the trainer, with the place to make it instead.
REFUSED = {
    "optimizer": "the trainer builds AdamW itself; use --lr, --weight-decay, --adam-beta1, --adam-beta2 and --adam-eps",
    "scheduler": "the trainer has Megatron's schedule; use --lr-decay-style, --lr-warmup-iters and --min-lr",
    "activation_checkpointing": "recomputation is Megatron's; use --recompute-granularity",
    "pipeline": "the stages are Megatron's; use --pipeline-model-parallel-size",
    "tensor_parallel": "tensor parallelism is Megatron's; use --tensor-model-parallel-size",
    "sequence_parallel_size": "sequence parallelism is Megatron's; use --sequence-parallel",
    "data_efficiency": "the samples come from Megatron's GPTDataset; remove the block",
    "curriculum_learning": "the samples come from Megatron's GPTDataset; remove the block",
    "hybrid_engine": "it is for generation; remove the block",
    "amp": "Apex AMP is not supported; use bf16 or fp16",
    "torch_autocast": "the model itself is built in bf16 or fp16; use those blocks",
    "nebula": "checkpoints are written by the trainer; remove the block and use --save",
    "compile": "torch.compile of the whole engine is not supported; remove the block",
    "expert_parallel": "the model has no experts; remove the block",
    "elasticity": "the number of ranks is the launcher's, and --load goes on with any; remove the block",
    "autotuning": "`tempo-megatron plan` chooses the micro batch; remove the block",
    "progressive_layer_drop": "every layer is trained in every step; remove the block",
    "eigenvalue": "it is for quantization in training, which is not supported; remove the block",
    "quantize_training": "quantization in training is not supported; remove the block",
    "compression_training": "compression in training is not supported; remove the block",
    "weight_quantization": "it is for inference; remove the block",
    "sparse_attention": "attention is Megatron's or Tempo's; remove the block",
    "sparse_gradients": "the embedding's gradient is dense; remove it",
    "graph_harvesting": "graphs of the whole engine are not supported; remove it",
    "managed_gradient_accumulation": "the trainer lets DeepSpeed count micro batches; remove it",
    "datastates": "checkpoints are written by the trainer; remove the block and use --save",
}
# Names that people write for others, because DeepSpeed or another library once had them.
_OTHER_NAMES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_BLOCKS = (
    "bf16 fp16 zero_optimization data_types checkpoint flops_profiler comms_logger tensorboard wandb csv_monitor comet "
    "monitor aio timers tempo"
).split()
_BOOLEANS = (
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer prescale_gradients wall_clock_breakdown dump_state "
    "memory_breakdown disable_allgather disable_python_gc dataloader_drop_last use_data_before_expert_parallelism"
).split()
_NUMBERS = ("gradient_clipping", "gradient_predivide_factor", "steps_per_print")
_DTYPES = ("fp32", "bf16", "fp16")
# The words that DeepSpeed accepts, in any case.
_WORDS: dict[str, tuple[str, ...]] = {
    "communication_data_type": _DTYPES,
    "seq_parallel_communication_data_type": _DTYPES,
    "log_level": ("debug", "info", "warning", "error", "critical"),
    "gradient_allreduce_op": ("mean", "sum"),
}
_ACCUMULATED = {
    "fp32": "fp32 float32 float torch.float32",
    "bf16": "bf16 bfloat16 torch.bfloat16",
    "fp16": "fp16 float16 half torch.float16",
}
_KNOWN = (*BATCH_KEYS, *_BLOCKS, *_BOOLEANS, *_NUMBERS, *_WORDS)
# Names in the blocks that are pydantic models only since DeepSpeed 0.17, or not at all.
_KNOWN_IN = {
    "bf16": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
    "fp16": "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
    "min_loss_scale fp16_master_weights_and_grads",
    "data_types": "grad_accum_dtype",
}
_OFFLOADS = {"offload_optimizer": ("none", "cpu", "nvme"), "offload_param": ("none", "cpu", "nvme")}
_REFUSED_CHECKPOINT = ("writer", "use_node_local_storage", "load_universal")


def read_deepspeed_config(path: str) -> dict[str, Any]:
    """Reads the JSON. Raises ValueError if it cannot be read, is not an object, or has a refused name or value."""
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
    """Reads a boolean as DeepSpeed's pydantic models do: 1, "true" and "yes" are also true."""
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValidationError:
        raise ValueError(f'--deepspeed_config {path}: "{key}" is {value!r}; expected true or false') from None


def _parse(text: str) -> Any:
    """Parses Hjson as DeepSpeed does: it allows comments, and strings without quotes."""
    if not text.strip():
        raise ValueError("it is empty")
    try:
        return hjson.loads(text, object_pairs_hook=refuse_duplicates, parse_float=read_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_zero_stage(config: Mapping[str, Any]) -> int:
    return int(config.get("zero_optimization", {}).get("stage", 0))


def is_given(config: Mapping[str, Any], key: str) -> bool:
    """Whether the JSON has a value other than "auto" for a key."""
    return config.get(key, "auto") not in (None, "auto")


def decides_batch_size(config: Mapping[str, Any]) -> bool:
    """Whether the JSON has a number that decides the size of a global batch."""
    total_key, _, steps_key = BATCH_KEYS
    return any(is_given(config, key) for key in (total_key, steps_key))


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

    Args:
        config: of read_deepspeed_config.
        given: micro_batch_size, global_batch_size and clip_grad of the command line or the checkpoint, None if they
            have no value; bf16 and fp16.
        data_parallel_size: of the run.

    Raises ValueError if the command line and the JSON contradict each other or the sizes do not divide.
    """
    filled = {**config, **_decide_batch_sizes(config, given, data_parallel_size), **_decide_precision(config, given)}
    clip = _agree("--clip-grad", given["clip_grad"], "gradient_clipping", _read_number(config, "gradient_clipping"))
    filled["gradient_clipping"] = DEFAULTS["clip_grad"] if clip is None else float(clip)
    filled.setdefault("steps_per_print", 10**9)  # the trainer prints its own line
    zero = dict(filled.get("zero_optimization", {}))
    zero.setdefault("stage", 0)
    # DeepSpeed would replace torch.nn.functional.linear by one that keeps other tensors for backward.
    zero.setdefault("memory_efficient_linear", False)
    filled["zero_optimization"] = zero
    return filled


def freeze_deepspeed_config(config: Any) -> Any:
    """Returns the same content as read-only mappings and tuples."""
    if isinstance(config, Mapping):
        return MappingProxyType({key: freeze_deepspeed_config(value) for key, value in config.items()})
    return tuple(map(freeze_deepspeed_config, config)) if isinstance(config, list) else config


def copy_deepspeed_config(frozen: Any) -> Any:
    """Returns the dicts and lists that freeze_deepspeed_config was given; DeepSpeed may write into them."""
    if isinstance(frozen, Mapping):
        return {key: copy_deepspeed_config(value) for key, value in frozen.items()}
    return list(map(copy_deepspeed_config, frozen)) if isinstance(frozen, tuple) else frozen


def _read_number(config: Mapping[str, Any], key: str) -> Any:
    """Returns the JSON's value; None if it is missing or "auto"."""
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


def check_names(path: str, config: Mapping[str, Any]) -> None:
    """Raises ValueError for a name that is not used here, and for an unknown name that resembles a known one."""
    for key, reason in REFUSED.items():
        if key in config:
            raise ValueError(f'--deepspeed_config {path}: "{key}" is not used here: {reason}')
    known_in = _list_names_in_blocks()
    for key in find_unknown_keys(config):
        if blocks := [block for block, names in known_in.items() if key in names]:
            raise ValueError(
                f'--deepspeed_config {path}: "{key}" is at the top, where it is ignored; it belongs into '
                + " or ".join(f'"{block}"' for block in blocks)
            )
        if near := _OTHER_NAMES.get(key.lower()) or find_near_name(key, (*_KNOWN, *REFUSED)):
            reason = f", which is not used here: {REFUSED[near]}" if near in REFUSED else ""
            raise ValueError(
                f'--deepspeed_config {path}: "{key}" is unknown; the nearest known name is "{near}"{reason}'
            )
    # DeepSpeed itself refuses unknown names in its blocks, but late and without the nearest known one.
    for block, names in known_in.items():
        content = config.get(block)
        for key in content if isinstance(content, Mapping) else ():
            if key not in names and (near := find_near_name(key, names)):
                raise ValueError(
                    f'--deepspeed_config {path}: "{block}.{key}" is unknown; the nearest known name is "{block}.{near}"'
                )


def _list_names_in_blocks() -> dict[str, list[str]]:
    """Returns the names that the installed DeepSpeed reads in each block."""
    # The import takes seconds, which a run needs anyway; an error in the command line has been reported by now.
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = [field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()]
    return {"zero_optimization": zero, **{block: names.split() for block, names in _KNOWN_IN.items()}}


def check_kinds(path: str, config: Mapping[str, Any]) -> None:
    """Raises ValueError for a value of another kind than DeepSpeed expects."""

    def refuse(key: str, value: object, expected: str) -> None:
        raise ValueError(f'--deepspeed_config {path}: "{key}" is {value!r}; expected {expected}')

    for key, value in config.items():
        if key in _BLOCKS and key != "tempo" and not isinstance(value, dict):
            refuse(key, value, "an object {...}")
        elif key in BATCH_KEYS and value not in (None, "auto") and _is_number(value) and not _is_count(value):
            refuse(key, value, 'a whole number of at least 1 or "auto"')
        elif key == "gradient_clipping" and _is_number(value) and not 0 <= value < math.inf:
            refuse(key, value, 'a number of at least 0 or "auto"')
        elif key == "gradient_predivide_factor" and not (_is_number(value) and 0 < value < math.inf):
            refuse(key, value, "a number above 0")
        elif key == "steps_per_print" and value is not None and not _is_count(value):
            refuse(key, value, "a whole number of at least 1")
        elif key in _WORDS and value is not None and str(value).lower() not in _WORDS[key]:
            refuse(key, value, " or ".join(f'"{word}"' for word in _WORDS[key]))
        elif key in _BOOLEANS and key != "memory_breakdown" and not isinstance(value, bool):
            refuse(key, value, "true or false")
    accumulated = config.get("data_types", {}).get("grad_accum_dtype")
    if accumulated is not None and not any(accumulated in names.split() for names in _ACCUMULATED.values()):
        refuse("data_types.grad_accum_dtype", accumulated, " or ".join(f'"{dtype}"' for dtype in _ACCUMULATED))
    zero = config.get("zero_optimization", {})
    for name, devices in _OFFLOADS.items():
        value = zero.get(name)
        if value is not None and not isinstance(value, dict):
            refuse(f"zero_optimization.{name}", value, 'an object such as {"device": "cpu"}')
        if value and value.get("device", "none") not in devices:
            refuse(f"zero_optimization.{name}.device", value["device"], " or ".join(f'"{each}"' for each in devices))


def find_unknown_keys(config: Mapping[str, Any]) -> list[str]:
    """Lists top-level keys that neither DeepSpeed nor the trainer reads; DeepSpeed itself accepts any name."""
    return [key for key in config if key not in _KNOWN]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**48

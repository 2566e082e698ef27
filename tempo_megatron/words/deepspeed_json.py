"""Reads a DeepSpeed JSON as DeepSpeed does, and checks its names and values: one reader for every command.

DeepSpeed ignores unknown names at the top, and refuses those in its blocks late and in its own words. Here an error
names the nearest known name. DeepSpeed's code reads names at the top one by one (`get_scalar_param`) and has no list of
them, so they are listed here. The trainer imports DeepSpeed, and has DeepSpeed's own models check its blocks besides.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tempo_megatron.extras import is_installed
from tempo_megatron.words.json_text import decode, find_near_name, parse_json, read_finite, refuse_duplicates

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
NAMES_IN = {
    "bf16": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
    "fp16": "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
    "min_loss_scale fp16_master_weights_and_grads",
    "data_types": "grad_accum_dtype",
}
# What the estimate reads; the trainer has DeepSpeed's own list.
_ZERO_NAMES = (
    "stage offload_optimizer offload_param cpu_offload cpu_offload_param reduce_bucket_size overlap_comm "
    "stage3_max_live_parameters"
).split()
REPLACED = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
"""Deprecated switch of zero_optimization -> the block that DeepSpeed takes it for."""
_OFFLOADS = {"offload_optimizer": ("none", "cpu", "nvme"), "offload_param": ("none", "cpu", "nvme")}
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
"""Names whose decision belongs to the trainer, with the place to make it instead."""
_TRUE, _FALSE = ("1", "on", "t", "true", "y", "yes"), ("0", "off", "f", "false", "n", "no")
_OF_A_PLAN = {"tempo", "stages", "megatron_arguments"}
"""Names by which a file that `plan --json` wrote is known; its block is read."""
_NO_NUMBERS = ("NaN", "Infinity", "-Infinity")


def load_deepspeed_json(path: str | Path) -> Any:
    """Reads JSON, or the Hjson that DeepSpeed takes: with comments, a trailing comma, strings without quotes.

    Raises OSError if it cannot be read, and ValueError with the file's name for what neither is.
    """
    content = Path(path).read_bytes()
    try:
        return _parse(decode(content))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); correct it or give another file") from error


def _parse(text: str) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        if not is_installed("hjson"):
            raise ValueError(f"{error}; to read comments, install hjson, which deepspeed needs too") from error
    import hjson

    try:
        found = hjson.loads(text, object_pairs_hook=refuse_duplicates, parse_float=read_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    for value in _list_values(found):  # Hjson takes what is no number for a string
        if value in _NO_NUMBERS:
            parse_json(value)
    return found


def _list_values(content: Any) -> Iterator[Any]:
    values = content.values() if isinstance(content, Mapping) else content if isinstance(content, list) else ()
    for value in values:
        yield value
        yield from _list_values(value)


def read_deepspeed_json(
    path: str, *, zero_names: Sequence[str] = (), refused: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Reads a DeepSpeed JSON, and says the same in one way: booleans as such, deprecated names as their successors.

    Args:
        path: of the file.
        zero_names: those of zero_optimization, where DeepSpeed itself can tell them.
        refused: names that may not be there, with the reasons.

    Raises ValueError, which begins with --deepspeed_config, if it cannot be read, is no object, or has a refused name
    or value.
    """
    try:
        config = load_deepspeed_json(path)
    except OSError as error:
        raise ValueError(
            f"--deepspeed_config {path} cannot be read ({error.strerror}); give a file such as "
            "configs/deepspeed/zero1_bf16.json"
        ) from error
    except ValueError as error:
        raise ValueError(f"--deepspeed_config {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--deepspeed_config {path} holds a {type(config).__name__}; expected a JSON object")
    if config.keys() >= _OF_A_PLAN:
        config = {"tempo": config["tempo"]}
    _check_names(path, config, zero_names, refused or {})

    def refuse(key: str, value: object, expected: str) -> None:
        raise ValueError(f'--deepspeed_config {path}: "{key}" is {value!r}; expected {expected}')

    _check_kinds(config, refuse)
    if "memory_breakdown" in config:
        config["memory_breakdown"] = parse_boolean(path, "memory_breakdown", config["memory_breakdown"])
    for name in ("bf16", "fp16"):
        if (enabled := config.get(name, {}).get("enabled")) not in (None, "auto"):
            config[name]["enabled"] = parse_boolean(path, f"{name}.enabled", enabled)
    zero = config.get("zero_optimization", {})
    for old, successor in REPLACED.items():
        if old not in zero:
            continue
        is_on = zero.pop(old)
        if is_on not in (None, "auto") and parse_boolean(path, f"zero_optimization.{old}", is_on):
            if successor in zero:
                refuse(f"zero_optimization.{old}", is_on, f'it or "{successor}", which replaces it: remove "{old}"')
            zero[successor] = {"device": "cpu"}
    if zero.get("stage") == "auto":
        del zero["stage"]
    stage = zero.get("stage", 0)
    if not isinstance(stage, int) or isinstance(stage, bool) or not 0 <= stage <= 3:
        refuse("zero_optimization.stage", stage, "0, 1, 2 or 3")
    return config


def parse_boolean(path: str, key: str, value: Any) -> bool:
    """Reads a boolean as DeepSpeed's pydantic models do: 1, "true" and "yes" are also true."""
    word = str(int(value)) if isinstance(value, float) and value in (0.0, 1.0) else str(value).lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ValueError(f'--deepspeed_config {path}: "{key}" is {value!r}; expected true or false')


def _check_names(path: str, config: Mapping[str, Any], zero_names: Sequence[str], refused: Mapping[str, str]) -> None:
    """Raises ValueError for a name that is not used here, and for an unknown name that resembles a known one."""
    for key, reason in refused.items():
        if key in config:
            raise ValueError(f'--deepspeed_config {path}: "{key}" is not used here: {reason}')
    known_in = {block: names.split() for block, names in NAMES_IN.items()}
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    # Where DeepSpeed does not tell its names, those that are no slip of one that is read count as known.
    unlike = [key for key in zero if not difflib.get_close_matches(key, _ZERO_NAMES, 1, 0.85)]
    known_in["zero_optimization"] = list(zero_names or (*_ZERO_NAMES, *unlike))
    for key in find_unknown_keys(config):
        if blocks := [block for block, names in known_in.items() if key in names]:
            raise ValueError(
                f'--deepspeed_config {path}: "{key}" is at the top, where it is ignored; it belongs into '
                + " or ".join(f'"{block}"' for block in blocks)
            )
        if near := _OTHER_NAMES.get(key.lower()) or find_near_name(key, (*_KNOWN, *REFUSED)):
            reason = f", which is not used here: {refused[near]}" if near in refused else ""
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


def _check_kinds(config: Mapping[str, Any], refuse: Callable[[str, object, str], None]) -> None:
    """Calls `refuse` for a value of another kind than DeepSpeed expects."""
    for key, value in config.items():
        if key in _BLOCKS and key != "tempo" and not isinstance(value, dict):
            refuse(key, value, "an object {...}")
        elif key in BATCH_KEYS and value not in (None, "auto") and not _is_count(value):
            refuse(key, value, 'a whole number of at least 1 or "auto"')
        elif key == "gradient_clipping" and value not in (None, "auto") and not _is_size(value):
            refuse(key, value, 'a number of at least 0 or "auto"')
        elif key == "gradient_predivide_factor" and not (_is_size(value) and value > 0):
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


def _is_size(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**48

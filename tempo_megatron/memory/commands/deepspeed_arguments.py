"""Reads from a DeepSpeed JSON what `estimate` and `plan` would otherwise be told by arguments.

Precision, ZeRO stage, batch sizes, the dtype of accumulated gradients, buckets and offload are the file's, as DeepSpeed
reads them: a precision that it does not enable is fp32. An argument may say what the file leaves to "auto", and
otherwise nothing else than the file.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from tempo_megatron.memory.estimate.model_states import OptimizerSettings

_PRECISIONS = ("bf16", "fp16")
_TOTAL, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def read_deepspeed_optimizer(config: Mapping[str, Any], zero_stage: int | None = None) -> OptimizerSettings:
    """Who holds gradients and states. Raises ValueError where --zero says another stage, or for an offload of weights.

    Args:
        config: the JSON; empty where there is none.
        zero_stage: --zero, where it is given.
    """
    zero = _read_block(config, "zero_optimization")
    if (_read_block(zero, "offload_param")).get("device", "none") != "none":
        raise ValueError(
            'the DeepSpeed JSON has "offload_param", and the estimate does not know how much of weights that are '
            "elsewhere is on the GPU at a time; leave it out"
        )
    stage = _agree("--zero", zero_stage, '"zero_optimization.stage"', zero.get("stage", 0) if config else None)
    return OptimizerSettings.from_deepspeed({**config, "zero_optimization": {**zero, "stage": stage or 0}})


def take_precision(args: argparse.Namespace, config: Mapping[str, Any] | None) -> None:
    """Fill `args.dtype` in: the JSON's precision, or bf16 where there is no JSON (None).

    Raises ValueError where --dtype is another one.
    """
    if config is None:
        args.dtype = args.dtype or "bf16"
        return
    enabled = {name: _read_block(config, name).get("enabled", False) for name in _PRECISIONS}
    for name, value in enabled.items():
        if not (isinstance(value, bool) or value == "auto"):
            raise ValueError(f'"{name}.enabled" in the DeepSpeed JSON is {value!r}; expected true, false or "auto"')
    chosen = [name for name, value in enabled.items() if value is True]
    if len(chosen) == 2:
        raise ValueError("the DeepSpeed JSON enables bf16 and fp16; enable one of them")
    if not chosen and enabled.get(args.dtype) == "auto":
        return
    precision = chosen[0] if chosen else "fp32"
    if args.dtype not in (None, precision):
        raise ValueError(
            f"--dtype is {args.dtype}, but the DeepSpeed JSON trains in {precision}, as "
            f"{f'it enables {precision}' if chosen else 'it enables neither bf16 nor fp16'}; leave --dtype out, or "
            "change the JSON"
        )
    args.dtype = precision


def take_batch_sizes(args: argparse.Namespace, config: Mapping[str, Any]) -> None:
    """Fill `args.micro_batch_size` (else 1) and `args.num_micro_batches` in with what the JSON has as numbers.

    "gradient_accumulation_steps" are micro batches; "train_batch_size" becomes `args.global_batch_size` where there is
    that, else micro batches too.

    Raises ValueError where an argument is another number, or the numbers do not divide.
    """
    micro = _agree("--micro-batch-size", args.micro_batch_size, f'"{_MICRO}"', _read_number(config, _MICRO)) or 1
    steps = _agree("--num-micro-batches", args.num_micro_batches, f'"{_STEPS}"', _read_number(config, _STEPS))
    given = getattr(args, "global_batch_size", None)
    total = _agree("--global-batch-size", given, f'"{_TOTAL}"', _read_number(config, _TOTAL))
    args.micro_batch_size, args.num_micro_batches = micro, steps
    if total is None:
        return
    per_round = args.dp * (steps or 1) * (1 if micro == "auto" else micro)
    if total % per_round or (steps is not None and total != per_round):
        name = "--global-batch-size" if given is not None else f'the DeepSpeed JSON\'s "{_TOTAL}"'
        expected = "a multiple of" if steps is None else f"{steps} times"
        raise ValueError(
            f"{name} {total} is not {expected} --dp {args.dp} times a micro batch of "
            f"{1 if micro == 'auto' else micro}; change one of them"
        )
    if hasattr(args, "global_batch_size"):
        args.global_batch_size, args.num_micro_batches = total, None
    else:
        args.num_micro_batches = total // (args.dp * micro)


def _agree(option: str, given: Any, key: str, configured: Any) -> Any:
    if given is not None and configured is not None and given != configured:
        raise ValueError(
            f"{option} is {given}, but {key} in the DeepSpeed JSON is {configured}; leave {option} out, or change the "
            "JSON"
        )
    return configured if given is None else given


def _read_block(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    block = config.get(key)
    if block is None:
        return {}
    if not isinstance(block, Mapping):
        raise ValueError(f'"{key}" in the DeepSpeed JSON is {block!r}; expected an object')
    return block


def _read_number(config: Mapping[str, Any], key: str) -> int | None:
    """The JSON's number; None where it is absent or "auto"."""
    value = config.get(key)
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f'"{key}" in the DeepSpeed JSON is {value!r}; expected a positive integer or "auto"')
    return value

"""Every cross-check of the command line in one place, before anything slow starts."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tempo_megatron.arguments import tempo_config_from
from tempo_megatron.training.arguments import DEFAULTS
from tempo_megatron.training.deepspeed_config import offloads_optimizer, zero_stage

_NEEDS_TRANSFORMER_ENGINE = "without Transformer Engine megatron-core stops in it with a NameError"
_NOT_DENSE = "the model has no such module: it is a dense GPT"
_REFUSED_MODULES = {
    "layernorm": _NEEDS_TRANSFORMER_ENGINE,
    "moe_act": _NOT_DENSE,
    "moe": _NOT_DENSE,
    "shared_experts": _NOT_DENSE,
    "mla_up_proj": _NOT_DENSE,
}


def data_parallel_size_of(args: argparse.Namespace, world_size: int) -> int:
    """World size / tensor parallel size. Raises ValueError where it does not divide."""
    tp = args.tensor_model_parallel_size
    if world_size % tp:
        raise ValueError(
            f"--tensor-model-parallel-size {tp} does not divide the {world_size} processes; "
            f"start a multiple of {tp} processes (deepspeed --num_gpus {tp}, torchrun --nproc_per_node {tp})"
        )
    return world_size // tp


def check_arguments(args: argparse.Namespace, config: Mapping[str, Any], on_gpu: bool) -> None:
    """Raise ValueError for the first combination that cannot train. Fills what follows from other arguments.

    `config` is the completed DeepSpeed configuration, so batch sizes and precision are decided.
    """
    _check_layout(args)
    _check_precision(args, config, on_gpu)
    _check_schedule(args)
    _check_recompute(args)
    tempo_config_from(args, config)
    _check_data(args)
    _check_output(args)
    if args.num_workers is None:
        args.num_workers = 2 if on_gpu else 0


def _check_layout(args: argparse.Namespace) -> None:
    tp = args.tensor_model_parallel_size
    for name in ("num_attention_heads", "ffn_hidden_size"):
        if (value := getattr(args, name)) % tp:
            option = "--" + name.replace("_", "-")
            raise ValueError(
                f"{option} {value} is not a multiple of --tensor-model-parallel-size {tp}; change one of them"
            )
    if args.hidden_size % args.num_attention_heads:
        raise ValueError(
            f"--hidden-size {args.hidden_size} is not a multiple of --num-attention-heads {args.num_attention_heads}; "
            "change one of them"
        )
    if args.seq_length > args.max_position_embeddings:
        raise ValueError(
            f"--seq-length {args.seq_length} is more than the {args.max_position_embeddings} learned positions; "
            "shorten it or give --max-position-embeddings"
        )
    if not args.sequence_parallel:
        return
    if tp == 1:
        raise ValueError(
            "--sequence-parallel needs --tensor-model-parallel-size of at least 2; remove it or raise that"
        )
    if args.seq_length % tp:
        raise ValueError(
            f"--seq-length {args.seq_length} is not a multiple of --tensor-model-parallel-size {tp}, "
            "as --sequence-parallel needs; change one of them"
        )


def _check_precision(args: argparse.Namespace, config: Mapping[str, Any], on_gpu: bool) -> None:
    if args.precision == "fp16" and not on_gpu:
        raise ValueError("fp16 is asked for but there is no GPU and DeepSpeed has no fp16 on CPU; use bf16 or fp32")
    stage = zero_stage(config)
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_optimization.stage in the DeepSpeed JSON is {stage}; it must be 0, 1, 2 or 3")
    if stage == 0 and args.precision != "fp32":
        raise ValueError(
            f"{args.precision} without ZeRO is asked for, but DeepSpeed's optimizer for it takes a step of its own at "
            "the start and clips by the norm of one tensor-parallel rank; set zero_optimization.stage to 1, 2 or 3"
        )
    accumulated = config.get("data_types", {}).get("grad_accum_dtype")
    if stage == 0 and accumulated not in (None, "fp32"):
        raise ValueError(
            f'"data_types.grad_accum_dtype" in the DeepSpeed JSON is {accumulated!r}, but without ZeRO gradients are '
            "fp32; remove it"
        )
    if offloads_optimizer(config) and stage == 0:
        raise ValueError("zero_optimization.offload_optimizer needs ZeRO; set zero_optimization.stage to 1, 2 or 3")


def _check_schedule(args: argparse.Namespace) -> None:
    if args.lr is None:
        raise ValueError("--lr is missing; give the highest learning rate")
    for name, value in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.lr_decay_iters is None:
        args.lr_decay_iters = args.train_iters
    if args.min_lr > args.lr:
        raise ValueError(f"--min-lr {args.min_lr} is above --lr {args.lr}; lower it")
    if args.lr_warmup_iters >= args.lr_decay_iters:
        raise ValueError(
            f"--lr-warmup-iters {args.lr_warmup_iters} is not below the {args.lr_decay_iters} steps of decay "
            "(--lr-decay-iters, else --train-iters); shorten the warm-up"
        )


def _check_recompute(args: argparse.Namespace) -> None:
    if args.recompute_activations:
        if args.recompute_granularity == "full":
            raise ValueError(
                "--recompute-activations is selective but --recompute-granularity is full; give one of them"
            )
        args.recompute_granularity = "selective"
    granularity = args.recompute_granularity
    for option in ("method", "num_layers"):
        if getattr(args, f"recompute_{option}") is not None and granularity != "full":
            name = option.replace("_", "-")
            raise ValueError(f"--recompute-{name} is for full recomputation; add --recompute-granularity full")
    if granularity == "full" and args.recompute_method is None:
        raise ValueError("--recompute-granularity full needs --recompute-method; give uniform or block")
    if granularity == "full":
        args.recompute_num_layers = args.recompute_num_layers or 1
        if args.recompute_num_layers > args.num_layers:
            raise ValueError(
                f"--recompute-num-layers {args.recompute_num_layers} is more than the model's {args.num_layers} layers"
            )
    if args.recompute_modules is not None and granularity != "selective":
        raise ValueError("--recompute-modules is for selective recomputation; add --recompute-granularity selective")
    for module in args.recompute_modules or ():
        if reason := _REFUSED_MODULES.get(module):
            raise ValueError(f"--recompute-modules {module} cannot be used: {reason}; use core_attn or mlp")


def _check_data(args: argparse.Namespace) -> None:
    args.blend = parse_blend(args.data_path)
    args.split_weights = parse_split(args.split)
    if args.eval_iters and not args.split_weights[1]:
        raise ValueError(f"--split {args.split} leaves nothing for validation; add --eval-iters 0 or change the split")
    if bool(args.vocab_file) != bool(args.merge_file):
        given, missing = ("vocab", "merge") if args.vocab_file else ("merge", "vocab")
        raise ValueError(f"--{given}-file is given without --{missing}-file; give both or none")


def parse_blend(words: list[str]) -> tuple[list[str], list[float] | None]:
    """(prefixes, weights) of `--data-path PREFIX` or `--data-path WEIGHT PREFIX WEIGHT PREFIX ...`."""
    if len(words) == 1:
        return [words[0]], None
    if len(words) % 2:
        raise ValueError(f"--data-path has {len(words)} words; give one prefix, or pairs of a weight and a prefix")
    weights = []
    for word in words[0::2]:
        try:
            weight = float(word)
        except ValueError:
            raise ValueError(
                f"--data-path: {word!r} stands where a weight is wanted; give WEIGHT PREFIX pairs"
            ) from None
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(f"--data-path: weight {word} is not positive; give positive weights")
        weights.append(weight)
    return words[1::2], weights


def parse_split(split: str) -> tuple[float, float, float]:
    """`969,30,1` -> the three fractions; missing ones are 0."""
    try:
        weights = [float(part) for part in split.split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or any(not 0 <= weight < math.inf for weight in weights) or not weights[0]:
        raise ValueError(
            f"--split {split!r} is not understood; give up to three weights such as 969,30,1, train above 0"
        )
    total = sum(weights)
    train, valid, test = (weight / total for weight in [*weights, 0.0, 0.0][:3])
    return train, valid, test


def _check_output(args: argparse.Namespace) -> None:
    if args.save_interval is not None and not args.save:
        raise ValueError("--save-interval is given without --save; give the folder for the checkpoints")
    if args.keep_checkpoints is not None and not args.save:
        raise ValueError("--keep-checkpoints is given without --save; give the folder for the checkpoints")
    if args.override_opt_param_scheduler and not args.load:
        raise ValueError("--override-opt-param-scheduler changes what --load brings; give --load or remove it")
    for option in ("save", "load"):
        folder = getattr(args, option)
        if folder and Path(folder).exists() and not Path(folder).is_dir():
            raise ValueError(f"--{option} {folder} is a file; give a folder")
    if args.save:
        args.metrics_file = args.metrics_file or str(Path(args.save) / "metrics.jsonl")
        args.loss_plot = args.loss_plot or str(Path(args.save) / "loss.png")
    if args.metrics_file:
        check_metrics_file(args.metrics_file)
    if args.loss_plot and not args.metrics_file:
        raise ValueError("--loss-plot is drawn from the metrics file; give --metrics-file or --save")
    if args.loss_plot and Path(args.loss_plot).suffix != ".png":
        raise ValueError(f"--loss-plot {args.loss_plot} does not end in .png; give the name of a PNG file")


def check_metrics_file(path: str) -> None:
    """Raise ValueError where `path` holds anything but metrics, which a run must not write over."""
    try:
        with open(path, encoding="utf-8") as stream:
            first = stream.readline(1 << 20)
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--metrics-file {path} is not a file of metrics ({error}); give another name") from error
    try:
        is_metrics = not first or json.loads(first)["kind"] in ("run", "train", "validation")
    except (ValueError, TypeError, KeyError):
        is_metrics = False
    if not is_metrics:
        raise ValueError(f"--metrics-file {path} exists and does not hold metrics of a run; give another name")

"""Completes a parsed command line to a RunConfig, by the DeepSpeed JSON, the checkpoint, the processes and defaults."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tempo_megatron.models.arguments import read_given_model
from tempo_megatron.models.huggingface.config import is_config, read_config
from tempo_megatron.models.shape import NAMES, ModelShape, make_shape
from tempo_megatron.settings.arguments import describe_tempo_arguments, read_tempo_of_run
from tempo_megatron.settings.layer_values import FrozenDict
from tempo_megatron.training.run.arguments import parse_blend, parse_split
from tempo_megatron.training.run.deepspeed_config import complete_deepspeed_config, is_given, read_precision
from tempo_megatron.training.run.masking import read_masking, take_segments
from tempo_megatron.training.run.option import name_argument
from tempo_megatron.training.run.resume import (
    PRETRAINED_MAY_CHANGE,
    check_given_model,
    join_tempo,
    read_pretrained,
    read_settings,
    take_from_checkpoint,
)
from tempo_megatron.training.run.run_config import OPTIONS, WSD_DECAY_STYLES, RunConfig

_NEEDED = {
    "train_iters": "the steps of the whole run",
    "lr": "the highest learning rate",
    "data_path": "the prefix of a .bin/.idx pair",
}


def complete_run(
    args: argparse.Namespace,
    deepspeed: Mapping[str, Any],
    saved: Mapping[str, Any] | None,
    *,
    world_size: int,
    on_gpu: bool,
) -> RunConfig:
    """Completes the run that `args` describe; changes neither `args` nor `deepspeed`.

    `deepspeed` is of read_deepspeed_config, and `saved` of read_saved_run: None for a new run.

    Raises ValueError if something without a default is missing, or if two sources contradict each other.
    """
    settings, with_tempo = {}, deepspeed
    if saved:
        settings = read_settings(saved)
        args = argparse.Namespace(**{**vars(args), **take_from_checkpoint(args, deepspeed, saved)})
        with_tempo = join_tempo(args, deepspeed, settings)
    pretrained = read_pretrained(args.pretrained_checkpoint, args.family) if saved is None else None
    given = {**vars(args), "model": _complete_model(args, settings, saved, pretrained)}
    if given["bias_gelu_fusion"] is None:
        gelu_form = (pretrained or {}).get("gelu_form")
        if pretrained is None and args.model and is_config(args.model):
            gelu_form = read_config(args.model).gelu_form
        given["bias_gelu_fusion"] = on_gpu if gelu_form is None else gelu_form == "tanh"
    given |= _decide_recomputation(args)
    values = {name: _complete(name, given.get(name), args, deepspeed) for name in OPTIONS}
    others = {"num_workers": 2 if on_gpu else 0, "lr_decay_iters": values["train_iters"]}
    if values["lr_decay_style"] == "WSD":
        others["lr_wsd_decay_style"] = WSD_DECAY_STYLES[0]
    values |= {name: value for name, value in others.items() if values[name] is None}
    for name, what in _NEEDED.items():
        if values[name] is None:
            raise ValueError(f"{name_argument(name)} is missing; give {what}")
    tp = args.tensor_model_parallel_size
    data_parallel_size = divide_processes(world_size, tp, args.pipeline_model_parallel_size)
    completed = complete_deepspeed_config(deepspeed, {**given, **values}, data_parallel_size)
    tempo, budget = read_tempo_of_run(args, with_tempo)
    first = saved or pretrained
    values |= {
        "masking": read_masking(args.family, given),
        "precision": read_precision(completed),
        "sample_parts": tuple(saved["sample_parts"]) if saved else (),
        # The padding takes part in every softmax, so another layout keeps its size. An import has not padded for any.
        "vocab_padding_tp": first.get("vocab_padding_tp", first["tensor_model_parallel_size"]) if first else tp,
        "blend": parse_blend(values["data_path"]),
        "split_weights": parse_split(values["split"]),
        "world_size": world_size,
        "data_parallel_size": data_parallel_size,
        "on_gpu": on_gpu,
        "deepspeed": json.loads(json.dumps(completed), object_hook=FrozenDict),
        "tempo": tempo,
        "memory_budget": budget and budget.device_bytes,
        "host_memory": budget.host_bytes if budget else 0,
        "tempo_arguments": describe_tempo_arguments(args),
    }
    values |= {name: completed[each.in_json] for name, each in OPTIONS.items() if each.in_json}
    return RunConfig(**values)


def divide_processes(world_size: int, tensor_model_parallel_size: int, pipeline_model_parallel_size: int = 1) -> int:
    """Returns the data parallel size. Raises ValueError if the processes do not divide."""
    size = tensor_model_parallel_size * pipeline_model_parallel_size
    if world_size % size:
        options = f"--tensor-model-parallel-size {tensor_model_parallel_size}"
        if pipeline_model_parallel_size > 1:
            options += f" times --pipeline-model-parallel-size {pipeline_model_parallel_size}"
        raise ValueError(
            f"{options} does not divide the {world_size} processes; "
            f"start a multiple of {size} processes (deepspeed --num_gpus {size}, torchrun --nproc_per_node {size})"
        )
    return world_size // size


def _complete(name: str, value: Any, args: argparse.Namespace, deepspeed: Mapping[str, Any]) -> Any:
    """The value of a field: as given, else in the folder of --save, else the default if the JSON has none."""
    option = OPTIONS[name]
    if not value and option.in_save and args.save:
        return str(Path(args.save) / option.in_save)
    if value is None and not (option.in_json and is_given(deepspeed, option.in_json)):
        return option.default
    return tuple(value) if isinstance(value, list) else value


def _complete_model(
    args: argparse.Namespace,
    settings: Mapping[str, Any],
    saved: Mapping[str, Any] | None,
    pretrained: Mapping[str, Any] | None,
) -> ModelShape:
    """Makes the model of what was given and, for the rest, of what the checkpoint has."""
    stored = settings.get("model", {})
    if pretrained:
        stored = {name: pretrained[name] for name in NAMES if name in pretrained}
    if args.family == "bert":
        args = argparse.Namespace(**{**vars(args), **take_segments(args, stored)})
    given = read_given_model(args, args.family, stored=stored)
    if saved:
        check_given_model(given, saved, f"--load {args.load}")
    if pretrained:
        folder = f"--pretrained-checkpoint {args.pretrained_checkpoint}"
        check_given_model(given, pretrained, folder, PRETRAINED_MAY_CHANGE)
    return make_shape(**{**stored, **given})


def _decide_recomputation(args: argparse.Namespace) -> dict[str, Any]:
    granularity, num_layers = args.recompute_granularity, args.recompute_num_layers
    if args.recompute_activations and granularity in ("full", "none"):
        raise ValueError(
            f"--recompute-activations is selective but --recompute-granularity is {granularity}; give one of them"
        )
    granularity = "selective" if args.recompute_activations else None if granularity == "none" else granularity
    if granularity == "full" and num_layers is None:
        num_layers = 1
    return {"recompute_granularity": granularity, "recompute_num_layers": num_layers}

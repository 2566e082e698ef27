"""RunConfig: everything that is decided about a run before it starts, in one object that is only read afterwards.

`arguments.parse_arguments` reads the command line. `complete_run` adds what follows from the DeepSpeed JSON, the
checkpoint, the number of processes and the defaults. `checks.check_run` refuses what cannot train.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tempo_megatron.models.arguments import read_given_model
from tempo_megatron.models.huggingface.config import is_config, read_config
from tempo_megatron.models.shape import NAMES, ModelShape, make_shape
from tempo_megatron.settings.arguments import describe_tempo_arguments, read_tempo_of_run
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.training.run.arguments import DEFAULTS, WSD_DECAY_STYLES, Blend, parse_blend, parse_split
from tempo_megatron.training.run.batch_sizes import BatchSizes
from tempo_megatron.training.run.deepspeed_config import (
    complete_deepspeed_config,
    freeze_deepspeed_config,
    read_precision,
)
from tempo_megatron.training.run.masking import Masking, SpanMasking, read_masking, take_segments
from tempo_megatron.training.run.resume import (
    PRETRAINED_MAY_CHANGE,
    check_given_model,
    find_vocab_padding_tp,
    join_tempo,
    read_pretrained,
    read_settings,
    take_from_checkpoint,
)
from tempo_megatron.words.pipeline_layout import parse_pipeline_layout

_NEEDED = {
    "train_iters": "the steps of the whole run",
    "lr": "the highest learning rate",
    "data_path": "the prefix of a .bin/.idx pair",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run. `--help` describes the fields that have an argument of the same name."""

    model: ModelShape
    """Its vocab_size is as given; see task.Vocabulary for the rows of the embedding."""
    vocab_padding_tp: int
    """The tensor parallel size that the vocabulary is padded for: that of the run's first start."""

    # Training
    micro_batch_size: int
    global_batch_size: int
    num_micro_batches: int
    """Micro batches of one rank in a step of the full global batch size."""
    rampup_batch_size: tuple[int, int, int] | None
    train_iters: int
    exit_interval: int | None
    exit_signal_handler: bool
    eval_only: bool
    seed: int
    precision: str
    """fp32, bf16 or fp16."""

    # Optimizer
    lr: float
    min_lr: float
    lr_warmup_iters: int
    lr_decay_style: str
    lr_decay_iters: int
    lr_wsd_decay_iters: int | None
    lr_wsd_decay_style: str | None
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    clip_grad: float
    override_opt_param_scheduler: bool

    # Data
    data_path: tuple[str, ...]
    blend: Blend
    """Of --data-path."""
    split: str
    split_weights: tuple[float, float, float]
    data_cache_path: str | None
    vocab_file: str | None
    merge_file: str | None
    eod_mask_loss: bool
    masking: Masking | SpanMasking | None
    """None for GPT."""
    num_workers: int
    eval_interval: int
    eval_iters: int
    test_iters: int
    sample_parts: tuple[int, ...]
    """The checkpoint's: see datasets.build_datasets. Empty in a new run."""

    # Recomputation and fusion
    recompute_granularity: str | None
    recompute_method: str | None
    recompute_num_layers: int | None
    recompute_modules: tuple[str, ...] | None
    bias_gelu_fusion: bool
    bias_swiglu_fusion: bool
    bias_dropout_fusion: bool
    masked_softmax_fusion: bool

    # Output
    save: str | None
    load: str | None
    pretrained_checkpoint: str | None
    save_interval: int | None
    async_save: bool
    keep_checkpoints: int | None
    log_interval: int
    tensorboard_dir: str | None
    metrics_file: str | None
    loss_plot: str | None
    tempo_ledger: str | None
    log_dir: str | None
    profile: tuple[int, int] | None
    """The first and the last step that are recorded."""
    profile_ranks: tuple[int, ...]
    profile_dir: str | None

    # Distributed
    world_size: int
    data_parallel_size: int
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    num_layers_per_virtual_pipeline_stage: int | None
    pipeline_model_parallel_layout: str | None
    sequence_parallel: bool
    use_cpu_initialization: bool
    distributed_timeout_minutes: int
    fault_timeout: float
    on_gpu: bool
    deepspeed_config: str
    """Path of the JSON."""
    deepspeed: Mapping[str, Any]
    """Its content, with a value for each "auto" that the trainer decides. copy_deepspeed_config makes it a dict."""

    tempo: TempoConfig
    """As given; Job replaces each "auto" by a value."""
    memory_budget: int | None
    """The bytes per rank for which Job plans each "auto"; None plans nothing."""
    host_memory: int
    """The bytes of a host that the plan may use for all ranks of it; 0 offloads nothing."""
    tempo_arguments: str
    """Tempo's arguments as given, for the banner."""

    @property
    def batch_sizes(self) -> BatchSizes:
        """The samples of each training step; validation always has `global_batch_size`."""
        return BatchSizes(self.global_batch_size, self.rampup_batch_size)

    @property
    def layers_of_chunks(self) -> tuple[int, ...] | None:
        """Layers of each chunk of the pipeline, in the order of the model, if a layout says them; else None.

        Raises ValueError if it is not of this model.
        """
        layout, stages = self.pipeline_model_parallel_layout, self.pipeline_model_parallel_size
        if layout is None:
            return None
        return tuple(chunk.count("t") for chunk in parse_pipeline_layout(layout, self.model.num_layers, stages))

    @property
    def num_chunks(self) -> int:
        """Chunks of the model on each pipeline stage, of a run that was checked; 1 without interleaving."""
        if self.layers_of_chunks is not None:
            return len(self.layers_of_chunks) // self.pipeline_model_parallel_size
        per_chunk = self.num_layers_per_virtual_pipeline_stage
        return 1 if per_chunk is None else self.model.num_layers // (self.pipeline_model_parallel_size * per_chunk)


def complete_run(
    args: argparse.Namespace,
    deepspeed_config: Mapping[str, Any],
    saved: Mapping[str, Any] | None,
    *,
    world_size: int,
    on_gpu: bool,
) -> RunConfig:
    """Completes the run that `args` describe; changes neither `args` nor `deepspeed_config`.

    Args:
        args: of parse_arguments.
        deepspeed_config: of read_deepspeed_config.
        saved: of read_saved_run, the checkpoint to resume from; None for a new run.
        world_size: processes of the run.
        on_gpu: whether they have GPUs.

    Raises ValueError if something without a default is missing, or if two sources contradict each other.
    """
    settings, with_tempo = {}, deepspeed_config
    if saved:
        settings = read_settings(saved)
        args = argparse.Namespace(**{**vars(args), **take_from_checkpoint(args, deepspeed_config, saved)})
        with_tempo = join_tempo(args, deepspeed_config, settings)
    pretrained = read_pretrained(args.pretrained_checkpoint, args.family) if saved is None else None
    values = {**vars(args), "model": _complete_model(args, settings, saved, pretrained)}
    if values["bias_gelu_fusion"] is None:
        gelu_form = (pretrained or {}).get("gelu_form")
        if pretrained is None and args.model and is_config(args.model):
            gelu_form = read_config(args.model).gelu_form
        values["bias_gelu_fusion"] = on_gpu if gelu_form is None else gelu_form == "tanh"
    for name, default in DEFAULTS.items():
        if values.get(name, default) is None and name != "clip_grad":  # which the DeepSpeed JSON may decide
            values[name] = default
    if values["lr_decay_iters"] is None:
        values["lr_decay_iters"] = values["train_iters"]
    if values["lr_decay_style"] == "WSD" and values["lr_wsd_decay_style"] is None:
        values["lr_wsd_decay_style"] = WSD_DECAY_STYLES[0]
    for name, what in _NEEDED.items():
        if values[name] is None:
            raise ValueError(f"--{name.replace('_', '-')} is missing; give {what}")
    data_parallel_size = divide_processes(
        world_size, args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    )
    completed = complete_deepspeed_config(deepspeed_config, values, data_parallel_size)
    tempo, budget = read_tempo_of_run(args, with_tempo)
    values.setdefault("eod_mask_loss", False)
    first = saved or pretrained
    values |= {
        "masking": read_masking(args.family, values),
        "micro_batch_size": completed["train_micro_batch_size_per_gpu"],
        "global_batch_size": completed["train_batch_size"],
        "num_micro_batches": completed["gradient_accumulation_steps"],
        "clip_grad": completed["gradient_clipping"],
        "precision": read_precision(completed),
        "num_workers": (2 if on_gpu else 0) if args.num_workers is None else args.num_workers,
        "sample_parts": tuple(saved["sample_parts"]) if saved else (),
        "vocab_padding_tp": find_vocab_padding_tp(first) if first else args.tensor_model_parallel_size,
        "data_path": tuple(values["data_path"]),
        "blend": parse_blend(values["data_path"]),
        "split_weights": parse_split(values["split"]),
        "world_size": world_size,
        "data_parallel_size": data_parallel_size,
        "on_gpu": on_gpu,
        "deepspeed": freeze_deepspeed_config(completed),
        "tempo": tempo,
        "memory_budget": budget and budget.device_bytes,
        "host_memory": budget.host_bytes if budget else 0,
        "tempo_arguments": describe_tempo_arguments(args),
        "profile_ranks": (0,) if args.profile_ranks is None else tuple(args.profile_ranks),
    }
    if values["rampup_batch_size"] is not None:
        values["rampup_batch_size"] = tuple(values["rampup_batch_size"])
    values |= _complete_recomputation(args) | _complete_output(args)
    return RunConfig(**{field.name: values[field.name] for field in dataclasses.fields(RunConfig)})


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


def _complete_recomputation(args: argparse.Namespace) -> dict[str, Any]:
    granularity, num_layers = args.recompute_granularity, args.recompute_num_layers
    if args.recompute_activations:
        if granularity in ("full", "none"):
            raise ValueError(
                f"--recompute-activations is selective but --recompute-granularity is {granularity}; give one of them"
            )
        granularity = "selective"
    if granularity == "none":
        granularity = None
    if granularity == "full" and num_layers is None:
        num_layers = 1
    modules = None if args.recompute_modules is None else tuple(args.recompute_modules)
    return {"recompute_granularity": granularity, "recompute_num_layers": num_layers, "recompute_modules": modules}


def _complete_output(args: argparse.Namespace) -> dict[str, Any]:
    if not args.save:
        return {}
    return {
        "metrics_file": args.metrics_file or str(Path(args.save) / "metrics.jsonl"),
        "loss_plot": args.loss_plot or str(Path(args.save) / "loss.png"),
        "log_dir": args.log_dir or str(Path(args.save) / "logs"),
        "profile_dir": args.profile_dir or str(Path(args.save) / "profile"),
    }

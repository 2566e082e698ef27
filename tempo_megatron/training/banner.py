"""Writes the banner that a run prints when it starts."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from typing import Any

import torch

from tempo_megatron.cluster.installation import describe_implementation
from tempo_megatron.cluster.versions import find_version
from tempo_megatron.extras import is_installed
from tempo_megatron.memory.live.aside import RunPlan
from tempo_megatron.settings.operations import OPERATIONS
from tempo_megatron.slots.choose import Choices
from tempo_megatron.slots.offload import Offloading
from tempo_megatron.slots.report import TempoReport
from tempo_megatron.training.run.deepspeed_config import offloads_optimizer, read_zero_stage
from tempo_megatron.training.run.run_config import RunConfig
from tempo_megatron.words.deepspeed_json import find_unknown_keys

_PACKAGES = ("torch", "megatron-core", "deepspeed", "triton")
_OPTIONAL = {"Apex": "apex", "Transformer Engine": "transformer_engine"}


def find_versions() -> dict[str, str]:
    """Returns the version of each package that decides what a run computes; "-" if it is not installed."""
    versions = {package: find_version(package) or "-" for package in _PACKAGES}
    optional = {name: "yes" if is_installed(module) else "no" for name, module in _OPTIONAL.items()}
    return {"python": platform.python_version(), **versions, **optional}


def write_banner(
    run: RunConfig,
    choices: Choices,
    tempo_report: TempoReport,
    *,
    launcher: str,
    device: torch.device,
    padded_vocab_size: int,
    parameters: int,
    optimizer_name: str,
    settings: Mapping[str, Any],
    activation: str,
    plan: RunPlan | None = None,
    offloading: Offloading | None = None,
) -> str:
    """Returns one line per subject, from the packages to Tempo.

    Args:
        run: with the values of `choices` in place of "auto".
        choices: these values, and why one is not the first choice.
        tempo_report: which of the model's slots Tempo fills.
        launcher: name of the program that started the ranks.
        device: of this rank.
        padded_vocab_size: rows of the embedding.
        parameters: of the whole model.
        optimizer_name: class of DeepSpeed's optimizer.
        settings: of the optimizer, read from it.
        activation: name and form of the MLP's activation.
        plan: of the run's memory budget.
        offloading: of this rank's layers.
    """
    tp, dp = run.tensor_model_parallel_size, run.data_parallel_size
    parallel = f"TP {tp}{' + SP' if run.sequence_parallel else ''}, {_describe_pipeline(run)}DP {dp}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({torch.get_num_threads()} threads)"
    rows = {
        "packages": ", ".join(f"{name} {version}" for name, version in find_versions().items()),
        "layout": f"{run.world_size} x {name} by {launcher}: {parallel}",
        "model": f"{parameters:,} parameters, {run.model.summarize()}, vocabulary {padded_vocab_size}, {activation}",
        "dropout": f"attention {run.model.attention_dropout:g}, hidden {run.model.hidden_dropout:g}",
        "batch": f"global {run.global_batch_size} = micro {run.micro_batch_size} x DP {dp} x "
        f"{run.num_micro_batches} accumulated{_describe_batch_ramp(run)}",
        "deepspeed": _describe_deepspeed(run, optimizer_name),
        "optimizer": f"AdamW, betas {' '.join(f'{beta:g}' for beta in settings['adam_betas'])}, "
        f"eps {settings['adam_eps']:g}, weight decay {settings['weight_decay']:g}, clipping {settings['clip_grad']:g}",
        "schedule": _describe_schedule(run),
        "recompute": _describe_recomputation(run),
        "data": " ".join(run.data_path),
        "tempo": _describe_tempo(run, choices),
    }
    if offloading is not None and offloading.num_layers:
        rows["offload"] = offloading.describe()
    if plan is not None:
        rows["plan"] = plan.describe()
    if not run.tempo.is_off or choices.reasons:
        rows["replaced"] = tempo_report.describe_counts()
        rows["left"] = "\n".join(tempo_report.describe_left()) or "nothing"
    for operation in OPERATIONS.values():
        values = sorted(run.tempo.values_of(operation.name) - {"off"})
        if operation.has_banner_line and values:
            rows[operation.name] = "; ".join(
                describe_implementation(operation.name, device.type, value) for value in values
            )
    if ignored := find_unknown_keys(run.deepspeed):
        rows["ignored"] = f"DeepSpeed does not read {', '.join(ignored)} of {run.deepspeed_config}"
    width = max(map(len, rows))
    indent = "\n" + " " * (width + 2)
    return "\n".join(f"{name:<{width}}  {indent.join(text.splitlines())}" for name, text in rows.items())


def _describe_deepspeed(run: RunConfig, optimizer_name: str) -> str:
    config = run.deepspeed
    accumulated = config.get("data_types", {}).get("grad_accum_dtype") or run.precision
    offload = ", optimizer offloaded" if offloads_optimizer(config) else ""
    return (
        f"{run.deepspeed_config}: ZeRO {read_zero_stage(config)}, {run.precision}, "
        f"gradients accumulated in {accumulated}, {optimizer_name}{offload}"
    )


def _describe_pipeline(run: RunConfig) -> str:
    if run.pipeline_model_parallel_size == 1:
        return ""
    chunks = f" x {run.num_chunks} chunks" if run.num_chunks > 1 else ""
    return f"PP {run.pipeline_model_parallel_size}{chunks}, "


def _describe_batch_ramp(run: RunConfig) -> str:
    if run.rampup_batch_size is None:
        return ""
    start, increment, samples = run.rampup_batch_size
    return f"; {start} at first, {increment} more at a time over {samples} samples"


def _describe_schedule(run: RunConfig) -> str:
    decay = "" if run.lr_decay_style == "constant" else f" to {run.min_lr:g} at step {run.lr_decay_iters}"
    if run.lr_decay_style == "WSD":
        assert run.lr_wsd_decay_iters is not None
        stable = run.lr_decay_iters - run.lr_wsd_decay_iters
        return (
            f"learning rate {run.lr:g}, warm-up {run.lr_warmup_iters} steps, stable to step {stable}, then "
            f"{run.lr_wsd_decay_style}{decay}"
        )
    return f"learning rate {run.lr:g}, warm-up {run.lr_warmup_iters} steps, then {run.lr_decay_style}{decay}"


def _describe_recomputation(run: RunConfig) -> str:
    if run.recompute_granularity == "full":
        return f"full, {run.recompute_method}, {run.recompute_num_layers} layers"
    if run.recompute_granularity == "selective":
        return f"selective, {' '.join(run.recompute_modules or ('core_attn',))}"
    return "none"


def _describe_tempo(run: RunConfig, choices: Choices) -> str:
    block = run.deepspeed.get("tempo")
    said = "none" if block is None else " ".join(f"{key}={_write_value(value)}" for key, value in block.items())
    rest = "; what they leave out: the checkpoint" if run.sample_parts else ""
    return f"{choices.describe()} (arguments: {run.tempo_arguments}; block: {said}{rest})"


def _write_value(value: Any) -> str:
    return json.dumps(value, default=dict) if isinstance(value, Mapping) else str(value).lower()

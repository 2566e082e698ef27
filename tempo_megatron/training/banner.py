"""What a run says about itself when it starts."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
from collections.abc import Mapping
from typing import Any

import torch

from tempo_megatron import TempoConfig
from tempo_megatron.doctor import describe_implementation
from tempo_megatron.operations import CHOICES, OPERATIONS
from tempo_megatron.training.deepspeed_config import offloads_optimizer, unknown_keys, zero_stage

_PACKAGES = ("torch", "megatron-core", "deepspeed", "triton")
_OPTIONAL = {"Apex": "apex", "Transformer Engine": "transformer_engine"}


def versions() -> dict[str, str]:
    """Version of each package that decides what a run computes; "-" where one is not installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "-"
    for name, module in _OPTIONAL.items():
        found[name] = "yes" if importlib.util.find_spec(module) else "no"
    return found


def run_banner(
    args: argparse.Namespace,
    config: Mapping[str, Any],
    tempo_config: TempoConfig,
    *,
    launcher: str,
    device: torch.device,
    world_size: int,
    parameters: int,
    optimizer_name: str,
    settings: Mapping[str, Any],
    gelu_form: str,
) -> str:
    """One line per subject, from the packages to Tempo. `settings` is what the optimizer itself works with."""
    tp = args.tensor_model_parallel_size
    dp = world_size // tp
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({torch.get_num_threads()} threads)"
    rows = {
        "packages": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "layout": f"{world_size} x {name} by {launcher}: TP {tp}{' + SP' if args.sequence_parallel else ''}, DP {dp}",
        "model": f"{parameters:,} parameters, {args.num_layers} layers, hidden {args.hidden_size}, "
        f"{args.num_attention_heads} heads, {args.seq_length} tokens, vocabulary {args.padded_vocab_size}, "
        f"{gelu_form} GELU",
        "dropout": f"attention {args.attention_dropout:g}, hidden {args.hidden_dropout:g}",
        "batch": f"global {args.global_batch_size} = micro {args.micro_batch_size} x DP {dp} x "
        f"{args.num_micro_batches} accumulated",
        "deepspeed": _deepspeed_line(args, config, optimizer_name),
        "optimizer": f"AdamW, betas {' '.join(f'{beta:g}' for beta in settings['adam_betas'])}, "
        f"eps {settings['adam_eps']:g}, weight decay {settings['weight_decay']:g}, clipping {settings['clip_grad']:g}",
        "schedule": _schedule_line(args),
        "recompute": _recompute_line(args),
        "data": " ".join(args.data_path),
        "tempo": _tempo_lines(args, config, tempo_config),
    }
    for operation in OPERATIONS.values():
        choice = getattr(tempo_config, operation.name)
        if operation.has_banner_line and choice != "off":
            rows[operation.name] = describe_implementation(operation.name, device.type, choice)
    if ignored := unknown_keys(config):
        rows["ignored"] = f"DeepSpeed does not read {', '.join(ignored)} of {args.deepspeed_config}"
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows.items())


def _deepspeed_line(args: argparse.Namespace, config: Mapping[str, Any], optimizer_name: str) -> str:
    accumulated = config.get("data_types", {}).get("grad_accum_dtype") or args.precision
    offload = ", optimizer offloaded" if offloads_optimizer(config) else ""
    return (
        f"{args.deepspeed_config}: ZeRO {zero_stage(config)}, {args.precision}, "
        f"gradients accumulated in {accumulated}, {optimizer_name}{offload}"
    )


def _schedule_line(args: argparse.Namespace) -> str:
    decay = "" if args.lr_decay_style == "constant" else f" to {args.min_lr:g} at step {args.lr_decay_iters}"
    return f"learning rate {args.lr:g}, warm-up {args.lr_warmup_iters} steps, then {args.lr_decay_style}{decay}"


def _recompute_line(args: argparse.Namespace) -> str:
    if args.recompute_granularity == "full":
        return f"full, {args.recompute_method}, {args.recompute_num_layers} layers"
    if args.recompute_granularity == "selective":
        return f"selective, {' '.join(args.recompute_modules or ['core_attn'])}"
    return "none"


def _tempo_lines(args: argparse.Namespace, config: Mapping[str, Any], tempo_config: TempoConfig) -> str:
    switch = {None: "", True: "--use-tempo ", False: "--no-use-tempo "}[args.use_tempo]
    given = {name: getattr(args, f"tempo_{name}") for name in CHOICES}
    typed = switch + " ".join(f"--tempo-{name} {value}" for name, value in given.items() if value is not None)
    block = config.get("tempo")
    said = "none" if block is None else " ".join(f"{key}={str(value).lower()}" for key, value in block.items())
    result = "off (stock)" if tempo_config.is_off else tempo_config.describe()
    return f"{result} (arguments: {typed.strip() or 'none'}; block: {said})"

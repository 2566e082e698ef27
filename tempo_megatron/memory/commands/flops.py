"""The `tempo-megatron flops` command."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tempo_megatron.memory.commands.requested_run import read_requested_shape
from tempo_megatron.memory.plan.flops import (
    count_forward_flops,
    count_hardware_flops,
    count_model_flops,
    find_utilisation,
)
from tempo_megatron.memory.plan.gpu import Gpu, read_gpu
from tempo_megatron.models.layout import pad_vocab_size
from tempo_megatron.models.shape_file import name_shape_file

# Title, name of the count, name of its share of the peak.
_ROWS = (
    ("model FLOPs", "model_flops", "mfu"),
    ("hardware FLOPs", "hardware_flops", "hfu"),
    ("as equation 8 of arXiv 2205.05198 has it", "hardware_flops_as_in_equation_8", "hfu_as_in_equation_8"),
)


def run_flops(args: argparse.Namespace) -> int:
    """Count and print. Raises ValueError for what cannot be counted."""
    if (args.step_seconds is None) != (args.gpu is None):
        raise ValueError("--step-seconds and --gpu are needed together to compute utilisation; give both or neither")
    gpu = read_gpu(args.gpu) if args.gpu else None
    figures = count_figures(args, gpu)
    print(format_figures(figures))
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def count_figures(args: argparse.Namespace, gpu: Gpu | None) -> dict[str, Any]:
    """What the command prints, by name."""
    shape = read_requested_shape(args)
    assert shape.vocab_size is not None
    vocab_size = pad_vocab_size(shape.vocab_size, shape.make_vocab_size_divisible_by, args.tp)
    samples = args.global_batch_size or args.micro_batch_size
    forward = count_forward_flops(shape, samples, vocab_size)
    model, hardware = count_model_flops(forward), count_hardware_flops(forward, args.recompute)
    figures: dict[str, Any] = {
        "model": name_shape_file(args.model),
        "samples": samples,
        "seq_length": shape.seq_length,
        "vocab_size": vocab_size,
        "recompute": args.recompute,
        "model_flops": model,
        "hardware_flops": hardware.total,
        "hardware_flops_as_in_equation_8": hardware.as_in_equation_8,
    }
    if gpu is not None:
        peak = gpu.matmul_flops_per_second[args.dtype]
        if (least := hardware.total / (args.gpus * peak)) > args.step_seconds:
            raise ValueError(
                f"--step-seconds is {args.step_seconds:g}, and {args.gpus} x {gpu.title} need {least:.3g} s for these "
                "FLOPs at their peak; correct --step-seconds, --gpus or the batch"
            )
        figures |= {"gpu": gpu.title, "gpus": args.gpus, "step_seconds": args.step_seconds}
        for _, name, share in _ROWS:
            flops = figures[name]
            figures[share] = None if flops is None else find_utilisation(flops, args.step_seconds, args.gpus, peak)
    return figures


def format_figures(figures: dict[str, Any]) -> str:
    """A line per count, with its share of the peak where there is one."""
    what = f", {' and '.join(figures['recompute'])} recomputed" if figures["recompute"] else ""
    lines = [
        f"{figures['model']}, {figures['samples']} samples of {figures['seq_length']} tokens, "
        f"v {figures['vocab_size']}{what}"
    ]
    if "gpu" in figures:
        lines[0] += f"; {figures['step_seconds']:g} s on {figures['gpus']} x {figures['gpu']}"
    for title, name, share in _ROWS:
        if figures[name] is not None:
            utilisation = f"   {share[:3].upper()} {figures[share]:.1%}" if "gpu" in figures else ""
            lines.append(f"{title:<42}{figures[name] / 1e12:>16,.1f} TFLOP{utilisation}")
    return "\n".join(lines)

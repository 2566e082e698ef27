"""The `tempo-megatron flops` command."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tempo_megatron.memory.commands.requested_run import read_requested_shape
from tempo_megatron.memory.plan.gpu import Gpu, read_gpu
from tempo_megatron.models.shape import ModelShape, pad_vocab_size


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
    forward = count_forward_flops(shape, args.global_batch_size or args.micro_batch_size, vocab_size)
    model, hardware = count_model_flops(forward), count_hardware_flops(forward, args.recompute)
    figures: dict[str, Any] = {
        "model": Path(args.model).stem,
        "samples": args.global_batch_size or args.micro_batch_size,
        "seq_length": shape.seq_length,
        "vocab_size": vocab_size,
        "recompute": args.recompute,
        "model_flops": model,
        "hardware_flops": hardware.total,
        "hardware_flops_as_in_equation_8": hardware.as_in_equation_8,
    }
    if gpu is not None:
        peak = gpu.matmul_flops_per_second[args.dtype]
        figures |= {"gpu": gpu.title, "gpus": args.gpus, "step_seconds": args.step_seconds}
        figures |= {
            name: None if flops is None else find_utilisation(flops, args.step_seconds, args.gpus, peak)
            for name, flops in (
                ("mfu", model),
                ("hfu", hardware.total),
                ("hfu_as_in_equation_8", hardware.as_in_equation_8),
            )
        }
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
    rows = (
        ("model FLOPs", "model_flops", "MFU", "mfu"),
        ("hardware FLOPs", "hardware_flops", "HFU", "hfu"),
        ("as equation 8 of arXiv 2205.05198 has it", "hardware_flops_as_in_equation_8", "HFU", "hfu_as_in_equation_8"),
    )
    for title, name, short, share in rows:
        if figures[name] is not None:
            utilisation = f"   {short} {figures[share]:.1%}" if "gpu" in figures else ""
            lines.append(f"{title:<42}{figures[name] / 1e12:>16,.1f} TFLOP{utilisation}")
    return "\n".join(lines)


RECOMPUTED = ("core_attn", "mlp", "full")
_PASSES = 3
"""Forward, and backward's two products for each of forward's."""


@dataclasses.dataclass(frozen=True)
class ForwardFlops:
    """One forward of a whole model."""

    projections: int
    """Queries, keys and values, and the projection behind attention, of all layers."""
    core_attention: int
    mlp: int
    head: int
    """The output layer, and the dense layer before it that a BERT has."""

    @property
    def layers(self) -> int:
        return self.projections + self.core_attention + self.mlp

    @property
    def total(self) -> int:
        return self.layers + self.head


@dataclasses.dataclass(frozen=True)
class HardwareFlops:
    """What the devices compute in a step."""

    total: int
    as_in_equation_8: int | None
    """Recomputed attention counted three times, as the paper's HFU has it; None without recomputed attention alone."""


def count_forward_flops(shape: ModelShape, num_samples: int, vocab_size: int) -> ForwardFlops:
    """One forward of `num_samples` through a GPT or a BERT.

    Args:
        shape: the model; its window of attention, if any, is not looked at.
        num_samples: B, of seq_length tokens each.
        vocab_size: v, rows of the output layer with their padding.

    Raises ValueError for a T5.
    """
    if shape.family == "t5":
        raise ValueError("the model is a T5, whose FLOPs are not counted; expected a GPT or a BERT")
    tokens, h = num_samples * shape.seq_length, shape.hidden_size
    width = shape.num_attention_heads * shape.kv_channels
    kv_width = shape.num_query_groups * shape.kv_channels
    dense = h * h if shape.family == "bert" else 0
    return ForwardFlops(
        projections=shape.num_layers * 2 * tokens * h * (2 * width + 2 * kv_width),
        core_attention=shape.num_layers * 2 * 2 * tokens * shape.seq_length * width,
        mlp=shape.num_layers * 2 * tokens * h * shape.ffn_hidden_size * (3 if shape.is_gated else 2),
        head=2 * tokens * (h * vocab_size + dense),
    )


def count_model_flops(forward: ForwardFlops) -> int:
    """Equation 7: what a step needs, however it is computed."""
    return _PASSES * forward.total


def count_hardware_flops(forward: ForwardFlops, recompute: Collection[str]) -> HardwareFlops:
    """What a step computes with Megatron's recomputation of `recompute`: any of RECOMPUTED."""
    model = count_model_flops(forward)
    if "full" in recompute:
        return HardwareFlops(model + forward.layers, None)
    again = forward.mlp * ("mlp" in recompute) + forward.core_attention * ("core_attn" in recompute)
    printed = model + _PASSES * forward.core_attention if set(recompute) == {"core_attn"} else None
    return HardwareFlops(model + again, printed)


def find_utilisation(flops: int, step_seconds: float, num_gpus: int, peak_flops_per_second: float) -> float:
    """The share of the peak of all GPUs: MFU of model FLOPs, HFU of hardware FLOPs."""
    return flops / step_seconds / (num_gpus * peak_flops_per_second)

"""`tempo-megatron order`: finds a training step's order of least memory, on tensors without memory."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tempo_megatron.memory.commands.requested_run import read_requested_shape
from tempo_megatron.memory.fake_tensors import use_megatron_fakes
from tempo_megatron.memory.show.plots import open_reports
from tempo_megatron.memory.simulated.chunk_model import (
    build_ledger_config,
    convert_parameters,
    replace_attention,
    simulate_rank,
)
from tempo_megatron.models.build import DTYPES, build_model, make_inputs
from tempo_megatron.models.layout import pad_vocab_size
from tempo_megatron.models.shape import ModelShape
from tempo_megatron.models.shape_file import name_shape_file
from tempo_megatron.roam.capture import CapturedStep, capture_step
from tempo_megatron.roam.order import OperationOrder, find_order
from tempo_megatron.roam.placement import Placement, find_arena
from tempo_megatron.settings.arguments import tempo_config_from
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.slots.choose import choose
from tempo_megatron.words.argument_types import format_bytes
from tempo_megatron.words.deepspeed_json import read_deepspeed_json

_OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
_USE = (
    "to use it: OrderedStep runs such an order of a model without dropout (docs/order.md); "
    'torch.compile(model, backend="tempo_order") orders each compiled graph; Megatron\'s own loop cannot yet'
)
# The alignment of every address, as torch's CUDA allocator has it.
_ALIGNMENT = 512


def run_order(args: argparse.Namespace) -> int:
    """Captures, orders and places one step, and prints the gain. Raises ValueError for what cannot be captured."""
    tempo_config = tempo_config_from(args, read_deepspeed_json(args.deepspeed_config) if args.deepspeed_config else {})
    shape = read_requested_shape(args)
    if shape.num_experts is not None:
        raise ValueError(
            f"--model {args.model} has experts, whose tokens differ from step to step, and an order is of one graph; "
            "give a model without"
        )
    name = name_shape_file(args.model)
    title = f"{name}, {args.dtype}, s {shape.seq_length}, b {args.micro_batch_size}, {args.optimizer}"
    reports = open_reports(args, title)
    times = [time.perf_counter()]
    captured = capture_megatron_step(shape, tempo_config, args)
    times.append(time.perf_counter())
    plan = find_order(captured.graph, work_limit=args.work_limit)
    times.append(time.perf_counter())
    placement = None
    if not args.no_layout:
        order, placement = find_arena(captured.graph, plan.order, alignment=_ALIGNMENT)
        plan = dataclasses.replace(plan, order=order)
    times.append(time.perf_counter())
    spans = (after - before for before, after in itertools.pairwise(times))
    figures = list_figures(captured, plan, placement, dict(zip(("capture", "order", "layout"), spans, strict=True)))
    table = format_order(figures)
    print(title, table, sep="\n")
    curves = {"eager mode": captured.count_eager_bytes(), "this plan": captured.graph.count_bytes(plan.order)}
    for file, report in reports.items():
        report.add_text(table)
        report.add_curves(
            "alive while each operation runs",
            {label: (list(range(len(sizes))), [size / 2**20 for size in sizes]) for label, sizes in curves.items()},
            ("operation", "MiB"),
            line=("no order's peak is lower", plan.lower_bound / 2**20),
        )
        report.save(file)
    if args.json:
        Path(args.json).write_text(json.dumps({"title": title, **figures}, indent=2) + "\n", encoding="utf-8")
    return 0


def capture_megatron_step(shape: ModelShape, tempo_config: TempoConfig, args: argparse.Namespace) -> CapturedStep:
    """Captures forward and backward of one micro batch, and the update, on one rank, in the dtype of the parameters.

    Stock attention is fused, as people run it: it keeps its output and a float32 for each row of scores, as
    FlashAttention does. Tempo's operation stands for it.
    """
    with simulate_rank(1), use_megatron_fakes():
        dtype, recompute = DTYPES[args.dtype], tuple(args.recompute)
        config = build_ledger_config(shape, sequence_parallel=False, dtype=dtype, recompute=recompute)
        chosen = choose(config, replace_attention(tempo_config)).config
        vocab_size = pad_vocab_size(shape.vocab_size or 0, shape.make_vocab_size_divisible_by, 1)
        model = build_model(shape, config, chosen, vocab_size)
        convert_parameters(model, dtype)
        model.train()
        inputs = make_inputs(shape, vocab_size, args.micro_batch_size, causal_mask=False)
        optimizer = _OPTIMIZERS[args.optimizer](model.parameters())

        def compute_loss(model: torch.nn.Module, inputs: Any) -> Tensor:
            result = model(**inputs)
            losses: Tensor = result[0] if isinstance(result, tuple) else result
            return losses.float().mean()

        return capture_step(model, compute_loss, (inputs,), optimizer)


def list_figures(
    captured: CapturedStep, plan: OperationOrder, placement: Placement | None, seconds: dict[str, float]
) -> dict[str, Any]:
    """Lists what --json writes: the plan's figures, its order by name, and the arena."""
    return {
        **{field.name: getattr(plan, field.name) for field in dataclasses.fields(plan) if field.name != "order"},
        "eager_peak_bytes": max(captured.count_eager_bytes()),
        "standing_bytes": captured.graph.standing_bytes,
        "arena_bytes": placement.height if placement else None,
        "arena_lower_bound": placement.lower_bound if placement else None,
        "seconds": seconds,
        "order": [captured.graph.operations[place].name for place in plan.order],
    }


def format_order(figures: dict[str, Any]) -> str:
    """Formats the peak before and after, its bound, the arena, and the time that it took."""
    given, standing, arena = figures["eager_peak_bytes"], figures["standing_bytes"], figures["arena_bytes"]
    peak, bound = figures["peak_bytes"], figures["lower_bound"]
    proof = "no order needs less" + ("" if peak == bound else f" than {format_bytes(bound)}")
    lines = [
        f"{len(figures['order'])} operations in {figures['num_cuts']} parts; {format_bytes(standing)} are there "
        "throughout",
        f"peak of eager mode       {format_bytes(given)}",
        f"peak of this plan        {format_bytes(peak)}, {_percent(given - peak, given)} less "
        f"({_percent(given - peak, given - standing)} of what is not there throughout); {proof}",
    ]
    if arena is not None:
        waste = _percent(arena - figures["arena_lower_bound"], arena)
        lines.append(f"arena                    {format_bytes(arena)}, {waste} above its bound")
    lines.append(", ".join(f"{name} {value:.2f} s" for name, value in figures["seconds"].items()))
    return "\n".join([*lines, _USE])


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.2f} %"

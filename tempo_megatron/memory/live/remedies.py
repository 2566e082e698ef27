"""Finds changes to the command line that would have fitted in memory, cheapest first."""

from __future__ import annotations

import base64
import dataclasses
import json
import pickle
import resource
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tempo_megatron import cpu
from tempo_megatron.memory.estimate.estimate import PART_NAMES, RankEstimate, RankLayout, estimate_ranks
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.memory.kept.ledger import build_ledger_config, measure_model
from tempo_megatron.memory.live.out_of_memory import Order
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.words.memory_size import format_bytes

_RECOMPUTE = {"activation": "recompute", "norm": "recompute"}


@dataclasses.dataclass(frozen=True)
class Change:
    """What a user may type, and the run that it makes."""

    text: str
    layout: RankLayout
    tempo: TempoConfig


def explain(order: Order) -> str:
    """What stands at the peak, by operation, and the smallest change that fits."""
    now = _estimate(order, order.layout, order.tempo)
    lines = [f"at the peak, in the {now.moment}, the estimate has {format_bytes(now.peak_bytes)} on this rank:"]
    for num_bytes, name in sorted(((now.parts[name], name) for name in PART_NAMES if now.parts[name]), reverse=True):
        lines.append(f"  {name:<44}{format_bytes(num_bytes):>14}")
        if name == "layers":
            lines += [f"    {what:<42}{format_bytes(kept):>14}" for what, kept in _list_operations(order)]
    if order.capacity is not None and now.peak_bytes <= order.capacity:
        lines.append(
            f"by the estimate that fits the {format_bytes(order.capacity)} that torch may take: others hold memory of "
            "this GPU, or it is fragmented (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)"
        )
    limit = now.peak_bytes - (order.requested or 1)
    if order.capacity is not None:
        limit = min(limit, order.capacity)
    tried = []
    for change in list_changes(order):
        try:
            found = _estimate(order, change.layout, change.tempo)
        except ValueError:
            continue  # what this model cannot have
        if found.peak_bytes <= limit:
            lines.append(f"the smallest change that would have fitted {format_bytes(limit)}: {change.text}")
            lines.append(f"  by the estimate its peak is {format_bytes(found.peak_bytes)}")
            return "\n".join(lines)
        tried.append((found.peak_bytes, change.text))
    if tried:
        least, text = min(tried)
        lines.append(
            f"nothing on this list fits {format_bytes(limit)}; the least is {format_bytes(least)}, with {text}; use "
            "more devices (--tensor-model-parallel-size) or a smaller model"
        )
    return "\n".join(lines)


def list_changes(order: Order) -> Iterator[Change]:
    """From what costs a run least: single changes first, then what goes together."""
    layout, tempo = order.layout, order.tempo
    steps: list[tuple[str, RankLayout, TempoConfig]] = []
    on = TempoConfig() if tempo.is_off else tempo
    switch = "--use-tempo" if tempo.is_off else ""
    if tempo.is_off:
        steps.append((switch, layout, on))
    lower: dict[str, Any] = {name: value for name, value in _RECOMPUTE.items() if getattr(on, name) != value}
    least = dataclasses.replace(on, **lower)
    words = " ".join(filter(None, [switch, *(f"--tempo-{name} {value}" for name, value in lower.items())]))
    if lower:
        steps.append((words, layout, least))
    if layout.tensor_parallel > 1 and not layout.sequence_parallel:
        parallel = dataclasses.replace(layout, sequence_parallel=True)
        steps += [("--sequence-parallel", parallel, tempo), (f"{words} --sequence-parallel".strip(), parallel, least)]
    if not layout.recompute:
        selective = dataclasses.replace(layout, recompute=("core_attn",))
        steps.append(("--recompute-activations", selective, tempo))
    full = dataclasses.replace(layout, recompute=("full",))
    smaller = _list_smaller_batches(order)
    for size in smaller:
        steps.append((f"--micro-batch-size {size}", dataclasses.replace(layout, micro_batch_size=size), tempo))
    for size in smaller:
        both = dataclasses.replace(layout, micro_batch_size=size)
        steps.append((f"{words} --micro-batch-size {size}".strip(), both, least))
    if "full" not in layout.recompute:
        text = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        steps.append((text, full, tempo))
        steps.append((f"{words} {text}".strip(), full, least))
        if smaller:
            last = dataclasses.replace(full, micro_batch_size=smaller[-1])
            steps.append((f"{words} {text} --micro-batch-size {smaller[-1]}".strip(), last, least))
    yield from (Change(*step) for step in steps)


def _list_smaller_batches(order: Order) -> Sequence[int]:
    """Micro batches of which a step has a whole number, from the largest."""
    layout = order.layout
    per_rank = (order.global_batch_size or layout.micro_batch_size * layout.data_parallel) // layout.data_parallel
    return [size for size in range(layout.micro_batch_size - 1, 0, -1) if per_rank % size == 0]


def _estimate(order: Order, layout: RankLayout, tempo: TempoConfig) -> RankEstimate:
    return estimate_ranks(order.shape, layout, tempo, optimizer=order.optimizer)[order.stage]


def _list_operations(order: Order) -> list[tuple[str, int]]:
    """What all layers of one rank keep of one micro batch, by operation."""
    cpu.use_cpu()
    layout = order.layout
    with simulate_layout(layout.tensor_parallel):
        config = build_ledger_config(
            order.shape,
            sequence_parallel=layout.sequence_parallel,
            dtype=layout.dtype,
            recompute=layout.recompute,
        )
        ledger = measure_model(
            config,
            order.tempo,
            shape=order.shape,
            vocab_size=128 * layout.tensor_parallel,
            micro_batch_size=layout.micro_batch_size,
        )
    num_layers = order.shape.num_layers // layout.pipeline_parallel
    found = [
        (f"  kept by {row.operation}, {num_layers} layers", num_layers * row.num_bytes) for row in ledger.layer_rows
    ]
    return sorted(found, key=lambda each: -each[1])


def main() -> None:
    """Read an Order from stdin, write what `explain` says to stdout, as JSON."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)
    print(json.dumps(explain(pickle.loads(base64.b64decode(sys.stdin.read())))), flush=True)


if __name__ == "__main__":
    main()

"""Finds changes to the command line that would have fitted in memory, cheapest first."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from tempo_megatron.memory.estimate.estimate import PART_NAMES, estimate_ranks
from tempo_megatron.memory.kept.ledger import measure_run
from tempo_megatron.memory.run import Run
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.words.argument_types import format_bytes

_RECOMPUTE = {"activation": "recompute", "norm": "recompute"}


@dataclasses.dataclass(frozen=True)
class Change:
    """What a user may type, and the run that it makes."""

    text: str
    run: Run


def explain(run: Run, stage: int = 0, requested: int | None = None, capacity: int | None = None) -> str:
    """What stands at the peak, by operation, and the smallest change that fits.

    Args:
        run: as it ran.
        stage: pipeline stage of the rank, from 0.
        requested: bytes that could not be allocated.
        capacity: bytes that all tensors may take; None where nobody knows.

    Raises ValueError as `estimate_ranks`.
    """
    now = estimate_ranks(run)[stage]
    lines = [f"at the peak, in the {now.moment}, the estimate has {format_bytes(now.peak_bytes)} on this rank:"]
    for num_bytes, name in sorted(((now.parts[name], name) for name in PART_NAMES if now.parts[name]), reverse=True):
        lines.append(f"  {name:<44}{format_bytes(num_bytes):>14}")
        if name == "layers":
            lines += [f"    {what:<42}{format_bytes(kept):>14}" for what, kept in _list_operations(run, stage)]
    if capacity is not None and now.peak_bytes <= capacity:
        lines.append(
            f"by the estimate that fits the {format_bytes(capacity)} that torch may take: others hold memory of this "
            "GPU, or it is fragmented (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)"
        )
    limit = now.peak_bytes - (requested or 1)
    if capacity is not None:
        limit = min(limit, capacity)
    tried = []
    for change in list_changes(run):
        try:
            found = estimate_ranks(change.run)[stage]
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


def list_changes(run: Run) -> Iterator[Change]:
    """From what costs a run least: single changes first, then what goes together."""
    steps: list[tuple[str, dict[str, Any]]] = []
    on = TempoConfig() if run.tempo.is_off else run.tempo
    switch = "--use-tempo" if run.tempo.is_off else ""
    if run.tempo.is_off:
        steps.append((switch, {"tempo": on}))
    lower: dict[str, Any] = {name: value for name, value in _RECOMPUTE.items() if getattr(on, name) != value}
    least = {"tempo": dataclasses.replace(on, **lower)}
    words = " ".join(filter(None, [switch, *(f"--tempo-{name} {value}" for name, value in lower.items())]))
    if lower:
        steps.append((words, least))
    if run.tensor_parallel > 1 and not run.sequence_parallel:
        parallel = {"sequence_parallel": True}
        steps += [("--sequence-parallel", parallel), (f"{words} --sequence-parallel".strip(), {**parallel, **least})]
    if not run.recompute:
        steps.append(("--recompute-activations", {"recompute": ("core_attn",)}))
    smaller = _list_smaller_batches(run)
    for size in smaller:
        steps.append((f"--micro-batch-size {size}", {"micro_batch_size": size}))
    for size in smaller:
        steps.append((f"{words} --micro-batch-size {size}".strip(), {"micro_batch_size": size, **least}))
    if "full" not in run.recompute or run.recompute_num_layers is not None:
        text = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        full = {"recompute": ("full",), "recompute_num_layers": None}
        steps.append((text, full))
        steps.append((f"{words} {text}".strip(), {**full, **least}))
        if smaller:
            last = {**full, "micro_batch_size": smaller[-1], **least}
            steps.append((f"{words} {text} --micro-batch-size {smaller[-1]}".strip(), last))
    yield from (Change(text, dataclasses.replace(run, **changes)) for text, changes in steps)


def _list_smaller_batches(run: Run) -> Sequence[int]:
    """Micro batches of which a step has a whole number, from the largest."""
    samples = run.micro_batch_size * (run.num_micro_batches or 1)
    return [size for size in range(run.micro_batch_size - 1, 0, -1) if samples % size == 0]


def _list_operations(run: Run, stage: int) -> list[tuple[str, int]]:
    """What all layers of one rank keep of one micro batch, by operation."""
    layers = (layer for chunk in run.list_chunks(stage) for layer in range(len(chunk)))
    found = []
    for recompute, number in collections.Counter(map(run.find_recomputed, layers)).items():
        ledger = measure_run(dataclasses.replace(run, recompute=recompute, recompute_num_layers=None))
        found += [(f"  kept by {row.operation}, {number} layers", number * row.num_bytes) for row in ledger.layer_rows]
    return sorted(found, key=lambda each: -each[1])

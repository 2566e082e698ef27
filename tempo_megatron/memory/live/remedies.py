"""Finds changes to the command line that would have fitted in memory, cheapest first."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

from tempo_megatron.memory.rank.estimate import PARTS, estimate_ranks
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.show.ledger import measure_run
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.words.argument_types import format_bytes

_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_Part = tuple[str, dict[str, Any]]
"""Words of the command line, and the fields of a Run that they set."""


def explain(run: Run, stage: int = 0, requested: int | None = None, capacity: int | None = None) -> str:
    """What is alive at the peak of a run that failed, by operation, and the smallest change that fits.

    `stage` is that of the rank, from 0. `requested` bytes could not be allocated, and `capacity` bytes are what all
    tensors may take; None where that is not known. Raises ValueError as `estimate_ranks`.
    """
    now = estimate_ranks(run)[stage]
    lines = [f"at the peak, in the {now.moment}, the estimate has {format_bytes(now.peak_bytes)} on this rank:"]
    for num_bytes, name in sorted(((now.parts[name], name) for name in PARTS if now.parts[name]), reverse=True):
        lines.append(f"  {name:<44}{format_bytes(num_bytes):>14}")
        if name == "layers":
            lines += [f"    {what:<42}{format_bytes(kept):>14}" for what, kept in _list_operations(run, stage)]
    if capacity is not None and now.peak_bytes <= capacity:
        lines.append(
            f"by the estimate that fits the {format_bytes(capacity)} that torch may take: others hold memory of this "
            "GPU, or it is fragmented (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)"
        )
    limit = min(now.peak_bytes - (requested or 1), now.peak_bytes if capacity is None else capacity)
    tried = []
    for text, changed in list_changes(run):
        try:
            peak_bytes = estimate_ranks(changed)[stage].peak_bytes
        except ValueError:
            continue  # what this model cannot have
        if peak_bytes <= limit:
            lines.append(f"the smallest change that would have fitted {format_bytes(limit)}: {text}")
            lines.append(f"  by the estimate its peak is {format_bytes(peak_bytes)}")
            return "\n".join(lines)
        tried.append((peak_bytes, text))
    if tried:
        least, text = min(tried)
        lines.append(
            f"nothing on this list fits {format_bytes(limit)}; the least is {format_bytes(least)}, with {text}; use "
            "more devices (--tensor-model-parallel-size) or a smaller model"
        )
    return "\n".join(lines)


def list_changes(run: Run) -> Iterator[tuple[str, Run]]:
    """Words to add to the command line, and the run with them, from the change that costs a run least: single ones
    first, then several together."""
    on = TempoConfig() if run.tempo.is_off else run.tempo
    lower: dict[str, Any] = {name: "recompute" for name in ("activation", "norm") if getattr(on, name) != "recompute"}
    words = ["--use-tempo"] * run.tempo.is_off + [f"--tempo-{name} {value}" for name, value in lower.items()]
    least: _Part = " ".join(words), {"tempo": dataclasses.replace(on, **lower)}
    parallel: _Part = "--sequence-parallel", {"layout": dataclasses.replace(run.layout, sp=True)}
    # Smaller micro batches that divide the samples of a step, the largest first.
    samples = run.micro_batch_size * (run.num_micro_batches or 1)
    sizes = [size for size in range(run.micro_batch_size - 1, 0, -1) if samples % size == 0]
    smaller: list[_Part] = [(f"--micro-batch-size {size}", {"micro_batch_size": size}) for size in sizes]
    full: _Part = _FULL, {"recompute": ("full",), "recompute_num_layers": None}
    changes: list[list[_Part]] = [[("--use-tempo", {"tempo": on})]] if run.tempo.is_off else []
    changes += [[least]] if lower else []
    if run.layout.tp > 1 and not run.layout.sp:
        changes += [parallel], [least, parallel]
    if not run.recompute:
        changes.append([("--recompute-activations", {"recompute": ("core_attn",)})])
    changes += [[each] for each in smaller] + [[least, each] for each in smaller]
    if "full" not in run.recompute or run.recompute_num_layers is not None:
        changes += [full], [least, full], *([least, full, each] for each in smaller[-1:])
    for parts in changes:
        fields = {name: value for _, changed in parts for name, value in changed.items()}
        yield " ".join(text for text, _ in parts if text), dataclasses.replace(run, **fields)


def _list_operations(run: Run, stage: int) -> list[tuple[str, int]]:
    """(operation, bytes) of what all layers of one rank keep of one micro batch, the largest first."""
    layers = (layer for chunk in run.list_chunks(stage) for layer in range(len(chunk)))
    found = []
    for recompute, number in collections.Counter(map(run.find_recomputed, layers)).items():
        ledger = measure_run(dataclasses.replace(run, recompute=recompute, recompute_num_layers=None))
        found += [(f"  kept by {row.operation}, {number} layers", number * row.num_bytes) for row in ledger.layer_rows]
    return sorted(found, key=lambda each: -each[1])

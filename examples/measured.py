"""What a training step keeps for backward and needs at its peak, for the tables of the examples."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

SEEDS = (1, 2, 3)


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to train.

    Args:
        name: of the row, as "stock".
        kept_bytes: what a forward leaves allocated for its backward.
        peak_bytes: the most that forward and backward have allocated at once, above what stood before; gradients are
            part of it.
        losses: the last loss of each seed.
    """

    name: str
    kept_bytes: int
    peak_bytes: int
    losses: tuple[float, ...]


def measure_step(compute_loss: Callable[[], Tensor]) -> tuple[int, int]:
    """Runs forward and backward, and returns the bytes allocated between them and the most at once, above those before.

    On a GPU torch's allocator says it; on a CPU it tells the profiler each piece that it gives out or takes back.
    """
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = compute_loss()
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
        return kept, torch.cuda.max_memory_allocated() - before
    forward: list[int] = []
    with _note_allocations(forward):
        loss = compute_loss()
    backward = [sum(forward)]
    with _note_allocations(backward):
        loss.backward()
    return backward[0], max(*itertools.accumulate(forward), *itertools.accumulate(backward))


@contextlib.contextmanager
def _note_allocations(changes: list[int]) -> Iterator[None]:
    """Notes the bytes of each allocation on a CPU, those of what is freed with a minus."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        yield
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes += [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def measure(
    name: str,
    build: Callable[[int], nn.Module],
    compute_loss: Callable[[Any, Any], Tensor],
    batches: Sequence[Any],
    *,
    seeds: Iterable[int] = SEEDS,
    learning_rate: float = 2e-3,
) -> Row:
    """Trains a model once a seed, one step a batch, and measures a further step of the last one."""
    losses = []
    for seed in seeds:
        model = build(seed).train()
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=learning_rate)
        for batch in batches:
            loss = compute_loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        del loss
    return Row(name, *measure_step(lambda: compute_loss(model, batches[-1])), tuple(losses))


WAYS: dict[str, dict[str, Any]] = {
    "stock": {},
    "Tempo": {"tempo": True},
    "Tempo + checkpointing": {"tempo": True, "checkpointing": True},
}
"""The rows of a table -> what `build` is told."""


def compare(
    build: Callable[..., nn.Module], compute_loss: Callable[[Any, Any], Tensor], batches: Sequence[Any]
) -> list[Row]:
    """Measures each of WAYS. build(seed, tempo=..., checkpointing=...) makes the model."""
    return [measure(name, functools.partial(build, **how), compute_loss, batches) for name, how in WAYS.items()]


def format_table(rows: Sequence[Row]) -> str:
    """Formats rows as a table of Markdown, with kept bytes and peak in MiB and as parts of the first row's."""
    lines = ["| | kept, MiB | | peak, MiB | | last loss, seeds 1 to 3 |", "| --- | ---: | ---: | ---: | ---: | --- |"]
    for row in rows:
        kept, peak = (f"{num_bytes / 2**20:.2f}" for num_bytes in (row.kept_bytes, row.peak_bytes))
        parts = (row.kept_bytes / rows[0].kept_bytes, row.peak_bytes / rows[0].peak_bytes)
        losses = ", ".join(f"{loss:.3f}" for loss in row.losses)
        lines.append(f"| {row.name} | {kept} | {parts[0]:.2f} | {peak} | {parts[1]:.2f} | {losses} |")
    return "\n".join(lines)

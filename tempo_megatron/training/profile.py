"""Records some steps of a run: a trace of torch's profiler and, on a GPU, a snapshot of its memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tempo_megatron.training.run.run_config import RunConfig

_MOST_EVENTS = 1_000_000  # of the allocator; older ones are forgotten


class StepProfile:
    """Records the steps from the first to the last, on the ranks that are asked for.

    `trace_rankN.json` opens in Perfetto and in chrome://tracing; on a CPU it also shows the bytes that are allocated.
    `memory_rankN.pickle`, for torch's memory viewer, exists on a GPU alone: torch keeps no history for a CPU.
    `say` is told what was written.
    """

    def __init__(self, run: RunConfig, rank: int, say: Callable[[str], None]) -> None:
        first, last = run.profile if run.profile is not None and rank in run.profile_ranks else (0, -1)
        self._steps, self._on_gpu, self._say = range(first, last + 1), run.on_gpu, say
        folder = Path(run.profile_dir or "")
        self._trace, self._snapshot = folder / f"trace_rank{rank}.json", folder / f"memory_rank{rank}.pickle"
        self._profiler: Any = None
        self._latest = 0

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Runs a step inside; records it if it is one of those that are asked for."""
        if number not in self._steps:
            yield
            return
        if self._profiler is None:
            self._start()
        with torch.profiler.record_function(f"step {number}"):
            yield
        self._latest = number
        if number == self._steps[-1]:
            self.close()

    def _start(self) -> None:
        self._trace.parent.mkdir(parents=True, exist_ok=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profiler.start()

    def close(self) -> None:
        """Writes what was recorded, if that has not been done: the run may end before the last step."""
        if self._profiler is None:
            return
        if self._on_gpu:
            torch.cuda.synchronize()
        self._profiler.stop()
        unfinished = self._trace.with_suffix(".tmp.json")  # a reader never finds half a file
        self._profiler.export_chrome_trace(str(unfinished))
        os.replace(unfinished, self._trace)
        written = f"{self._trace} for ui.perfetto.dev"
        if self._on_gpu:
            torch.cuda.memory._dump_snapshot(str(self._snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
            written += f", {self._snapshot} for pytorch.org/memory_viz"
        self._profiler = None
        self._say(f"recorded the steps up to {self._latest}: {written}")

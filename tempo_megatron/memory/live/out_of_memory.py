"""Reports an out-of-memory error: what was allocated at the peak, and the smallest change that would have fitted.

The run's process has no memory to spare, and its process groups are in the way. So another process estimates the step
on fake tensors, from the run's sizes alone.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tempo_megatron.beside import Beside
from tempo_megatron.words.argument_types import format_bytes

if TYPE_CHECKING:  # is_out_of_memory must work in any process, also where Megatron is missing
    from tempo_megatron.memory.run import Run

_LACKS = re.compile(
    "DefaultCPUAllocator|not enough memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED|"
    "Storage size calculation overflowed|multiplication overflow"
)
_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out, on a GPU or on a CPU."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and _LACKS.search(str(error)) is not None
    )


def find_requested(error: BaseException) -> int | None:
    """The bytes that the failed allocation asked for; None where the error does not say."""
    found = _REQUESTED.search(str(error))
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


def report_out_of_memory(
    error: BaseException, read_run: Callable[[], tuple[Run, int]], folder: str | None = None, seconds: float = 300.0
) -> None:
    """Print the report on stderr, and write the traceback to a file.

    Args:
        error: an error for which `is_out_of_memory` is true.
        read_run: returns the run and this rank's pipeline stage, from 0. For a run that the estimate does not know it
            raises ValueError, or what Megatron raises where nothing is initialized.
        folder: where the file is written (default: where the run was started).
        seconds: the time that the explanation may take.
    """
    rank = int(os.environ.get("RANK", "0"))
    file = Path(folder or ".").resolve() / f"out_of_memory.rank{rank}.txt"
    lines = [f"error on rank {rank}: out of memory: {str(error).strip().splitlines()[0]}"]
    # Of this rank's GPU; a CPU's memory other processes share.
    capacity = None
    if torch.cuda.is_initialized():
        capacity = int(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved())
        lines.append(
            f"torch has {format_bytes(torch.cuda.memory_allocated())} allocated and "
            f"{format_bytes(torch.cuda.memory_reserved())} reserved on this GPU"
        )
    found: tuple[Run, int] | Exception
    try:
        found = read_run()
    except (ValueError, AttributeError, AssertionError) as unknown:
        found = unknown
    text = "".join(traceback.format_exception(error))
    # The frames still hold the run's tensors.
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        lines.append(f"the traceback is in {file}")
    except OSError as unwritten:
        lines.append(f"the traceback cannot be written ({unwritten})")
    print("\n".join(lines), file=sys.stderr, flush=True)
    try:
        if isinstance(found, Exception):
            raise ValueError(found)
        # A process without a GPU and without this process's memory limit.
        explaining = Beside("tempo_megatron.memory.live.remedies:explain", *found, find_requested(error), capacity)
        print(explaining.wait(seconds), file=sys.stderr, flush=True)
    except (OSError, RuntimeError, ValueError, subprocess.TimeoutExpired) as failed:
        reason = (str(failed).splitlines() or [""])[-1]
        print(f"what stood at the peak is not known: {reason}", file=sys.stderr, flush=True)

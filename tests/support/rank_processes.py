"""Processes for ranks: forks of one server, which imports the slow packages once and has no threads."""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.forkserver
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch._inductor.compile_fx",
    "megatron.core",
    "megatron.core.models.gpt",
    "deepspeed",
    "tempo_megatron.training.loop",
    "rank_preload",
]


def make_process(target: Callable[..., Any], *args: Any) -> Any:
    """A process that will call target(*args), with the environment that this one had when it made the first."""
    _start_server()
    return _context.Process(target=target, args=args, daemon=False)


@functools.cache
def _start_server() -> None:
    """With this folder in PYTHONPATH: before Python 3.12.8 and 3.13.1 a server leaves out in silence what it finds only
    in the sys.path of the process that starts it."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([before] if before else [])])
    try:
        _context.set_forkserver_preload(PRELOAD)
        multiprocessing.forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before

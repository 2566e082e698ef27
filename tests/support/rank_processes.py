"""Processes for ranks: forks of one server, which imports the slow packages once and has no threads."""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.forkserver
import os
import sys
from collections.abc import Callable
from typing import Any

context = multiprocessing.get_context("forkserver")
_environment = dict(os.environ)
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._inductor.compile_fx",
    "megatron.core",
    "megatron.core.models.gpt",
    "deepspeed",
    "tempo_megatron.training.loop",
    "rank_preload",
)


def make_process(
    target: Callable[..., Any], *args: Any, preload: tuple[str, ...] = PRELOAD, daemon: bool = False
) -> Any:
    """A process that will call target(*args), with the environment that this one had when it imported this file.

    preload: the modules that the server imports; every call of a process has to give the same.
    """
    _start_server(preload)
    return context.Process(target=target, args=args, daemon=daemon)


@functools.cache
def _start_server(preload: tuple[str, ...]) -> None:
    """With the environment from before the first test, since a test may change its own for a while, and with this
    process's sys.path in PYTHONPATH: before Python 3.12.8 and 3.13.1 a server leaves out in silence what it finds only
    in the sys.path of the process that starts it."""
    assert _start_server.cache_info().currsize == 0, "a process has one server, which imports what its first call says"
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(_environment, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    try:
        context.set_forkserver_preload(list(preload))
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)

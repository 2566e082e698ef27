"""Runs a script on another megatron-core, or on the stand-in of Transformer Engine, in ranks that are forks of one new
process: Megatron takes seconds to import. `python script_ranks.py SCRIPT FOLDER SIZES ...` is that process."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SUPPORT = Path(__file__).parent


@functools.cache
def results(
    sizes: tuple[int, ...], folder: str, root: str = "", script: str = "te_cases.py", *arguments: str
) -> dict[int, list[dict[str, Any]]]:
    """By their number, what the script finds in each of so many ranks, with the megatron-core under `root`, by default
    the installed one."""
    source = SUPPORT.parents[1]
    own = [*map(str, (source, source / "kernels", SUPPORT)), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join([root, *own] if root else own)
    more = {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = [sys.executable, __file__, script, folder, ",".join(map(str, sizes)), *arguments]
    environment = {**os.environ, **more, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-6000:]
    return {
        size: [json.loads(_name_file(folder, size, rank).read_text("utf-8")) for rank in range(size)] for size in sizes
    }


def _name_file(folder: str, size: int, rank: int) -> Path:
    return Path(folder, f"{size}-{rank}.json")


def main(measure: Callable[[int], dict[str, Any]]) -> None:
    """What the script does: `measure(number of ranks)` in each rank, for each number that `results` asks for."""
    folder, sizes = sys.argv[1], map(int, sys.argv[2].split(","))
    has_failed = False
    for size in sizes:
        ranks = [_fork(measure, folder, size, rank) for rank in range(size)]
        has_failed |= sum(os.waitpid(rank, 0)[1] for rank in ranks) > 0
    sys.exit(int(has_failed))


def _fork(measure: Callable[[int], dict[str, Any]], folder: str, size: int, rank: int) -> int:
    if number := os.fork():
        return number
    status = 1
    try:
        from gpt import start_rank

        start_rank(f"{folder}/store{size}", rank, size)
        found = measure(size)
        torch.distributed.barrier()
        _name_file(folder, size, rank).write_text(json.dumps(found), encoding="utf-8")
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    for process in multiprocessing.active_children():  # that Megatron writes checkpoints with
        process.kill()
    os._exit(status)  # gloo's threads do not end by themselves


if __name__ == "__main__":
    # Most of these seconds are the compiler's, for which Megatron's decorators ask, and those of a logger.
    torch.compile = lambda function=None, **_: function or (lambda function: function)  # type: ignore[assignment]
    sys.modules["wandb"] = None  # type: ignore[assignment]
    del sys.argv[0]
    runpy.run_path(str(SUPPORT / sys.argv[0]), run_name="__main__")

"""Run a function in several processes joined by gloo, and bring back what each returned."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import make_process


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 600) -> list[Any]:
    """`fn(*args)` in world_size processes with torch.distributed (gloo) set up; what each rank returned, by rank.

    `fn` is a module-level function; args and results are anything torch.save can write. The ranks do not see what a
    test put into os.environ.

    Raises: RuntimeError with the traceback of the first rank that failed, or where one took more than timeout_s.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = [make_process(_rank_main, fn, rank, world_size, folder, timeout_s, args) for rank in range(world_size)]
        for process in ranks:
            process.start()
        try:
            _wait_for_all(fn, ranks, Path(folder), timeout_s)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(world_size)]


def run_megatron_ranks(
    fn: Callable[..., Any],
    world_size: int,
    tp: int,
    *args: Any,
    seed: int = 1234,
    timeout_s: float = 600,
    **sizes: Any,
) -> list[Any]:
    """run_ranks with megatron-core ready on CPU: tensor parallel `tp`, what `sizes` says as initialize_model_parallel
    takes it, the rest data parallel, RNG tracker seeded."""
    sizes["tensor_model_parallel_size"] = tp
    return run_ranks(_with_megatron, world_size, fn, sizes, seed, *args, timeout_s=timeout_s)


_kept: dict[str, list[Any]] = {}


def run_megatron_ranks_once(fn: Callable[..., Any], world_size: int, tp: int, *args: Any) -> list[Any]:
    """run_megatron_ranks, run once for all tests that hold their results against those of this function."""
    key = repr((fn, world_size, tp, args))
    if key not in _kept:
        _kept[key] = run_megatron_ranks(fn, world_size, tp, *args)
    return _kept[key]


def run_steps(fn: Callable[..., Any], steps: dict[tuple[int, int], Any], tp: int, cp: int = 1) -> list[Any]:
    """By rank, what fn(steps[tp, cp]) returns on tp * cp ranks; without context parallelism run once."""
    if cp == 1:
        return run_megatron_ranks_once(fn, tp, tp, steps[tp, 1])
    return run_megatron_ranks(fn, tp * cp, tp, steps[tp, cp], context_parallel_size=cp)


def _with_megatron(fn: Callable[..., Any], sizes: dict[str, Any], seed: int, *args: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from tempo_megatron.cpu import use_cpu

    use_cpu()
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    try:
        return fn(*args)
    finally:
        parallel_state.destroy_model_parallel()


def _rank_main(
    fn: Callable[..., Any], rank: int, world_size: int, folder: str, timeout_s: float, args: tuple[Any, ...]
) -> None:
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), OMP_NUM_THREADS="1")
        os.environ.update(DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME="lo")
        torch.set_num_threads(1)
        torch.manual_seed(1234)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        result = fn(*args)
        dist.barrier()  # nobody leaves while another still talks to it
        dist.destroy_process_group()
        torch.save(result, f"{folder}/{rank}.pt")
    except BaseException:
        Path(folder, f"{rank}.error").write_text(traceback.format_exc(), encoding="utf-8")
        os._exit(1)


def _wait_for_all(fn: Callable[..., Any], ranks: list[Any], folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while running:
        ended = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            raise RuntimeError(f"{fn.__name__}: ranks {sorted(running.values())} still ran after {timeout_s} s")
        failed = [rank for rank in (running.pop(sentinel) for sentinel in ended) if _exit_code(ranks[rank])]
        if failed:
            texts = {rank: file.read_text("utf-8") for rank in failed if (file := folder / f"{rank}.error").exists()}
            # Of several, a rank that died without a word is the cause, then one that did not just lose its peer.
            cause = min(failed, key=lambda rank: (rank in texts, "peer" in texts.get(rank, "")))
            detail = texts.get(cause, f"exit code {_exit_code(ranks[cause])}")
            raise RuntimeError(f"{fn.__name__} failed in rank {cause}:\n{detail}")


def _exit_code(process: Any) -> int | None:
    process.join()
    return process.exitcode

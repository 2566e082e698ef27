"""Four or eight gloo processes that run case after case: where a layout needs fewer, parts of the pool have their own.

A process that fails takes the pool with it, as the others may wait for it; its case is a failed one, and a fresh pool
goes on with the rest.
"""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.connection
import os
import queue
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from rank_processes import context, make_process

from grid.cases import ONE_PROCESS, WORLD_SIZES, Case

SILENT_S = 600.0
"""After which a pool that says nothing is ended."""


def run_cases(cases: Iterable[Case], report: Callable[[Case, dict[str, Any]], None]) -> None:
    """Run every case and `report` what all its ranks found together, as it comes."""
    remaining = list(dict.fromkeys(cases))
    done: set[Case] = set()

    def note(case: Case, result: dict[str, Any]) -> None:
        done.add(case)
        report(case, result)

    for world_size in WORLD_SIZES:
        while waiting := [case for case in remaining if case.layout.num_processes <= world_size and case not in done]:
            _run_pool(world_size, waiting, note)


def _run_pool(world_size: int, cases: list[Case], note: Callable[[Case, dict[str, Any]], None]) -> None:
    """Until everything is done, or something failed: then that, and what ran beside it and may hang, is noted too."""
    messages: Any = context.Queue()
    with tempfile.TemporaryDirectory(prefix="grid-") as folder:
        ranks = [
            make_process(_work, rank, world_size, folder, cases, messages, preload=("grid.preload",), daemon=True)
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            _listen(ranks, messages, note)
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.join()


def _listen(ranks: list[Any], messages: Any, note: Callable[[Case, dict[str, Any]], None]) -> None:
    found: dict[Case, list[dict[str, Any]]] = {}
    running: dict[int, Case | None] = {}
    num_ended, silent = 0, 0.0
    while num_ended < len(ranks):
        try:
            kind, rank, case, content = messages.get(timeout=2.0)
        except queue.Empty:
            silent += 2.0
            died = [rank for rank, process in enumerate(ranks) if process.exitcode not in (None, 0)]
            if died or silent >= SILENT_S:
                what = f"rank {died[0]} died" if died else f"nothing was heard for {SILENT_S:.0f} s"
                _fail_all([case for case in running.values() if case], what, note)
                return
            continue
        silent = 0.0
        if kind == "end":
            num_ended += 1
        elif kind == "start":
            running[rank] = case
        elif kind == "error":
            _fail_all([case] if case else [], content, note)
            return
        else:
            found.setdefault(case, []).append(content)
            if len(found[case]) == case.layout.num_processes:
                note(case, _merge(found.pop(case)))
            running[rank] = None


def _fail_all(cases: list[Case], message: str, note: Callable[[Case, dict[str, Any]], None]) -> None:
    if not cases:
        raise RuntimeError(f"the pool failed outside of any case: {message}")
    for case in dict.fromkeys(cases):
        note(case, {"status": "failed", "message": message})


def _merge(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all ranks: a failure, else the one nearest to its limit; and by how much kept bytes and formula differ."""
    failed = [result for result in results if result["status"] == "failed"]
    merged = dict((failed or sorted(results, key=lambda result: -result.get("ratio", 0.0)))[0])
    kept = [pair for result in results for pair in result.get("kept", {}).values()]
    merged.pop("kept", None)
    if kept:
        merged["bytes_off"] = max(abs(counted / measured - 1) for measured, counted in kept)
    return merged


def _end_with_parent() -> None:
    """A parent that is killed ends nobody; this process then ends itself."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _work(rank: int, world_size: int, folder: str, cases: list[Case], messages: Any) -> None:
    case: Case | None = None
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        import torch
        from megatron.core import parallel_state

        import grid.preload  # noqa: F401  Where another server was started first.
        from grid.judge import Judge, list_references, save_reference

        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=SILENT_S),
        )
        _lay_out(ONE_PROCESS)
        for reference in list_references(cases)[rank::world_size]:  # an error here ends the pool, as no case has failed
            messages.put(("start", rank, None, None))
            save_reference(reference, Path(folder))
        torch.distributed.barrier()
        judge = Judge(Path(folder))
        for layout, group in itertools.groupby(sorted(cases, key=_place), key=lambda each: each.layout):
            _lay_out(layout)
            part, num_parts = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
            for case in list(group)[part::num_parts]:
                messages.put(("start", rank, case, None))
                messages.put(("result", rank, case, judge.judge(case)))
            case = None
            torch.distributed.barrier()
        messages.put(("end", rank, None, None))
    except BaseException:
        messages.put(("error", rank, case, traceback.format_exc()))
    finally:
        messages.close()
        messages.join_thread()
        os._exit(0)  # gloo's threads of groups that are gone do not end by themselves


def _place(case: Case) -> Any:
    # Stock first, which others are held against.
    return case.layout, case.family, case.dtype, case.key


def _lay_out(layout: Any) -> None:
    """Initialise Megatron's parallelism anew."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        hierarchical_context_parallel_sizes=layout.hierarchical_sizes,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        create_gloo_process_groups=False,
    )

"""Ranks that run Megatron-LM's own scripts on a CPU, one run after another: forks of a process that imported Megatron.

Started by megatron_runs.Server: `python megatron_rank.py ROOT`. Each line of stdin is a number of ranks and a folder,
and the numbers of their processes are the answer. Each line of <rank>.jobs there is another folder, in which a rank
does jobs.json and writes <rank>.pt: for each run its exit status, what it printed, its losses as printed, and the
gradients of each step by parameter name.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import multiprocessing
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import gloo
import megatron_changes
import megatron_cpu
import torch

_LOSS = re.compile(r"iteration +(\d+)/.*?((?:[a-z]+ )?loss): ([-+.\dEe]+|nan|inf)")


def main() -> None:
    (root,) = sys.argv[1:]
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, root)
    # They take seconds, for tokenizers and loggers that no run has.
    sys.modules |= dict.fromkeys(("transformers", "wandb"))  # type: ignore[arg-type]
    megatron_cpu.install()
    megatron_cpu.skip_what_is_compiled(root)
    torch.set_num_threads(1)
    for module in ("tempo_megatron.megatron_lm.run", *(module for module, _ in PLACES)):
        importlib.import_module(module)
    for line in sys.stdin:
        world_size, folder = line.split()
        print(
            *(_fork(rank, int(world_size), Path(folder), root) for rank in range(int(world_size))),
            file=told,
            flush=True,
        )


def _fork(rank: int, world_size: int, folder: Path, root: str) -> int:
    """The number of a process that has the jobs in <rank>.jobs until nobody writes to it."""
    if process := os.fork():
        return process
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        with (folder / f"{rank}.log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        with (folder / f"{rank}.jobs").open() as jobs:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
            gloo.share_device()
            torch.distributed.init_process_group(
                backend="gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
            )
            for line in jobs:
                _run_jobs(Path(line.strip()), root, rank, world_size)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    for process in multiprocessing.active_children():  # that Megatron writes checkpoints with
        process.kill()
    os._exit(0)  # gloo's threads do not end by themselves


def _run_jobs(folder: Path, root: str, rank: int, world_size: int) -> None:
    jobs = json.loads((folder / "jobs.json").read_text("utf-8"))
    os.chdir(jobs["cwd"])
    results = {}
    for job in jobs["runs"]:
        results[job["name"]] = result = _run(job, root)
        torch.save(results, folder / f"{rank}.pt")
        if result["error"] and world_size > 1:
            # Other ranks may wait for this one.
            Path(folder, f"{rank}.error").write_text(result["error"], encoding="utf-8")
            os._exit(1)
        torch.distributed.barrier()
    sys.stdout.flush()
    Path(folder, f"{rank}.done").touch()


def _run(job: dict[str, Any], root: str) -> dict[str, Any]:
    from tempo_megatron.megatron_lm import run

    result: dict[str, Any] = {"gradients": [], "masks": {}, "error": None, "status": None}
    printed, complaints = io.StringIO(), io.StringIO()
    path, argv = list(sys.path), list(sys.argv)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complaints), contextlib.ExitStack() as undo:
        undo.callback(_forget_run)
        for place in PLACES:
            _restore_later(undo, *place)
        _watch(undo, result)
        for name in job["changes"]:
            getattr(megatron_changes, name)(undo, result)
        try:
            script = Path(root, job["script"])
            if not script.exists():  # an unpacked wheel has none
                script = Path(__file__).with_name(f"megatron_{job['script']}")
            result["status"] = run.main([f"--megatron-root={root}", str(script), *job["arguments"]])
        except SystemExit as exit:
            result["status"] = exit.code or 0
        except BaseException:
            result["error"] = traceback.format_exc()
    sys.path[:], sys.argv[:] = path, argv
    result["printed"], result["complaints"] = printed.getvalue(), complaints.getvalue()
    result["losses"] = {int(step): float(loss) for step, _, loss in _LOSS.findall(result["printed"])}
    return result


# What a run replaces in modules that the next one uses too.
PLACES = (
    ("megatron.training.arguments", "add_megatron_arguments"),
    ("megatron.core.pipeline_parallel.schedules", "set_current_microbatch"),
    ("megatron.core.pipeline_parallel.schedules", "forward_backward_pipelining_with_interleaving"),
    ("megatron.core.pipeline_parallel.schedules", "forward_backward_pipelining_without_interleaving"),
    ("megatron.core.models.gpt.gpt_model", "GPTModel.__init__"),
    ("megatron.core.models.bert.bert_model", "BertModel.__init__"),
    ("megatron.core.models.T5.t5_model", "T5Model.__init__"),
    ("megatron.training.training", "finalize_model_grads"),
    ("megatron.training.training", "train_step"),
)


def find_owner(module: str, path: str) -> tuple[Any, str]:
    """The object that holds the last name of a path, and that name."""
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for cls in classes:
        owner = getattr(owner, cls)
    return owner, name


def _restore_later(undo: contextlib.ExitStack, module: str, path: str) -> None:
    owner, name = find_owner(module, path)
    undo.callback(setattr, owner, name, getattr(owner, name))


def _watch(undo: contextlib.ExitStack, result: dict[str, Any]) -> None:
    """Copy every parameter's gradient once Megatron has summed it over the ranks."""
    training = importlib.import_module("megatron.training.training")
    finalize = training.finalize_model_grads

    def finalize_and_copy(model: Any, *args: Any, **kwargs: Any) -> Any:
        found = finalize(model, *args, **kwargs)
        result["gradients"].append(
            {
                f"{chunk}.{name}": parameter.main_grad.clone()
                for chunk, module in enumerate(model)
                for name, parameter in module.named_parameters()
                if parameter.requires_grad
            }
        )
        return found

    training.finalize_model_grads = finalize_and_copy


def _forget_run() -> None:
    """Megatron's globals as they were before the run; torch.distributed stays."""
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.training import global_vars

    global_vars.destroy_global_vars()
    num_microbatches_calculator.unset_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    # Each has a thread that looks for messages for as long as it is known, in the runs that follow too.
    for group in [*torch.distributed.distributed_c10d._world.pg_map]:
        if group is not torch.distributed.group.WORLD:
            torch.distributed.destroy_process_group(group)
    get_cuda_rng_tracker().reset()
    for name in ("pretrain_gpt", "gpt_builders", "model_provider"):
        sys.modules.pop(name, None)
    gc.collect()


if __name__ == "__main__":
    main()

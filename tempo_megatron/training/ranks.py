"""Brings the ranks of a run together: their process groups, their folders, and the checkpoint that all of them load."""

from __future__ import annotations

import datetime
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tempo_megatron.training.checkpoint_files.files import try_to_write
from tempo_megatron.training.checkpoint_files.folder import CheckpointFolder
from tempo_megatron.training.checkpoint_files.integrity import find_damage
from tempo_megatron.training.run.resume import read_pretrained
from tempo_megatron.training.run.run_config import RunConfig
from tempo_megatron.training.watch.team import STORE, AgreedError, open_store

_T = TypeVar("_T")
Decide = Callable[[Mapping[str, str]], tuple[RunConfig, dict[str, Any] | None]]
"""Is called with the damaged checkpoints, name -> reason; returns the run that resumes from the newest other one, and
the description of that."""


def gather(value: _T) -> list[_T]:
    """Returns the values of all ranks, in order; every rank calls it."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def raise_on_all_ranks(sentence: str | None) -> None:
    """Raises AgreedError on every rank if some rank has a sentence, so that none waits for one that has ended.

    Every rank calls it, with None if nothing is wrong. The lowest rank's sentence counts.
    """
    if wrong := [text for text in gather(sentence) if text is not None]:
        raise AgreedError(wrong[0])


class MPU:
    """megatron.core.parallel_state as DeepSpeed's `mpu`, with the three methods that it lacks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(parallel_state, name)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(parallel_state.get_model_parallel_group())

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(parallel_state.get_model_parallel_group())

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(parallel_state.get_data_parallel_group())


def initialize_distributed(run: RunConfig) -> torch.device:
    """Starts torch.distributed, DeepSpeed's communication and Megatron's groups; returns this rank's device.

    Raises ValueError if the port of a run of one rank is in use.
    """
    device = torch.device("cpu")
    if run.on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        # After --distributed-timeout-minutes NCCL's watchdog ends the rank, and writes which collectives it was in.
        os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        if run.log_dir:
            os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(Path(run.log_dir).resolve() / "nccl_rank_"))
    # On a CPU DeepSpeed would compile this extension, which only its inference uses, at every start.
    getattr(deepspeed.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.WARNING)
    if run.world_size == 1:  # several ranks have opened it in Team.join
        open_store(run.distributed_timeout_minutes * 60.0)
    deepspeed.init_distributed(
        dist_backend="nccl" if run.on_gpu else "gloo",
        auto_mpi_discovery=False,
        timeout=datetime.timedelta(minutes=run.distributed_timeout_minutes),
        init_method=STORE,
        verbose=False,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=run.tensor_model_parallel_size,
        pipeline_model_parallel_size=run.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=run.num_chunks if run.num_chunks > 1 else None,
        distributed_timeout_minutes=run.distributed_timeout_minutes,
        create_gloo_process_groups=False,
    )
    return device


def choose_checkpoint(
    run: RunConfig, saved: dict[str, Any] | None, decide_without: Decide
) -> tuple[RunConfig, dict[str, Any] | None, dict[str, Any] | None]:
    """Returns (the run, the checkpoint that it resumes from, the one whose weights it begins with) after reading every
    file of them; a damaged checkpoint of --load gives way to the one before it.

    Raises ValueError on every rank unless all of them see the same, whole checkpoint.
    """
    check_all_ranks_load(saved, run.load, "--load")
    while saved is not None:
        damage = _find_damage_on_any_rank(saved, str(run.load))
        if damage is None:
            return run, saved, None
        run, saved = decide_without({**saved["passed_over"], saved["checkpoint"]: damage})
    pretrained, folder = read_pretrained(run.pretrained_checkpoint, run.model.family), run.pretrained_checkpoint
    check_all_ranks_load(pretrained, folder, "--pretrained-checkpoint")
    if pretrained is not None and (damage := _find_damage_on_any_rank(pretrained, str(folder))) is not None:
        raise ValueError(f"--pretrained-checkpoint {folder}: {damage}; give another folder")
    return run, None, pretrained


def _find_damage_on_any_rank(saved: Mapping[str, Any], load: str) -> str | None:
    """Says which file of the checkpoint `saved` was changed, or would execute code; returns None if all are sound.

    Each rank reads a share of the files, and every rank gets the same sentence.
    """
    folder = Path(load) / saved["checkpoint"]
    found = gather(find_damage(folder, saved["files"], dist.get_rank(), dist.get_world_size()))
    return next((each for each in found if each), None)


def claim_save_folder(run: RunConfig) -> CheckpointFolder | None:
    """Locks the folder of --save on rank 0 and returns it; no other run can write there while the result is kept.

    Raises ValueError if another run writes to it, or if it holds checkpoints that this run does not continue.
    """
    if not run.save:
        return None
    folder = CheckpointFolder(run.save)
    if int(os.environ["RANK"]) == 0:
        folder.lock()
    resumes = run.load and Path(run.load).resolve() == Path(run.save).resolve()
    if not resumes and (name := folder.find_latest()) is not None:
        raise ValueError(
            f"--save {run.save} already holds checkpoints up to {name}; add --load {run.save} to go on from there, "
            "or give another folder"
        )
    return folder


def check_all_ranks_load(saved: Mapping[str, Any] | None, load: str | None, option: str) -> None:
    """Raises ValueError on every rank unless `option` gave all of them the same checkpoint, or none."""
    if len(set(gather(saved and saved["checkpoint"]))) > 1:
        raise ValueError(
            f"{option} {load} does not name one checkpoint to every rank: another run writes there, or it is not the "
            "same folder on every node; wait for that run, or give a folder on a shared file system"
        )


def check_all_ranks_share(folder: Path) -> None:
    """Raises ValueError on every rank if one cannot write to `folder`, or sees another folder than rank 0 does."""
    token = [secrets.token_hex(8)]
    dist.broadcast_object_list(token, src=0)
    names = [folder / f"shared_{token[0]}_{rank}.tmp" for rank in range(dist.get_world_size())]
    rank = dist.get_rank()
    reason = try_to_write(names[rank].touch)
    sentence = f"--save {folder} cannot be written by rank {rank} ({reason}); give another folder" if reason else None
    dist.barrier()
    if sentence is None and not names[0].exists():
        sentence = (
            f"--save {folder} is not the same folder on every node: rank {rank} does not see what rank 0 wrote; "
            "give a folder on a shared file system"
        )
    dist.barrier()
    names[rank].unlink(missing_ok=True)
    raise_on_all_ranks(sentence)

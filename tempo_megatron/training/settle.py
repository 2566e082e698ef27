"""Settles a run before anything is built: where it saves, its vocabulary and checkpoint, that all ranks agree, its
memory plan, and a value in place of each "auto"."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import secrets
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig

from tempo_megatron.cluster.host import hash_sources
from tempo_megatron.cluster.versions import find_version
from tempo_megatron.cpu import use_cpu
from tempo_megatron.memory.live.aside import RunPlan, plan_for_all_ranks, share_host
from tempo_megatron.memory.plan.gpu import find_gpu
from tempo_megatron.memory.plan.planner import RECOMPUTED, PlanRequest
from tempo_megatron.slots.choose import Choices, choose
from tempo_megatron.training.checkpoint_files.files import try_to_write
from tempo_megatron.training.checkpoint_files.folder import CheckpointFolder, find_damage
from tempo_megatron.training.model import build_transformer_config, read_run
from tempo_megatron.training.ranks import gather, initialize_distributed, raise_on_all_ranks
from tempo_megatron.training.run.resume import read_pretrained
from tempo_megatron.training.run.run_config import RunConfig
from tempo_megatron.training.tasks.datasets import load_vocabulary
from tempo_megatron.training.tasks.masked import MaskedTask, SpanTask
from tempo_megatron.training.tasks.task import NextTokenTask, Task, Vocabulary
from tempo_megatron.training.team import Team

TASKS: dict[str, Task] = {"gpt": NextTokenTask(), "bert": MaskedTask(), "t5": SpanTask()}
"""Of each family of models."""

Decide = Callable[[Mapping[str, str]], tuple[RunConfig, dict[str, Any] | None]]
"""Is called with the damaged checkpoints, name -> reason; returns the run that resumes from the newest other one, and
the description of that."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """What a run begins with, in addition to its RunConfig; every rank has found the same."""

    task: Task
    vocabulary: Vocabulary
    identity: Mapping[str, Any]
    """Checksums of the data and its tokenizer, which a resumed run compares."""
    device: torch.device
    save_folder: CheckpointFolder | None
    """The folder of --save, which no other run can write to."""
    settings: Mapping[str, Any]
    """The run as the user gave it, with "auto": a run that resumes from its checkpoints adapts anew."""
    saved: Mapping[str, Any] | None
    """Describes the checkpoint that it resumes from."""
    pretrained: Mapping[str, Any] | None
    """Describes the checkpoint whose weights it begins with."""
    plan: RunPlan | None
    transformer_config: TransformerConfig
    choices: Choices


def settle(
    run: RunConfig, saved: dict[str, Any] | None, decide_without: Decide, team: Team | None
) -> tuple[RunConfig, Start]:
    """Returns the run without "auto", and what else is decided before its model is built. Every rank calls it.

    `run` is checked. `saved` describes the checkpoint that it resumes from; None for a run that starts.

    Raises ValueError if the ranks differ, or if a folder, the data or a checkpoint is not as the run needs it.
    """
    save_folder, task = claim_save_folder(run), TASKS[run.model.family]
    vocabulary = load_vocabulary(run, task)
    if team is not None:
        team.compare(collect_facts(run, vocabulary), run.distributed_timeout_minutes * 60.0)
    if not run.on_gpu:
        use_cpu()
    device = initialize_distributed(run)
    if save_folder is not None:
        check_all_ranks_share(save_folder.path)
    run, saved, pretrained = choose_checkpoint(run, saved, decide_without)
    settings = dataclasses.asdict(run)
    run, plan = _plan_memory(run, vocabulary.padded_size)
    transformer_config = build_transformer_config(run)
    choices = choose(transformer_config, run.tempo)
    return dataclasses.replace(run, tempo=choices.config), Start(
        task=task,
        vocabulary=vocabulary,
        identity=_identify_data(run, vocabulary.tokenizer),
        device=device,
        save_folder=save_folder,
        settings=settings,
        saved=saved,
        pretrained=pretrained,
        plan=plan,
        transformer_config=transformer_config,
        choices=choices,
    )


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


# Names of files may differ between nodes; the content of those that are read is compared.
_FILES = ("deepspeed_config", "data_path", "blend", "vocab_file", "merge_file", "data_cache_path")
_SOURCES = ("tempo_kernels", "tempo_megatron")
_PACKAGES = ("torch", "megatron-core", "deepspeed", "triton", "numpy", "transformer_engine", "apex", "flash-attn")
# Prefixes of the variables that change what is computed or which collectives are called.
_VARIABLES = (
    *("TORCH_", "PYTORCH_", "NVTE_", "NCCL_", "CUBLAS_", "CUDNN_", "CUDA_", "NVIDIA_TF32_", "DS_", "TRITON_"),
    *("TEMPO_", "MKL_", "MEGATRON_", "ATEN_"),
)
# Suffixes of those that name a place, or that may differ between nodes or ranks.
_LOCAL = (
    *("_DIR", "_HOME", "_PATH", "_IFNAME", "_HCA", "_FILE", "_ROOT", "_DEBUG", "_LOGS", "_DEVICES", "_VERSION"),
    *("_HOSTNAME", "_ADDR", "_NUMA", "_EXTENSIONS", "_CPP_LOG_LEVEL", "_NCCL_ASYNC_ERROR_HANDLING"),
)


def collect_facts(run: RunConfig, vocabulary: Vocabulary) -> dict[str, Any]:
    """Collects everything that must be the same on every rank, by name.

    Only the first rank of each node reads the data; its other ranks see the same files.
    """
    settings = {name: value for name, value in dataclasses.asdict(run).items() if name not in _FILES}
    described = {name: value for name, value in vocabulary.describe().items() if name != "tokenizer_files"}
    facts: dict[str, Any] = {
        "setting": settings,
        "package": {
            **{package: hash_sources(package) for package in _SOURCES},
            "python": platform.python_version(),
            **{package: find_version(package) or "not installed" for package in _PACKAGES},
        },
        "variable": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and not name.endswith(_LOCAL)
        },
        "tokenizer": {**described, **vocabulary.tokenizer.unique_identifiers},
        "data": {"number": len(run.blend[0]), "weights": run.blend[1]},
    }
    if int(os.environ["LOCAL_RANK"]) == 0:
        facts["data"] |= {
            f"content of set {number}": compute_checksum(prefix) for number, prefix in enumerate(run.blend[0], start=1)
        }
    return facts


_BLOCK = 1 << 16
_BLOCKS = 64


def _identify_data(run: RunConfig, tokenizer: Any) -> dict[str, Any]:
    """Returns share and checksum of each data set, and the tokenizer's checksum; rank 0 reads, all ranks call it."""
    identity: list[Any] = [None]
    if dist.get_rank() == 0:
        prefixes, weights = run.blend
        weights = weights or (1.0,)
        shares = [weight / sum(weights) for weight in weights]
        identity = [[[share, compute_checksum(prefix)] for share, prefix in zip(shares, prefixes, strict=True)]]
    dist.broadcast_object_list(identity, src=0)
    files = sorted(f"{name} {value}" for name, value in tokenizer.unique_identifiers.items())
    return {"data": identity[0], "tokenizer": hashlib.sha256("\n".join(files).encode()).hexdigest()}


@cache
def compute_checksum(prefix: str) -> str:
    """Returns the sha256 of PREFIX.idx and of 64 evenly spaced blocks of PREFIX.bin, which may be too large to read."""
    digest = hashlib.sha256()
    with open(prefix + ".idx", "rb") as index:
        while part := index.read(1 << 22):
            digest.update(part)
    size = os.path.getsize(prefix + ".bin")
    digest.update(str(size).encode())
    with open(prefix + ".bin", "rb") as tokens:
        last = max(0, size - _BLOCK)
        for start in sorted({last * number // (_BLOCKS - 1) for number in range(_BLOCKS)}):
            tokens.seek(start)
            digest.update(tokens.read(_BLOCK))
    return digest.hexdigest()


_REMEDY = (
    "raise the budget, --tensor-model-parallel-size or --pipeline-model-parallel-size, or lower --micro-batch-size"
)


def _plan_memory(run: RunConfig, padded_vocab_size: int) -> tuple[RunConfig, RunPlan | None]:
    """Returns the run as planned for its memory budget, and the plan; without a budget the run itself and None.

    All ranks call it, once their process group exists. Rank 0 plans, and every rank gets its plan or its error.

    Raises ValueError if nothing fits, or the planner does not know the model.
    """
    if run.memory_budget is None:
        return run, None

    def make_request() -> PlanRequest:
        return PlanRequest(
            run=read_run(run, padded_vocab_size),
            gpu=find_gpu(torch.cuda.get_device_name() if run.on_gpu else None),
            remedy=_REMEDY,
            host_bytes=share_host(run.host_memory),
            recompute=None if run.recompute_granularity else RECOMPUTED,
        )

    plan = plan_for_all_ranks(make_request, run.memory_budget)
    changes: dict[str, Any] = {"tempo": dataclasses.replace(plan.tempo, check=run.tempo.check)}
    if run.recompute_granularity is None and plan.num_full:
        changes |= {"recompute_granularity": "full", "recompute_method": "block"}
        changes["recompute_num_layers"] = plan.num_full
    elif run.recompute_granularity is None and plan.recompute:
        changes |= {"recompute_granularity": "selective", "recompute_modules": plan.recompute}
    return dataclasses.replace(run, **changes), plan

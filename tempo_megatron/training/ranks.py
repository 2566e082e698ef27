"""Brings the ranks of a run together: what they have in common, their process groups and folders, the checkpoint that
they load, and the step after which they stop."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import hashlib
import logging
import os
import platform
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tempo_megatron.cluster.host import hash_sources
from tempo_megatron.cluster.versions import find_version
from tempo_megatron.training.checkpoint_files.files import try_to_write
from tempo_megatron.training.checkpoint_files.folder import CheckpointFolder, find_damage
from tempo_megatron.training.run.resume import read_pretrained
from tempo_megatron.training.run.run_config import RunConfig
from tempo_megatron.training.tasks.task import Vocabulary
from tempo_megatron.training.team import STORE, AgreedError, open_store

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
    # On a CPU DeepSpeed would compile this extension, which only its inference uses, at every start, and call compilers
    # for a second to know which other ones it could compile.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
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


def identify_data(run: RunConfig, tokenizer: Any) -> dict[str, Any]:
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


_NAMES: dict[int, str] = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
SAVE_NOW = signal.SIGUSR1
_PASSED_ON_SECONDS = 3.0


class Request(enum.IntEnum):
    """What the ranks were asked for; a higher one includes a lower one."""

    NONE = 0
    SAVE = 1
    STOP = 2


class StopSignal:
    """Lets all ranks agree whether one of them was asked to stop or to save, without waiting for the device.

    Launchers signal the ranks one after the other, some only after the first has ended, so the ranks have to tell
    each other. On a GPU the answer to one step's question is read at the next step, when it has arrived.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.device = device
        self.name: str | None = None
        """The signal to stop that this rank has received."""
        self._since = 0.0
        self._is_to_save = False
        self._was_agreed = False
        self._answer: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self._previous: dict[int, Any] = {}
        if enabled:
            self._previous = {number: signal.signal(number, self._note_signal) for number in (*_NAMES, SAVE_NOW)}

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        """Notes a signal. A second Ctrl-C stops at once, unless it follows within moments: launchers pass it on."""
        if number == SAVE_NOW:
            self._is_to_save = True
        elif self.name is None:
            self.name, self._since = _NAMES[number], time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since > _PASSED_ON_SECONDS:
            raise KeyboardInterrupt

    def agree(self) -> Request:
        """Returns what to do: every rank calls it once per step, and all get the same answer."""
        request = self._ask_all() if self._previous else Request.NONE
        self._was_agreed = request is Request.STOP
        return request

    def _ask_all(self) -> Request:
        own = Request.STOP if self.name is not None else Request.SAVE if self._is_to_save else Request.NONE
        self._is_to_save = False
        # A tensor from a list would wait for the GPU.
        flag = torch.full((1,), float(own), dtype=torch.float32, device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if self.device.type != "cuda":
            return Request(int(flag))
        host = torch.empty(1, dtype=torch.float32, pin_memory=True)
        host.copy_(flag, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        previous, self._answer = self._answer, (host, arrived)
        if previous is None:
            return Request.NONE
        previous[1].synchronize()
        return Request(int(previous[0]))

    def close(self) -> None:
        """Restores the handlers. A rank that stops ignores further signals, which a launcher may still send."""
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if self._was_agreed else handler)


def ignore_stop_signals(_: int) -> None:
    """Makes a DataLoader's worker ignore a launcher's signals: its rank needs batches to the end of the step."""
    for number in (*_NAMES, SAVE_NOW):
        signal.signal(number, signal.SIG_IGN)

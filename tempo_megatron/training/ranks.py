"""Brings the ranks of a run together: their process groups, what they tell one another, and when they stop."""

from __future__ import annotations

import datetime
import enum
import logging
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tempo_megatron.training.run.run_config import RunConfig
from tempo_megatron.training.team import STORE, AgreedError, open_store

_T = TypeVar("_T")


def gather(value: _T, group: Any = None) -> list[_T]:
    """Returns the values of all ranks of a group, by default of the run, in order; every rank of it calls it."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
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

"""Lets every rank stop, or save, after the same step when any of them receives a signal."""

from __future__ import annotations

import enum
import signal
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

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

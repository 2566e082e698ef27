"""SIGTERM on any rank lets every rank stop after the same step."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


class StopSignal:
    """Whether some rank was asked to stop, agreed upon by all ranks without waiting for the device.

    Launchers signal the ranks one after the other, some only after the first has ended, so the ranks have to tell
    each other. On a GPU the answer asked for at one step is read at the next: by then it is there.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.device, self.enabled = device, enabled
        self.received = False
        self._answer: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self._previous: Any = signal.signal(signal.SIGTERM, self._note_signal) if enabled else None

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def agree(self) -> bool:
        """Whether to stop. Every rank calls it once per step, and all get the same answer."""
        if not self.enabled:
            return False
        # A tensor from a list would wait for the GPU.
        flag = torch.full((1,), float(self.received), dtype=torch.float32, device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if self.device.type != "cuda":
            return bool(flag)
        previous, self._answer = self._answer, self._send_to_host(flag)
        if previous is None:
            return False
        host, arrived = previous
        arrived.synchronize()
        return bool(host)

    @staticmethod
    def _send_to_host(flag: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        host = torch.empty(1, dtype=torch.float32, pin_memory=True)
        host.copy_(flag, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return host, arrived

    def close(self) -> None:
        if self.enabled:
            signal.signal(signal.SIGTERM, self._previous)

"""Raises on the host, later, what a GPU has found wrong, without waiting for the device."""

from __future__ import annotations

import collections
from collections.abc import Callable

import torch
from torch import Tensor


class LateCheck:
    """Flags that must be False, and what is said where one was not.

    Args:
        message: of the RuntimeError. On a CPU `note` raises it; from a GPU it comes with the first `raise_if_noted`
            after the flag has arrived, as a rule one step later.
    """

    def __init__(self, message: str) -> None:
        self._message = message
        self._under_way: collections.deque[tuple[Tensor, Callable[[], bool]]] = collections.deque()

    def note(self, flag: Tensor) -> None:
        """Take one 0-dim bool flag; ignore it during the capture of a CUDA graph, which the host does not follow."""
        if flag.device.type == "cpu":
            self._raise_if(flag)
        elif not torch.cuda.is_current_stream_capturing():
            self._under_way.append(copy_to_host(flag))

    def raise_if_noted(self) -> None:
        """Raise RuntimeError where a flag that has arrived is True."""
        while self._under_way and self._under_way[0][1]():
            self._raise_if(self._under_way.popleft()[0])

    def _raise_if(self, flag: Tensor) -> None:
        if flag:
            self._under_way.clear()
            raise RuntimeError(self._message)


def copy_to_host(flag: Tensor) -> tuple[Tensor, Callable[[], bool]]:
    """Start the copy of a flag from a GPU. Returns host memory, and a function that says whether the flag is there."""
    host = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
    host.copy_(flag, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(flag.device))
    return host, event.query

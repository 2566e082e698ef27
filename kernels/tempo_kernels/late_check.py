"""Checks what a GPU computes without waiting for it: a wrong value is told as soon as it has arrived."""

from __future__ import annotations

import collections
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class LateCheck:
    """Checks flags that must be False without waiting for the GPU that computes them.

    Args:
        message: of the error. On a CPU `note` raises it. For a GPU the first `raise_if_noted` after the flag has
            arrived raises it, as a rule one step later.
        kind: of the error.
    """

    def __init__(self, message: str, kind: type[Exception] = RuntimeError) -> None:
        self._message, self._kind = message, kind
        self._under_way: collections.deque[tuple[Tensor, Callable[[], bool]]] = collections.deque()

    def note(self, flag: Tensor) -> None:
        """Takes one 0-dim bool flag. Ignores a fake one, which has no value, and any flag during the capture of a CUDA
        graph, which the host cannot follow."""
        if isinstance(flag, FakeTensor):
            return
        if flag.device.type == "cpu":
            self._raise_if(flag)
        elif not torch.cuda.is_current_stream_capturing():
            self._under_way.append(copy_to_host(flag))

    def watch(self, flag: Tensor) -> None:
        """Takes the same flag again and again, which stays True once it is: copies it only when no copy is under way,
        and sets it to False before it raises the error. Does nothing during the capture of a CUDA graph."""
        if flag.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        try:
            self.raise_if_noted()
            if not self._under_way:
                self.note(flag)
        except self._kind:
            flag.zero_()
            raise

    def raise_if_noted(self) -> None:
        """Raises the error where a flag that has arrived is True."""
        while self._under_way and self._under_way[0][1]():
            self._raise_if(self._under_way.popleft()[0])

    def _raise_if(self, flag: Tensor) -> None:
        if flag:
            self._under_way.clear()
            raise self._kind(self._message)


def copy_to_host(flag: Tensor) -> tuple[Tensor, Callable[[], bool]]:
    """Starts the copy of a flag from a GPU. Returns host memory, and a function that says whether the flag is there."""
    host = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
    host.copy_(flag, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(flag.device))
    return host, event.query

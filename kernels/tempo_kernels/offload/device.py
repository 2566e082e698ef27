"""Devices as the engine asks for them: memory, the order of their work, and copies between device and host.

`CudaDevice` is streams and events. `ThreadDevice` is the same on a CPU: two pools of ordinary memory, and a thread for
each direction that copies as late as a test says. Both run the same engine, so that its order can be proved without a
GPU: a wait that the engine forgets is a wait that no thread makes.
"""

from __future__ import annotations

import concurrent.futures
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Direction = Literal["out", "in"]


class CudaDevice:
    """A CUDA device, which need not be the current one: one order of work computes, and one copies each way, on streams
    of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {"out": torch.cuda.Stream(device), "in": torch.cuda.Stream(device)}

    def get_stream(self) -> Any:
        """Returns the order in which what is called now computes."""
        return torch.cuda.current_stream(self._device)

    def mark(self, stream: Any) -> Any:
        """Returns an event that has happened once everything that the stream was given until now has run."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Lets what the stream is given from now on run after the event. The host does not wait."""
        stream.wait_event(event)

    def copy(self, direction: Direction, source: Tensor, target: Tensor, after: Sequence[Any]) -> Any:
        """Copies bytes after all these events and all earlier copies of this direction; returns the event of its end.

        The caller keeps both tensors until then.
        """
        stream = self._streams[direction]
        for event in after:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return self.mark(stream)

    def allocate_host(self, num_bytes: int) -> Tensor:
        """Returns uint8 [num_bytes] of the host, pinned. Raises ValueError where the system refuses."""
        # Registered rather than allocated pinned: torch's pinned allocator rounds up to a power of two.
        host = torch.empty(num_bytes, dtype=torch.uint8)
        status = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), num_bytes, 0)
        if int(status) != 0:
            raise ValueError(
                f"CUDA refuses to pin {num_bytes / 2**30:.2f} GiB of host memory for offload (error {int(status)}); "
                "expected pages that can be locked; raise the limit (ulimit -l, --ulimit memlock=-1 of a container), "
                "or move fewer layers"
            )
        weakref.finalize(host, _unpin, host.data_ptr(), self._device)
        return host

    def lend(self, tensor: Tensor, stream: Any) -> None:
        """Keeps the memory of a tensor, if another stream owns it, until `stream` has run what it was given."""
        tensor.record_stream(stream)  # which does nothing for the stream that owns it


def _unpin(address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # a copy may still use it
    torch.cuda.cudart().cudaHostUnregister(address)


class ThreadDevice:
    """A CPU with a CudaDevice's methods: computing is the order of the program, and each direction copies in a thread.

    Args:
        delay: is called in the thread with (direction, bytes) before each copy and returns the seconds to wait; None
            copies at once.
    """

    def __init__(self, delay: Callable[[Direction, int], float] | None = None) -> None:
        self._delay = delay
        self._threads = {
            direction: concurrent.futures.ThreadPoolExecutor(1, f"offload-{direction}") for direction in ("out", "in")
        }

    def get_stream(self) -> None:
        return None

    def mark(self, stream: None) -> concurrent.futures.Future[None]:
        event: concurrent.futures.Future[None] = concurrent.futures.Future()
        event.set_result(None)
        return event

    def wait(self, stream: None, event: concurrent.futures.Future[None]) -> None:
        event.result()

    def copy(
        self, direction: Direction, source: Tensor, target: Tensor, after: Sequence[Any]
    ) -> concurrent.futures.Future[None]:
        def run() -> None:
            for event in after:
                event.result()
            if self._delay is not None:
                time.sleep(self._delay(direction, source.numel()))
            target.copy_(source)

        return self._threads[direction].submit(run)

    def allocate_host(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def lend(self, tensor: Tensor, stream: None) -> None:
        pass


Device = CudaDevice | ThreadDevice

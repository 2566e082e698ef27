"""CUDA graphs for a CPU: the operations of a function are recorded, and a replay does them again on the same tensors.

As in a CUDA graph, a replay runs no Python: numbers of the host stay those of the recording, and results lie where the
recorded ones do.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CpuGraph:
    """In the place of torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self._operations: list[tuple[Any, Any, Any, Any]] = []
        self.registered: list[torch.Generator] = []

    def register_generator_state(self, state: torch.Generator) -> None:
        assert isinstance(state, torch.Generator)
        self.registered.append(state)

    def replay(self) -> None:
        with torch.no_grad():
            for function, args, kwargs, results in self._operations:
                found = tree_leaves(function(*args, **kwargs))
                for result, new in zip(tree_leaves(results), found, strict=True):
                    if isinstance(result, Tensor) and result.data_ptr() != new.data_ptr():
                        result.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: CpuGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        self._graph._operations.append((function, args, kwargs or {}, results))
        return results


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda captures CPU graphs."""
    capturing: list[CpuGraph] = []

    @contextlib.contextmanager
    def capture(graph: CpuGraph, **_: Any) -> Iterator[None]:
        capturing.append(graph)
        try:
            with _Recorder(graph):
                yield
        finally:
            capturing.pop()
        graph.replay()

    nothing = type("Nothing", (), {"wait_stream": lambda self, other: None})
    for name, value in {
        "CUDAGraph": CpuGraph,
        "graph": capture,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: bool(capturing),
        "synchronize": lambda *_: None,
        "Stream": nothing,
        "current_stream": nothing,
        "stream": lambda _: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(Tensor, "cuda", lambda self: self)


class CudaGenerator(torch.Generator):
    """A generator as a CUDA device's: its state is 16 bytes, of a seed and of an offset in whole blocks of 4, and while
    a graph is captured it neither tells nor takes numbers."""

    def __new__(cls, device: Any = None) -> CudaGenerator:
        return super().__new__(cls, "cpu")

    def __init__(self, device: Any = None) -> None:
        self.offset = 0

    def manual_seed(self, seed: int) -> torch.Generator:
        self._check()
        return super().manual_seed(seed)

    def set_offset(self, offset: int) -> None:
        self._check()
        assert offset % 4 == 0
        self.offset = offset

    def get_offset(self) -> int:
        self._check()
        return self.offset

    def get_state(self) -> Tensor:
        self._check()
        return torch.tensor(list(struct.pack("=Qq", self.initial_seed(), self.offset)), dtype=torch.uint8)

    def set_state(self, state: Tensor) -> CudaGenerator:
        if state.dtype != torch.uint8:
            raise TypeError("RNG state must be a torch.ByteTensor")
        assert state.shape == (16,)
        seed, offset = struct.unpack("=Qq", bytes(state.tolist()))
        self.manual_seed(seed)
        self.set_offset(offset)
        return self

    def clone_state(self) -> CudaGenerator:
        return CudaGenerator().set_state(self.get_state())

    def graphsafe_get_state(self) -> CudaGenerator:
        return self

    def graphsafe_set_state(self, other: CudaGenerator) -> None:
        self.set_state(other.get_state())

    @staticmethod
    def _check() -> None:
        assert not torch.cuda.is_current_stream_capturing(), "a generator is used in a capture"

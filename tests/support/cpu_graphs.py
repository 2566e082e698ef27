"""CUDA graphs for a CPU: the operations of a function are recorded, and a replay does them again on the same tensors.

As in a CUDA graph, a replay runs no Python: numbers of the host stay those of the recording, and results lie where the
recorded ones do.
"""

from __future__ import annotations

import contextlib
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

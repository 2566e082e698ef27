"""Records which storages autograd holds after a forward, and which operation of the model saved each first."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from tempo_kernels.saved import Kept, find_nodes_since, find_saved_tensors


@dataclasses.dataclass(frozen=True)
class SavedStorage:
    """One storage that autograd keeps alive, under the operation that saved it first."""

    operation: str
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_on_host: bool = False
    """Whether offload has moved it there."""


class _Handle(Kept):
    """Stands in for a saved tensor; autograd holds it exactly as long as the graph needs the tensor."""

    def __init__(self, tensor: Tensor, operation: str) -> None:
        super().__init__(tensor)
        self.operation = operation


class Scopes:
    """Notes which operation runs: the innermost module, or function in `scope`, and which one made a node of autograd.

    Parameters, buffers and the tensors in `exclude` do not count: they exist anyway.

    Args:
        model: the names of its modules become the names of operations.
        exclude: tensors whose storages are not counted, such as the micro batch's.
    """

    def __init__(self, model: torch.nn.Module, exclude: tuple[Tensor, ...] = ()) -> None:
        self._model = model
        self._scopes: list[str] = [""]
        # (sequence number of autograd's next node, operation), where the operation changed.
        self._changes: list[tuple[int, str]] = [(-1, "")]
        known = (*model.parameters(), *model.buffers(), *exclude)
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._owners: dict[int, str] = {}

    @property
    def operation(self) -> str:
        """The operation that runs now; empty outside of submodules."""
        return self._scopes[-1]

    def find_operation(self, node: Any) -> str:
        """The operation that ran when autograd made this node, by its sequence number."""
        number = node._sequence_nr()
        return self._changes[bisect.bisect_right(self._changes, number, key=lambda change: change[0]) - 1][1]

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        """Note inside this context which module runs."""
        hooks = []
        for name, module in self._model.named_modules():
            if name:  # the root module has no name: whatever runs outside of submodules belongs to it
                hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._enter(name)))
                hooks.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def scope(self, operation: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function` so that it runs as `operation`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._enter(operation)
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return run

    def claim(self, tensor: Tensor, operation: str) -> None:
        """Count this tensor's storage under `operation`, whoever saves it first."""
        self._owners[tensor.untyped_storage()._cdata] = operation

    def _enter(self, operation: str) -> None:
        self._scopes.append(operation)
        self._note_change()

    def _leave(self) -> None:
        self._scopes.pop()
        self._note_change()

    def _note_change(self) -> None:
        self._changes.append((torch._C._autograd._get_sequence_nr(), self.operation))

    def _list_distinct(self, found: Iterable[tuple[str, Tensor]]) -> list[SavedStorage]:
        """The distinct storages of (operation, saved tensor), each under its first operation."""
        storages: dict[int, SavedStorage] = {}
        for operation, tensor in found:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known and storage._cdata not in storages:
                owner = self._owners.get(storage._cdata, operation)
                storages[storage._cdata] = SavedStorage(owner, storage.nbytes(), tensor.dtype, tuple(tensor.shape))
        return list(storages.values())


class Recorder(Scopes):
    """Records the tensors that a model's forward saves, whatever becomes of its outputs.

    This gives autograd equal tensors without their attributes, and keeps ZeRO-partitioned parameters alive longer. Use
    it on a model of your own; in a running job use GraphReader.
    """

    def __init__(self, model: torch.nn.Module, exclude: tuple[Tensor, ...] = ()) -> None:
        super().__init__(model, exclude)
        self._handles: list[weakref.ref[_Handle]] = []

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Record what autograd saves inside this context, each tensor under the operation that runs."""
        with self.follow(), torch.autograd.graph.saved_tensors_hooks(self._pack, _Handle.unpack):
            yield

    def list_saved(self) -> list[SavedStorage]:
        """The distinct storages that autograd still holds, in the order in which they were saved."""
        # The references of freed tensors are empty.
        handles = [handle for reference in self._handles if (handle := reference()) is not None]
        return self._list_distinct((handle.operation, handle.tensor) for handle in handles if handle.tensor is not None)

    def _pack(self, tensor: Tensor) -> _Handle:
        handle = _Handle(tensor, self.operation)
        self._handles.append(weakref.ref(handle))
        return handle


class GraphReader(Scopes):
    """Reads what a Recorder records from the graph of a model's outputs, and changes nothing in the run."""

    def list_saved(self, outputs: Iterable[Tensor]) -> list[SavedStorage]:
        """The distinct storages that the graph behind `outputs` holds, in the order of its nodes."""
        nodes = sorted(find_nodes_since(0, outputs), key=lambda node: node._sequence_nr())
        return self._list_distinct(
            (self.find_operation(node), held)
            for node in nodes
            for _, held in find_saved_tensors(node)
            if isinstance(held, Tensor) and not isinstance(held, torch.nn.Parameter)
        )

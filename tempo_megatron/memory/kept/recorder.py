"""Records which storages autograd holds after a forward, and which operation of the model asked for each."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from tempo_kernels.recompute import Kept, find_saved_tensors


@dataclasses.dataclass(frozen=True)
class SavedStorage:
    """One storage that autograd keeps alive, under the operation that saved it first."""

    operation: str
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Handle(Kept):
    """What autograd holds in a saved tensor's place; it lives exactly as long as the graph needs the tensor."""

    def __init__(self, tensor: Tensor, operation: str) -> None:
        super().__init__(tensor)
        self.operation = operation


class Scopes:
    """Says which operation runs: the innermost module, or function in `scope`.

    Parameters, buffers and what `exclude` names (a micro batch's own tensors) are not counted: they are there anyway.

    Args:
        model: its modules' qualified names become the operations.
        exclude: tensors whose storages are not counted.
    """

    def __init__(self, model: torch.nn.Module, exclude: tuple[Tensor, ...] = ()) -> None:
        self._model = model
        self._scopes: list[str] = [""]
        known = (*model.parameters(), *model.buffers(), *exclude)
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._owners: dict[int, str] = {}

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        """Inside, note which module runs."""
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
        """`function`, with what it saves recorded under `operation`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._enter(operation)
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return run

    def claim(self, tensor: Tensor, operation: str) -> None:
        """Record what is saved of this tensor's storage under `operation`, whoever saves it first."""
        self._owners[tensor.untyped_storage()._cdata] = operation

    def _enter(self, operation: str) -> None:
        self._scopes.append(operation)

    def _leave(self) -> None:
        self._scopes.pop()

    def _list_distinct(self, found: Iterable[tuple[str, Tensor]]) -> list[SavedStorage]:
        """The distinct storages of saved tensors, each under the first operation that saved it."""
        storages: dict[int, SavedStorage] = {}
        for operation, tensor in found:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known and storage._cdata not in storages:
                owner = self._owners.get(storage._cdata, operation)
                storages[storage._cdata] = SavedStorage(owner, storage.nbytes(), tensor.dtype, tuple(tensor.shape))
        return list(storages.values())


class Recorder(Scopes):
    """Records saved tensors of a model's forward, storage by storage, whatever becomes of its outputs.

    This gives autograd equal tensors without their attributes, and keeps ZeRO-partitioned parameters alive longer. Use
    it on a model of your own; in a running job use GraphReader.
    """

    def __init__(self, model: torch.nn.Module, exclude: tuple[Tensor, ...] = ()) -> None:
        super().__init__(model, exclude)
        self._handles: list[weakref.ref[_Handle]] = []

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Record what autograd saves inside, by the innermost module or function in `scope` that runs."""
        with self.follow(), torch.autograd.graph.saved_tensors_hooks(self._pack, _Handle.unpack):
            yield

    def list_saved(self) -> list[SavedStorage]:
        """The distinct storages that autograd still holds, in the order in which they were saved."""
        handles = [handle for reference in self._handles if (handle := reference()) is not None]  # others are freed
        return self._list_distinct((handle.operation, handle.tensor) for handle in handles if handle.tensor is not None)

    def _pack(self, tensor: Tensor) -> _Handle:
        handle = _Handle(tensor, self._scopes[-1])
        self._handles.append(weakref.ref(handle))
        return handle


class NodeScopes(Scopes):
    """Scopes that also say which operation made a node of autograd: the one that ran at its sequence number."""

    def __init__(self, model: torch.nn.Module, exclude: tuple[Tensor, ...] = ()) -> None:
        super().__init__(model, exclude)
        # (sequence number of the next node, operation), where the operation changed.
        self._changes: list[tuple[int, str]] = [(-1, "")]

    @property
    def operation(self) -> str:
        """The operation that runs now; empty outside of submodules."""
        return self._scopes[-1]

    def find_operation(self, node: Any) -> str:
        number = node._sequence_nr()
        return self._changes[bisect.bisect_right(self._changes, number, key=lambda change: change[0]) - 1][1]

    def _enter(self, operation: str) -> None:
        super()._enter(operation)
        self._note_change()

    def _leave(self) -> None:
        super()._leave()
        self._note_change()

    def _note_change(self) -> None:
        self._changes.append((torch._C._autograd._get_sequence_nr(), self._scopes[-1]))


class GraphReader(NodeScopes):
    """Reads from the graph of a model's outputs what a Recorder records, and changes nothing for whoever runs it.

    Raises ValueError where torch is too old to read a graph without running its hooks.
    """

    def __init__(self, model: torch.nn.Module, exclude: tuple[Tensor, ...] = ()) -> None:
        if not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"):
            raise ValueError(
                f"torch is {torch.__version__}, which does not say what a saved tensor holds; expected 2.7 or later; "
                "leave --tempo-ledger out"
            )
        super().__init__(model, exclude)

    def list_saved(self, outputs: Iterable[Tensor]) -> list[SavedStorage]:
        """The distinct storages that the graph behind `outputs` holds, in the order of its nodes."""
        nodes = sorted(_list_nodes(outputs), key=lambda node: node._sequence_nr())
        return self._list_distinct(
            (self.find_operation(node), held)
            for node in nodes
            for _, held in find_saved_tensors(node)
            if isinstance(held, Tensor) and not isinstance(held, torch.nn.Parameter)
        )


def _list_nodes(outputs: Iterable[Tensor]) -> list[Any]:
    pending, seen = [t.grad_fn for t in outputs], set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending.extend(parent for parent, _ in node.next_functions)
    return list(seen)

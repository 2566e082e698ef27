"""Which storages autograd holds after a forward, and which operation of the model asked for each."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tempo_kernels.recompute import Kept


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


class Recorder:
    """Records saved tensors of a model's forward, storage by storage.

    Parameters, buffers and what `exclude` names (a micro batch's own tensors) are not counted: they are there anyway.

    Args:
        model: its modules' qualified names become the operations.
        exclude: tensors whose storages are not counted.
    """

    def __init__(self, model: torch.nn.Module, exclude: tuple[Tensor, ...] = ()) -> None:
        self._model = model
        self._scopes: list[str] = [""]
        self._handles: list[weakref.ref[_Handle]] = []
        known = (*model.parameters(), *model.buffers(), *exclude)
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._owners: dict[int, str] = {}

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Record what autograd saves inside, by the innermost module or function in `scope` that runs."""
        hooks = []
        for name, module in self._model.named_modules():
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._scopes.append(name)))
            hooks.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _Handle.unpack):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def scope(self, operation: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with what it saves recorded under `operation`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._scopes.append(operation)
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return run

    def claim(self, tensor: Tensor, operation: str) -> None:
        """Record what is saved of this tensor's storage under `operation`, whoever saves it first."""
        self._owners[tensor.untyped_storage()._cdata] = operation

    def list_saved(self) -> list[SavedStorage]:
        """The distinct storages that autograd still holds, in the order in which they were saved."""
        storages: dict[int, SavedStorage] = {}
        for reference in self._handles:
            handle = reference()
            tensor = None if handle is None else handle.tensor
            if handle is None or tensor is None:
                continue  # freed or dropped
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known and storage._cdata not in storages:
                storages[storage._cdata] = SavedStorage(
                    self._owners.get(storage._cdata, handle.operation),
                    storage.nbytes(),
                    tensor.dtype,
                    tuple(tensor.shape),
                )
        return list(storages.values())

    def _pack(self, tensor: Tensor) -> _Handle:
        handle = _Handle(tensor, self._scopes[-1])
        self._handles.append(weakref.ref(handle))
        return handle

    def _leave(self) -> None:
        self._scopes.pop()

"""Follows the storages that operations make, from the operation that makes each until nobody holds it any more."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_Result = TypeVar("_Result")


@dataclasses.dataclass(eq=False)
class MadeStorage:
    """A storage that an operation made, with the size that it had then."""

    reference: StorageWeakRef
    num_bytes: int
    number: int
    """How many were made before it."""


class StorageFollower(TorchDispatchMode):
    """Sees every operation that reaches torch's dispatcher, in forward and in backward, and the storages it makes.

    It works on real and on fake tensors, on any device, and costs some microseconds an operation. Whether somebody
    still holds a storage is asked in `drop_freed`: a subclass decides how often, since asking takes long.

    It does not see memory that an operation takes and gives back inside itself (a product's packed operands, workspaces
    of cuBLAS), nor what an allocator rounds up or keeps for itself. Enter it inside of a FakeTensorMode, not outside.

    Args:
        known: tensors whose storages do not count, whoever returns them: parameters, a micro batch.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {t.untyped_storage()._cdata for t in known}
        # Storages of `make_known`: while somebody holds them, no other storage has their addresses.
        self._held: list[torch.UntypedStorage] = []
        self._looks_away = False
        self._alive: dict[int, MadeStorage] = {}
        self._num_made = 0
        # The bytes of all storages in _alive, some of which may have been freed.
        self._upper_bound = 0

    def make_known(self, function: Callable[[], Tensor]) -> Tensor:
        """What `function` returns, whose storage does not count from then on; nothing that it makes counts."""
        self._looks_away = True
        try:
            made = function()
        finally:
            self._looks_away = False
        self._held.append(made.untyped_storage())
        self._known.add(made.untyped_storage()._cdata)
        return made

    def drop_freed(self) -> None:
        """Forget every storage that nobody holds any more."""
        # What StorageWeakRef.expired does behind two calls more: this is asked some hundred thousand times a step.
        is_expired = torch.UntypedStorage._expired
        for key in [key for key, made in self._alive.items() if is_expired(made.reference.cdata)]:
            self._drop(key)

    def count_alive(self) -> int:
        """The bytes that are alive now."""
        self.drop_freed()
        return self._upper_bound

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        new: dict[int, torch.UntypedStorage] = {}
        for t in tree_leaves(out):
            if not isinstance(t, Tensor) or t.is_meta or self._looks_away:
                continue  # a meta tensor has a size and no memory
            storage = t.untyped_storage()
            made = self._alive.get(storage._cdata)
            if storage._cdata not in self._known and (made is None or made.reference.expired()):
                new[storage._cdata] = storage
        if new:
            self.note(new, (args, kwargs))
        return out

    def note(self, new: dict[int, torch.UntypedStorage], inputs: Any) -> None:
        """Follow storages that an operation with these inputs returned for the first time; for subclasses to extend."""
        for key, storage in new.items():
            if key in self._alive:
                self._drop(key)  # freed: the new storage has its address
            self._alive[key] = self.describe(storage, inputs)
            self._upper_bound += self._alive[key].num_bytes
            self._num_made += 1

    def describe(self, storage: torch.UntypedStorage, inputs: Any) -> MadeStorage:
        """What is remembered of a storage; for subclasses that remember more."""
        return MadeStorage(StorageWeakRef(storage), storage.nbytes(), self._num_made)

    def note_freed(self, made: MadeStorage) -> None:
        """Hear that a storage was freed; for subclasses that record it."""

    def _drop(self, key: int) -> None:
        made = self._alive.pop(key)
        self._upper_bound -= made.num_bytes
        self.note_freed(made)


class PeakBytes(StorageFollower):
    """Counts how many bytes of the storages made inside are alive at most.

    It looks after each operation: what the operation read is then alive still, and what it made is alive already.
    """

    def __init__(self, *known: Tensor) -> None:
        super().__init__(known)
        self.peak = 0
        """The most bytes alive at once since the start, or since `begin_phase`."""

    def begin_phase(self) -> int:
        """Let `peak` begin anew at what is alive now, which is returned."""
        self.peak = self.count_alive()
        return self.peak

    def measure(self, function: Callable[[], _Result]) -> tuple[_Result, int]:
        """What `function` returns, and how many bytes more than before are alive while it runs; `peak` has them too."""
        before, start = self.peak, self.begin_phase()
        result = function()
        rise = self.peak - start
        self.peak = max(self.peak, before)
        return result, rise

    def note_rise(self, num_bytes: int) -> None:
        """Count `num_bytes` beyond what is alive as alive for a moment."""
        self.raise_peak(self.count_alive() + num_bytes)

    def raise_peak(self, num_bytes: int) -> None:
        """Count `num_bytes` as all that is alive for a moment."""
        self.peak = max(self.peak, num_bytes)

    def note_workspaces(self, num_bytes: int, level: int, kept: Tensor | None) -> None:
        """Hear what a call of attention held inside itself, without its results; for subclasses that record it.

        Args:
            num_bytes: of it, at most.
            level: all that was alive then, which `peak` has already.
            kept: what the call's forward kept, where this is its backward.
        """

    def note(self, new: dict[int, torch.UntypedStorage], inputs: Any) -> None:
        super().note(new, inputs)
        # Most operations make too little for a new peak.
        if self._upper_bound > self.peak:
            self.raise_peak(self.count_alive())


def find_storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Distinct storages -> their bytes. ZeRO-3's partitions count in place of the weights that they are parts of."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        part = getattr(tensor, "ds_tensor", None)
        storage = (tensor if part is None else part).untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return storages


def count_storage_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the tensors' distinct storages."""
    return sum(find_storages(tensors).values())

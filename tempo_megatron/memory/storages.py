"""Counts the bytes of tensors alive at most while operations run, storage by storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_Result = TypeVar("_Result")


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations make inside, and how many of them are alive at most.

    It sees every operation that reaches torch's dispatcher, in forward and in backward, and looks after each one: what
    the operation read is then alive still, and what it made is alive already. It works on real and on fake tensors, on
    any device, and costs some microseconds an operation. A storage counts from the operation that made it until nobody
    holds it any more, with the size that it was made with.

    It does not see memory that an operation takes and gives back inside itself (a product's packed operands, workspaces
    of cuBLAS), nor what an allocator rounds up or keeps for itself. Enter it inside of a FakeTensorMode, not outside.

    Args:
        known: tensors whose storages do not count, whoever returns them: parameters, a micro batch.
    """

    def __init__(self, *known: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        """The most bytes alive at once since the start, or since `begin_phase`."""
        self._known = {t.untyped_storage()._cdata for t in known}
        # Of `make_known`: while somebody holds them, nobody else has their addresses.
        self._held: list[torch.UntypedStorage] = []
        self._looks_away = False
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        # Of all storages in _alive, of which some may be gone.
        self._upper_bound = 0

    def count_alive(self) -> int:
        """The bytes that are alive now."""
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self._upper_bound = sum(size for _, size in self._alive.values())
        return self._upper_bound

    def begin_phase(self) -> int:
        """Let `peak` begin anew at what is alive now, which is returned."""
        self.peak = self.count_alive()
        return self.peak

    def measure(self, function: Callable[[], _Result]) -> tuple[_Result, int]:
        """What `function` returns, and how many bytes more than before are alive while it runs; `peak` has them too."""
        peak, start = self.peak, self.begin_phase()
        result = function()
        rise = self.peak - start
        self.peak = max(self.peak, peak)
        return result, rise

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

    def raise_peak(self, num_bytes: int) -> None:
        """Take it that `num_bytes` more than now were alive for a moment."""
        self.peak = max(self.peak, self.count_alive() + num_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._note(t for t in tree_leaves(out) if isinstance(t, Tensor))
        return out

    def _note(self, tensors: Iterable[Tensor]) -> None:
        for t in tensors:
            if t.is_meta or self._looks_away:
                continue  # a meta tensor has a size and no memory
            storage = t.untyped_storage()
            key = storage._cdata
            if key in self._known:
                continue
            if (entry := self._alive.get(key)) is not None:
                if not entry[0].expired():
                    continue
                self._upper_bound -= entry[1]
            self._alive[key] = (StorageWeakRef(storage), storage.nbytes())
            self._upper_bound += storage.nbytes()
        # To ask each storage takes long; most operations make too little for a new peak.
        if self._upper_bound > self.peak:
            self.peak = max(self.peak, self.count_alive())


def list_storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The distinct storages of tensors."""
    return list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())

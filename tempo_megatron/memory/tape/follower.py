"""Follows the storages that operations make, from the operation that makes each until nobody holds it any more."""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves

from tempo_megatron.memory.tape.scopes import Scopes
from tempo_megatron.memory.tape.tape import ENGINE_PRODUCT, FREED, GRADIENT, TORCH_PRODUCT, Storage, Tape, Workspaces

_Result = TypeVar("_Result")
_PRODUCTS = {
    torch.ops.aten.mm.default: ENGINE_PRODUCT,
    torch.ops.aten.addmm.default: ENGINE_PRODUCT,
    torch.ops.aten.bmm.default: TORCH_PRODUCT,
    torch.ops.aten.baddbmm.default: TORCH_PRODUCT,
}


class Follower(TorchDispatchMode):
    """Sees every operation that reaches torch's dispatcher, in forward and in backward, and records what it makes.

    It works on real and on fake tensors, on any device, and changes no result. It does not see memory that an operation
    takes and gives back inside itself (a product's packed operands, workspaces of cuBLAS), nor what an allocator rounds
    up or keeps for itself. Enter it inside of a FakeTensorMode, not outside.

    Args:
        known: tensors whose storages do not count, whoever returns them: parameters, a micro batch.
        known_storages: further ones, as `list_storages` names them.
        scopes: names what makes each storage; entered with the follower.
        count_host: returns the bytes on the host; None where nothing moves there.
    """

    def __init__(
        self,
        *known: Tensor,
        known_storages: Iterable[int] = (),
        scopes: Scopes | None = None,
        count_host: Callable[[], int] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape()
        self.alive_bytes = 0
        """The bytes that are alive now."""
        self.peak = 0
        """The most bytes alive at once since the start, or since `begin_phase`. What an operation read still counts
        when its results are there."""
        self._known = {t.untyped_storage()._cdata for t in known} | {*known_storages}
        self._alive: dict[int, int] = {}  # address of a storage -> its number
        # Torch keeps the Python object of a storage as long as the storage itself.
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        # Storages of `make_known`: while somebody holds them, no other storage has their addresses.
        self._held: list[torch.UntypedStorage] = []
        self._with_gradient: set[int] = set()
        self._scopes, self._count_host = scopes or Scopes(), count_host
        self._context = contextlib.ExitStack()

    def __enter__(self) -> Follower:
        if self._count_host is not None:
            self.tape.on_host.append(self._count_host())
        self._context.enter_context(self._scopes.follow(self.tape, self.note_gradients))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._context.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            self.tape.mark(_PRODUCTS[func])
        out = func(*args, **(kwargs or {}))
        new: dict[int, torch.UntypedStorage] = {}
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and not t.is_meta:  # meta has a size and no memory
                storage = t.untyped_storage()
                if storage._cdata not in self._known and storage._cdata not in self._alive:
                    new[storage._cdata] = storage
        if new:
            # A view of what nobody has seen being made: that was there before. A literal's tensor is made outside of
            # the dispatcher, and lift_fresh is the first to return it.
            is_view = func is not torch.ops.aten.lift_fresh.default
            inputs = tree_leaves((args, kwargs)) if is_view else []
            self._note(new, {t.untyped_storage()._cdata for t in inputs if isinstance(t, Tensor)})
        return out

    def _note(self, new: dict[int, torch.UntypedStorage], read: set[int]) -> None:
        phase, operation = self._scopes.find_place()
        self.tape.num_steps += 1
        if self._count_host is not None:
            self.tape.on_host.append(self._count_host())
        for key, storage in new.items():
            place = ("", "", 0) if key in read else (phase, operation, self.tape.num_steps)
            made = Storage(storage.nbytes(), *place)
            self._alive[key] = self.tape.add(made)
            self._references[key] = weakref.ref(storage, functools.partial(self._free, key))
            self.alive_bytes += made.num_bytes
        self.peak = max(self.peak, self.alive_bytes)

    def _free(self, key: int, _: Any) -> None:
        number = self._alive.pop(key)
        del self._references[key]
        self.alive_bytes -= self.tape.storages[number].num_bytes
        self.tape.free(number)

    def make_known(self, function: Callable[[], Tensor]) -> Tensor:
        """What `function` returns, whose storage does not count from then on; nothing that it makes counts."""
        with _pop_mode_temporarily():
            made = function()
        self._held.append(made.untyped_storage())
        self._known.add(made.untyped_storage()._cdata)
        return made

    def begin_phase(self) -> int:
        """Let `peak` begin again at what is alive now, which is returned."""
        self.peak = self.alive_bytes
        return self.peak

    def measure(self, function: Callable[[], _Result]) -> tuple[_Result, int]:
        """What `function` returns, and how many bytes more than before are alive while it runs; `peak` has them too.

        On the tape the call is one storage for a moment, as large as all that was alive inside at most, and then what
        it leaves: its results first. What was there before and is freed in it is freed last.
        """
        storages, events = self.tape.storages, self.tape.events
        first_event, first_storage = len(events), len(storages)
        before, start = self.peak, self.begin_phase()
        result = function()
        rise = self.peak - start
        self.peak = max(self.peak, before)
        alive = {key: number for key, number in list(self._alive.items()) if number >= first_storage}
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        results = [alive.pop(key) for t in tensors if (key := t.untyped_storage()._cdata) in alive]
        freed = [(number, size) for number, size in events[first_event:] if size == FREED and number < first_storage]
        del events[first_event:]
        if rise:
            self.tape.free(self.tape.add(Storage(rise, "", "", self.tape.num_steps)))
        events += [(number, storages[number].num_bytes) for number in (*results, *alive.values())] + freed
        return result, rise

    def note_workspaces(self, num_bytes: int, kept: Tensor | None) -> None:
        """Record what a call of attention held inside itself, `num_bytes` at most and without its results, all of which
        was alive when the tape's last storage was made.

        kept: what the call's forward kept, where this is its backward.
        """
        number = None if kept is None else self._alive.get(kept.untyped_storage()._cdata)
        operation = self._scopes.operation if number is None else self.tape.storages[number].operation
        self.tape.workspaces.append(Workspaces(num_bytes, operation, len(self.tape.storages) - 1))

    def note_gradients(self, parameter: Tensor) -> None:
        """Record that a parameter's gradient is complete; of several in one storage the first has its bytes."""
        for gradient in (parameter.grad, getattr(parameter, "main_grad", None)):
            if gradient is None:
                continue
            storage = gradient.untyped_storage()
            key, num_bytes = storage._cdata, storage.nbytes()
            is_new = key not in self._known and key not in self._with_gradient
            self._with_gradient.add(key)
            if key in self._alive:
                self.tape.storages[self._alive[key]].is_gradient = True
            self.tape.gradients[self.tape.mark(GRADIENT)] = gradient.numel(), num_bytes if is_new else 0

    def sum_by_operation(self) -> dict[str, int]:
        """The operation that made them -> bytes that are alive now."""
        found: dict[str, int] = collections.Counter()
        for storage in [self.tape.storages[number] for number in self._alive.values()]:
            found[storage.operation] += storage.num_bytes
        return found


def list_storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Distinct storages -> their bytes. ZeRO-3's partitions count in place of the weights that they are parts of."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        part = getattr(tensor, "ds_tensor", None)
        storage = (tensor if part is None else part).untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return storages


def count_span(t: Tensor) -> int:
    """The bytes of the smallest storage that holds it."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return int(t.storage_offset() + last + 1) * t.element_size() if t.numel() else 0


def count_storage_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the tensors' distinct storages."""
    return sum(list_storages(tensors).values())

"""Moves what layers keep for backward to the host and back: the protocol, whatever finds the tensors.

What moves is a *unit*: one storage that autograd keeps, or the part of it that its users see. q, k and v, which are
views of one buffer, move once, and so does a norm's output that the next linear keeps as its input; all their users get
views of one new storage back. The units of one layer in one forward are a *group*. A unit is in one of five places:

    RESIDENT --commit--> LEAVING --release--> HOST --load--> COMING --unpack--> BACK

C is the stream that computes, O the one that copies out, I the one that copies in. An arrow `A -> B` is an event.

commit   When the layer's forward ends, each unit gets a place in a slab of the host pool. O waits for C (the unit is
         computed) and for the slab (its last reader has read), and copies; `out` is the event of the copy's end.
release  When the next layer's forward ends, C waits for `out` and the engine lets go of the device's memory. It belongs
         to C, so whatever C is given next may have it: C's own order says that the copy has ended. record_stream
         would free the memory whenever an event happened to be polled; only what was made on another stream than C,
         which does not wait, is freed so. And where the link is too slow, C waits: copies never pile up, and no more
         than two groups are on the device, however slow the link is.
load     When the backward reaches the layer after it, memory is taken in C's order. I waits for C (whoever had the
         memory before is done), and for `out`: a reload that starts before its copy-out has ended reads what the host
         memory held before (Megatron-LM issue 7398). `in` is the event of this copy's end.
unpack   When a node of the backward asks for the tensor, C waits for `in`. A unit that is still RESIDENT or LEAVING is
         simply taken; one that is on the HOST, because nobody foresaw this backward, is loaded now.
the end  When the last user of a unit is gone (autograd frees what a node kept once it has run, or all of it where a
         backward fails), C waits for `out` if the unit is still LEAVING, for `in` if it is COMING, and lets go. The
         slab is free for the next forward once all its units are gone.

The host never waits for a copy. Several forwards may be under way (1F1B): each has groups of its own, and a graph that
is never run backward gives its units back when it is freed. A retained graph may run backward again: its units stay
BACK.

Autograd checks that a saved tensor was not written to in place since, but not one that hooks keep. So the engine does:
the tensor's version must not change until its copy-out has ended.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tempo_kernels.offload.device import CudaDevice, Device, ThreadDevice
from tempo_kernels.offload.pool import HostPool, Slab, count_ranks_of_host, get_free_host_bytes

_ALIGNMENT = 256
"""Bytes of a block; units begin at the beginning of one."""


class Place(enum.Enum):
    """Where a unit is."""

    RESIDENT = enum.auto()
    LEAVING = enum.auto()
    HOST = enum.auto()
    COMING = enum.auto()
    BACK = enum.auto()


class Moved(NamedTuple):
    """A tensor that a layer moves."""

    name: str
    """Of the module in the layer that saved it first."""
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the tensor that was saved first."""


class Unit:
    """A storage, or a part of one, that a layer keeps; what `keep` returns holds it, and its death ends its copies."""

    def __init__(self, engine: Engine, tensor: Tensor, name: str = "") -> None:
        self._engine = engine
        self.name, self.dtype, self.shape = name, tensor.dtype, tuple(tensor.shape)
        """The module of the layer that saved it first, and of what kind it is."""
        self.device, self.version = tensor.device, tensor._version
        self._tensor: Tensor | None = tensor.detach()
        self.place = Place.RESIDENT
        self.first, self.end = _get_byte_range(tensor)
        """The bytes of the storage that its users see."""
        self._bytes: Tensor | None = None
        """The unit's bytes on the device, uint8."""
        self._host: Tensor | None = None
        self._slab: Slab | None = None
        self._out: Any = None
        self._in: Any = None
        self._stream: Any = None
        """The stream that owns the device's memory."""

    @property
    def num_bytes(self) -> int:
        return self.end - self.first

    def include(self, tensor: Tensor) -> bool:
        """Returns whether the unit moves a tensor of its storage too; until it is committed it does, unless the tensor
        was written to since the unit was made."""
        if self.version != tensor._version:
            return False
        first, end = _get_byte_range(tensor)
        if self.place is Place.RESIDENT:
            self.first, self.end = min(first, self.first), max(end, self.end)
        return self.first <= first and end <= self.end

    def keep(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Returns what autograd keeps in place of a tensor of the storage; called, it returns the tensor, on the
        device, in the order of the stream of then."""
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return functools.partial(self._take, offset, tensor.dtype, tensor.size(), tensor.stride())

    def commit(self, slab: Slab, offset: int, ready: Any) -> None:
        """RESIDENT -> LEAVING: begins to copy to a place in a slab."""
        device = self._engine.device
        assert self.place is Place.RESIDENT
        self._bytes = _view(self.check_version(), self.first, torch.uint8, (self.num_bytes,), (1,))
        self._slab, self._host = slab, slab.memory[offset : offset + self.num_bytes]
        self._stream = device.get_stream()
        self._out = device.copy("out", self._bytes, self._host, [ready, *slab.free])
        self.place = Place.LEAVING
        self._engine.note_device_bytes(self.num_bytes)

    def release(self) -> None:
        """LEAVING -> HOST: lets go of the device's memory once the copy has ended."""
        if self.place is Place.LEAVING:
            self.check_version()
            self._wait_until_out()
            self.place = Place.HOST
            self._let_go()

    def load(self) -> None:
        """HOST -> COMING: begins to copy back."""
        if self.place is not Place.HOST:
            return
        device = self._engine.device
        self._stream = device.get_stream()
        self._bytes = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
        assert self._host is not None
        self._in = device.copy("in", self._host, self._bytes, [device.mark(self._stream), self._out])
        self.place = Place.COMING
        self._engine.note_device_bytes(self.num_bytes)

    def _take(self, offset: int, *form: Any) -> Tensor:
        if self.place is Place.HOST:
            self._engine.num_stalls += 1
            self.load()
        if self.place in (Place.RESIDENT, Place.LEAVING):
            return _view(self.check_version(), offset, *form)
        device = self._engine.device
        stream = device.get_stream()
        device.wait(stream, self._in)
        assert self._bytes is not None
        self.place = Place.BACK
        if stream != self._stream:
            device.lend(self._bytes, stream)
        return _view(self._bytes, offset - self.first, *form)

    def __del__(self) -> None:
        if self._slab is None:
            return
        if self.place is Place.LEAVING:
            self._wait_until_out()
        elif self.place is Place.COMING:
            self._engine.device.wait(self._stream, self._in)
        if self.place is not Place.HOST:
            self._let_go()
        self._slab.give_back(self._in if self._in is not None else self._out)

    def _wait_until_out(self) -> None:
        device = self._engine.device
        device.wait(self._stream, self._out)
        assert self._bytes is not None
        device.lend(self._bytes, self._stream)

    def _let_go(self) -> None:
        self._bytes = self._tensor = None
        self._engine.note_device_bytes(-self.num_bytes)

    def check_version(self) -> Tensor:
        """Returns the tensor on the device. Raises RuntimeError where it was written to in place since."""
        assert self._tensor is not None
        if self._tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self._tensor.shape)}, which a layer keeps for backward and offload moves, "
                "was written to in place since; expected it as it was; write to a copy, or leave offload off in this "
                "layer"
            )
        return self._tensor


class Group:
    """The units that one layer moves in one forward."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self._units: list[weakref.ref[Unit]] = []

    def add(self, units: Iterable[Unit]) -> None:
        """Adds units that are still RESIDENT."""
        self._units.extend(map(weakref.ref, units))

    def list_units(self) -> list[Unit]:
        """Lists the units that somebody still needs."""
        return [unit for reference in self._units if (unit := reference()) is not None]

    def load(self) -> None:
        """Begins to copy back, what backward needs first first: what was kept last."""
        for unit in reversed(self.list_units()):
            unit.load()


class Engine:
    """Moves groups of units between one device and the host.

    Args:
        device: makes the copies; None takes streams where the first tensors are on a GPU, and threads on a CPU.
        num_groups: how many groups may be on the host at once, to tell before the first of them whether the host has
            the memory for all; None does not ask.
    """

    def __init__(self, device: Device | None = None, num_groups: int | None = None) -> None:
        self._device = device
        self._place: torch.device | None = None
        """Where the layers are."""
        self.pool = HostPool(lambda num_bytes: self.device.allocate_host(num_bytes))
        self.num_groups = num_groups
        self._leaving: list[Group] = []
        self.device_bytes = 0
        """Of units that are on the device, from the end of their layer's forward on."""
        self.peak_device_bytes = 0
        self.moved_bytes = 0
        """Copied out since the start."""
        self.last_moved: weakref.WeakKeyDictionary[nn.Module, tuple[Moved, ...]] = weakref.WeakKeyDictionary()
        """Layer -> what it has moved in its last forward."""
        self.num_stalls = 0
        """Tensors that backward asked for before anybody had begun to copy them back."""

    def __reduce__(self) -> Any:
        # A copy of a model has moved nothing yet.
        return functools.partial(Engine, num_groups=self.num_groups), ()

    @property
    def device(self) -> Device:
        assert self._device is not None, "choose_device comes first"
        return self._device

    def choose_device(self, tensor: Tensor) -> None:
        """Takes the device of the first tensor for all. Raises ValueError where a later one lies on another."""
        if self._place is None:
            self._place = tensor.device
        elif self._place != tensor.device:
            raise ValueError(
                f"a layer's input lies on {tensor.device}, and offload moves what is on {self._place}; expected one "
                "device for all layers; give each GPU a process of its own, or leave offload off"
            )
        if self._device is None:
            self._device = CudaDevice(tensor.device) if tensor.is_cuda else ThreadDevice()

    def commit(self, group: Group) -> None:
        """Begins to copy a group out. Raises ValueError where the host has too little memory, and RuntimeError where
        one of its tensors was written to in place since."""
        units = group.list_units()
        if not units:
            return
        offsets, num_bytes = [], 0
        for unit in units:
            offsets.append(num_bytes)
            unit.check_version()
            num_bytes += -(-unit.num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._check_host(num_bytes)
        slab = self.pool.take(num_bytes, len(units))
        ready = self.device.mark(self.device.get_stream())
        for unit, offset in zip(units, offsets, strict=True):
            unit.commit(slab, offset, ready)
        self.moved_bytes += num_bytes
        self.last_moved[group.layer] = tuple(Moved(unit.name, unit.num_bytes, unit.dtype, unit.shape) for unit in units)
        self._leaving.append(group)

    def release(self, but: Iterable[Group] = ()) -> None:
        """Lets go of the device's memory of all groups that are leaving, except these."""
        kept = set(map(id, but))
        for group in self._leaving:
            if id(group) not in kept:
                for unit in group.list_units():
                    unit.release()
        self._leaving = [group for group in self._leaving if id(group) in kept]

    def note_device_bytes(self, change: int) -> None:
        """Counts memory of the device that a unit takes or gives back."""
        self.device_bytes += change
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)

    def _check_host(self, num_bytes: int) -> None:
        if self.num_groups is None or (free := get_free_host_bytes()) is None:
            return
        num_groups, num_ranks = self.num_groups, count_ranks_of_host()
        if num_groups * num_bytes * num_ranks > free:
            raise ValueError(
                f"a layer offloads {_write_size(num_bytes)}, so {num_groups} layers that are on the host at once need "
                f"{_write_size(num_groups * num_bytes)} of it on each of its {num_ranks} ranks, and "
                f"{_write_size(free)} are free for all of them; offload fewer layers or rows, or keep less by "
                "recomputation"
            )
        self.num_groups = None


def _get_byte_range(tensor: Tensor) -> tuple[int, int]:
    """Returns where, in its storage, the block with a tensor's first byte begins, and the byte after its last."""
    last: int = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.element_size()
    # Where the first byte lies decides which instructions a kernel may use; so it keeps its place in its block.
    return first - first % _ALIGNMENT, first + (last + 1) * tensor.element_size()


def _view(tensor: Tensor, offset: int, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Returns a view of a tensor's storage, `offset` bytes after its beginning."""
    view = torch.empty(0, dtype=dtype, device=tensor.device)
    view.set_(tensor.untyped_storage(), offset // dtype.itemsize, size, stride)
    return view


def _write_size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.2f} MiB"

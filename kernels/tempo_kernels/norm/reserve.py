"""Chooses on the host how many lost channels a norm has room for, usually without waiting for the GPU.

A forward must allocate columns for lost channels before it launches anything; their number is its capacity. The host
learns it in two ways.

Changes that torch sees: torch counts writes to a parameter. If a parameter changed since its channels were counted, as
after an optimizer's step, `load_state_dict` or pruning, the next forward that needs gradients counts the channels of
all norms that changed, in one batch, and waits for that one result.

Changes that torch does not see: writes by `.data`, by fused optimizers and by collectives. Every forward counts on the
device its lost channels and the candidates, which a small move of the parameters would lose. The first norm of a
backward pass starts to copy these counts to the host, and the host reads them at the end of the pass. It waits for the
copy alone, which the GPU made at the beginning of the pass. The next forward has room for all candidates. If more
channels were lost than there was room for, the backward pass raises, and its kernels have written NaN for them.

The capacity depends on the parameters alone and never on timing.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tempo_kernels.norm.lost_channels import find_candidate_channels

MAX_MOVES = 2
"""How often a parameter's memory may move before the host assumes that it always does, as under FSDP and ZeRO-3."""

_numbers = itertools.count(1)
_reserves: dict[Hashable, Reserve] = {}
# For each device the reserves whose counts a forward wrote and nobody has copied yet, each with the number of times
# that the host had counted its channels by then.
_written: defaultdict[torch.device, dict[Reserve, int]] = defaultdict(dict)
_copies: defaultdict[torch.device, list[_Copy]] = defaultdict(list)


def find_reserve(
    weight: Tensor, bias: Tensor | None, dtype: torch.dtype, zero_centered: bool, needs_grad: bool
) -> Reserve:
    """Returns the reserve of one norm, brought up to date if the next forward needs gradients.

    It lives as long as the tensor objects weight and bias (or the tensors that they are views of). A weight that is a
    new tensor in every call is counted, and waited for, in every call.

    Raises: RuntimeError if the channels were never counted and a CUDA graph is being captured.
    """
    device = weight.device
    key = (_identify(weight), bias if bias is None else _identify(bias), dtype, zero_centered, device)
    captures = _is_capturing(device)
    reserve = _reserves.get(key)
    if captures and (reserve is None or (needs_grad and reserve.stamp is None)):
        raise RuntimeError(
            "norm: a CUDA graph is being captured and this norm's channels have not been counted yet; run it once "
            "before the capture"
        )
    parameters = [weight] if bias is None else [weight, bias]
    if reserve is None:
        reserve = _reserves[key] = Reserve(parameters, dtype, zero_centered, functools.partial(_forget, key))
    if needs_grad and not captures:
        if reserve.is_stale(parameters):
            _count(reserve, parameters)
        _written[device][reserve] = reserve.times_counted
    return reserve


def check_after_backward(device: torch.device) -> None:
    """Schedules reading the counts of all forwards so far at the end of the running backward pass, if one runs.

    The backward of each norm calls it. Only the first of a pass finds something to copy, unless the pass also runs
    forwards again. Nothing is read while a CUDA graph is captured: channels lost in its replays show as NaN only.

    Raises, at the end of that pass: RuntimeError where a forward had too little room.
    """
    if not _written[device] or _is_capturing(device) or torch._C._current_graph_task_id() == -1:
        return
    written, _written[device] = _written[device], {}
    counts, copied = torch.stack([reserve.counts for reserve in written]), None
    if device.type == "cuda":
        pinned = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
        counts, copied = pinned.copy_(counts, non_blocking=True), torch.cuda.Event()
        copied.record()
    _copies[device].append(_Copy(written, counts, copied))
    torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_read_copies, device))


class Reserve:
    """What the host knows of one norm: its `capacity`, and `counts`, which forwards write on the device."""

    def __init__(
        self, parameters: Sequence[Tensor], dtype: torch.dtype, zero_centered: bool, forget: Callable[[object], None]
    ) -> None:
        self.number = next(_numbers)
        self.places = [_Place(tensor, forget) for tensor in parameters]
        self.hidden_size, self.device = parameters[0].numel(), parameters[0].device
        self.dtype, self.zero_centered = dtype, zero_centered
        self.capacity = self.times_counted = self.moves = 0
        self.stamp: tuple[Hashable, ...] | None = None
        with torch.inference_mode(False):  # made in inference mode, it could not be written in training
            self.counts, self.unread_counts = torch.zeros(2, 2, dtype=torch.int32, device=self.device)
            self.no_slots = torch.empty(0, dtype=torch.int32, device=self.device)

    def is_stale(self, parameters: Sequence[Tensor]) -> bool:
        """Whether the host sees that the parameters may have changed since their channels were counted."""
        stamp = _take_stamp(parameters)
        if stamp == self.stamp:
            return False
        if self.stamp is not None and stamp[::2] == self.stamp[::2]:
            self.moves += 1
            if self.moves > MAX_MOVES:
                self.stamp = stamp
                return False
        return True

    def find_parameters(self) -> list[Tensor] | None:
        """Returns weight and, if there is one, bias; None if one of them has no memory at present."""
        found = [place.find_tensor() for place in self.places]
        there = [tensor for tensor in found if tensor is not None and tensor.device == self.device]
        return there if len(there) == len(found) else None

    def set_capacity(self, candidates: int) -> None:
        self.capacity = choose_capacity(candidates, self.hidden_size)


class _Copy(NamedTuple):
    """Counts on their way to the host."""

    written: dict[Reserve, int]
    counts: Tensor
    copied: torch.cuda.Event | None


class _Place:
    """Finds a parameter again without keeping it alive."""

    def __init__(self, tensor: Tensor, forget: Callable[[object], None]) -> None:
        self.owner = weakref.ref(_find_owner(tensor), forget)
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.view = None if tensor._base is None else (tensor.stride(), tensor.storage_offset())

    def find_tensor(self) -> Tensor | None:
        """Returns the parameter; None if its memory is gone or in other use, as between two uses under FSDP."""
        owner = self.owner()
        if owner is None or owner.dtype != self.dtype or (self.view is None and owner.shape != self.shape):
            return None
        stride, offset = self.view or (owner.stride(), owner.storage_offset())
        end = offset + (self.shape[0] - 1) * stride[0] + 1
        if owner.untyped_storage().nbytes() < end * owner.element_size():
            return None
        return owner.detach().as_strided(self.shape, stride, offset)


def choose_capacity(candidates: int, hidden_size: int) -> int:
    """Returns the columns for so many candidates: an eighth more, in multiples of eight, so that it seldom changes."""
    return -(-min(candidates + candidates // 8, hidden_size) // 8) * 8


@torch.no_grad()
def _count(first: Reserve, parameters: Sequence[Tensor]) -> None:
    """Counts the candidates of `first` and of all norms on its device whose parameters changed; waits once."""
    changed: dict[Reserve, Sequence[Tensor]] = {first: parameters}
    for reserve in list(_reserves.values()):
        if reserve is not first and reserve.device == first.device:
            found = reserve.find_parameters()
            if found is not None and reserve.stamp != _take_stamp(found):
                changed[reserve] = found
    groups: defaultdict[Hashable, list[tuple[Reserve, Sequence[Tensor]]]] = defaultdict(list)
    for reserve, tensors in changed.items():
        reserve.stamp = _take_stamp(tensors)
        kind = (reserve.hidden_size, reserve.dtype, reserve.zero_centered, *(t.dtype for t in tensors))
        groups[kind].append((reserve, tensors))
    totals = []
    for members in groups.values():
        reserve = members[0][0]
        stacked = [torch.stack(column) for column in zip(*(tensors for _, tensors in members), strict=True)]
        weight, bias = stacked if len(stacked) == 2 else (stacked[0], None)
        totals.append(find_candidate_channels(weight, bias, reserve.dtype, reserve.zero_centered).sum(-1))
    counted = [reserve for members in groups.values() for reserve, _ in members]
    for reserve, candidates in zip(counted, _wait_for(torch.cat(totals)), strict=True):
        reserve.set_capacity(candidates)
        reserve.times_counted += 1


def _read_copies(device: torch.device) -> None:
    """Makes room for what the forwards counted; raises RuntimeError if one of them had too little."""
    copies, _copies[device] = _copies[device], []
    overflows = []
    for copy in copies:
        counts = _wait_for(copy.counts, copy.copied)
        for (reserve, times_counted), (candidates, beyond) in zip(copy.written.items(), counts, strict=True):
            if reserve.times_counted == times_counted:  # else the host counted newer parameters meanwhile
                reserve.set_capacity(candidates)
            if beyond:
                reserve.counts[1:].zero_()
                overflows.append((reserve, beyond))
    if overflows:
        reserve, beyond = overflows[0]
        raise RuntimeError(
            f"norm {reserve.number} in the order of first calls (hidden size {reserve.hidden_size}, {reserve.dtype}): "
            f"{beyond} channels more than there was room for are lost: a large change that torch did not see made "
            "their weight too small beside their bias, and their gradients are NaN; expected small steps, or changes "
            "that torch sees, as under torch.no_grad() without .data; change the parameters so, or "
            'set norm to "recompute" (keep="input")'
        )


def _wait_for(counts: Tensor, copied: torch.cuda.Event | None = None) -> list[Any]:
    """Waits for `copied` and returns the numbers in counts. Nowhere else does a norm wait for the GPU."""
    if copied is not None:
        copied.synchronize()
    return counts.tolist()


def _forget(key: Hashable, _: object) -> None:
    reserve = _reserves.pop(key, None)
    if reserve is not None:
        _written[reserve.device].pop(reserve, None)


def _take_stamp(parameters: Sequence[Tensor]) -> tuple[Hashable, ...]:
    """Returns, for each parameter, how often torch saw it change, and its address."""
    stamp: list[Hashable] = []
    for t in parameters:
        stamp += (0 if t.is_inference() else t._version, t.data_ptr())
    return tuple(stamp)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _find_owner(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def _identify(tensor: Tensor) -> Hashable:
    """Returns a key of the tensor's place. Where parameters lie in one flat buffer, every call makes new view objects,
    but their place in the buffer stays."""
    base = tensor._base
    if base is None:
        return id(tensor)
    return (id(base), tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

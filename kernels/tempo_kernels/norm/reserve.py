"""How much room a norm reserves for lost channels: the host's part, which does not wait for the GPU.

Every forward decides on the device which channels are lost, and counts the candidates: channels that could be lost
within a few optimizer steps. The host needs a number of columns before it can launch anything, so it takes that of the
candidates some calls ago, and some more. In every PERIOD-th call it starts to copy the counts to its own memory, and it
reads them PERIOD calls later, at a fixed call rather than as soon as they are there: the capacity, and with it which
kernels run, depends on the parameters alone and never on timing. What it goes by is up to 2 * PERIOD calls old: a gamma
that is no candidate would have to move by 0.8 % of the mean |gamma| in every call to reach 0 before there is room.

The first call with a weight counts at once and waits for it, as does the first after `recount`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Hashable

import torch
from torch import Tensor

from tempo_kernels.norm import eager

PERIOD = 8

_reserves: dict[Hashable, Reserve] = {}


def reserve_of(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, zero_centered: bool) -> Reserve:
    """The reserve of one norm, up to date for a forward to come.

    It belongs to the tensor objects weight and bias (or what they are views of) and goes when they do. A weight that
    is a new tensor in every call is counted, and waited for, in every call.

    Raises: RuntimeError if it is unknown while a CUDA graph is captured.
    """
    key = (_identity(weight), None if bias is None else _identity(bias), dtype, zero_centered)
    reserve = _reserves.get(key)
    if reserve is None:
        _refuse_capture(weight)
        reserve = Reserve(weight)
        for tensor in (weight, bias):
            if tensor is not None:
                reserve.owners.append(weakref.ref(_owner(tensor), lambda _: _reserves.pop(key, None)))
        _reserves[key] = reserve
    reserve.calls_left -= 1
    if reserve.calls_left < 0:
        reserve.update(weight, bias, dtype, zero_centered)
    return reserve


def recount() -> None:
    """Forgets how many channels of each norm are about to be lost: the next call of each norm counts, and waits for it.

    To be called after parameters were replaced other than by an optimizer, as when a checkpoint was loaded. Without it
    the first few forwards may have too little room; they say so in a RuntimeWarning. A CUDA graph keeps the room it was
    captured with, and what it counts is read, and warned of, in ordinary calls only: capture it anew.
    """
    for reserve in _reserves.values():
        reserve.is_counted, reserve.calls_left = False, 0


class Reserve:
    """What the host knows of one norm: `capacity`, and `counts`, where the device tells it more; see kernel.py."""

    def __init__(self, weight: Tensor) -> None:
        self.capacity = 0
        self.calls_left = 0
        self.is_counted = False
        self.owners: list[weakref.ref[Tensor]] = []
        # Kernels in a captured graph write here as long as the graph lives, recount() or not.
        self.counts = torch.zeros(2, dtype=torch.int32, device=weight.device)
        self.no_slots = self.counts[:0]
        self._beyond = self.counts[1:]
        self._copy = torch.zeros(2, dtype=torch.int32, pin_memory=weight.is_cuda)
        self._copied = torch.cuda.Event() if weight.is_cuda else None
        self._is_copying = False

    def update(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, zero_centered: bool) -> None:
        """Reads the last copy of the counts and starts the next; counts at once where nothing is known."""
        beyond = 0
        if not self.is_counted:
            _refuse_capture(weight)
            candidates = int(eager.candidate_channels(weight, bias, dtype, zero_centered).sum())
            self.capacity = capacity_for(candidates, weight.numel())
            self.is_counted, self._is_copying = True, False
        elif not _is_captured(weight):
            beyond = self._read(weight.numel()) if self._is_copying else 0
            self._start_copy(beyond)
        self.calls_left = PERIOD - 1
        if beyond:
            warnings.warn(
                f"norm: in some of the last calls {beyond} of {weight.numel()} channels, their weight too small beside "
                "their bias, had no room for their normalised input, so that their gradients were less exact; there "
                "is room from now on, and tempo_kernels.norm.recount() makes it at once when parameters are replaced",
                RuntimeWarning,
                stacklevel=2,
            )

    def _read(self, hidden_size: int) -> int:
        """Sets the capacity anew; returns how many channels had no room."""
        if self._copied is not None:
            self._copied.synchronize()  # PERIOD calls old: done, unless the GPU is as many calls behind
        candidates, beyond = self._copy.tolist()
        self.capacity = capacity_for(candidates, hidden_size)
        return beyond

    def _start_copy(self, beyond: int) -> None:
        if beyond:
            self._beyond.zero_()  # whatever came after that copy had too little room for the same reason
        self._copy.copy_(self.counts, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._is_copying = True


def capacity_for(candidates: int, hidden_size: int) -> int:
    """Columns for so many candidates: an eighth more, in multiples of eight, so that allocations seldom change."""
    return -(-min(candidates + candidates // 8, hidden_size) // 8) * 8


def _is_captured(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def _refuse_capture(weight: Tensor) -> None:
    if _is_captured(weight):
        raise RuntimeError(
            "norm: a CUDA graph is being captured and this norm's channels have not been counted yet; run it once "
            "before the capture, after any recount()"
        )


def _owner(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def _identity(tensor: Tensor) -> Hashable:
    """A view is made anew for each call where parameters lie in one flat buffer; the place that it shows is not."""
    base = tensor._base
    return id(tensor) if base is None else (id(base), tensor.storage_offset(), tensor.shape, tensor.stride())

"""Replays operations on fake tensors: a second call with the same sizes returns the recorded result without running.

Tempo's operations on a CPU run block by block. On fake tensors each block costs as much as a whole tensor would, and
of equal layers each one calls the same operations. What a call makes, and how much it has alive inside itself, depends
on the sizes of its tensors and on its numbers: the first call is run and recorded, the rest are replayed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tempo_kernels.opaque import Opaque
from tempo_megatron.memory.storages import PeakBytes

PLACES = ("key_low", "key_high", "sample", "first_head", "first_row")
"""Arguments of operations that say which random bits are drawn, not how many."""


@dataclasses.dataclass(frozen=True)
class _Call:
    """What a call did: its new tensors, and the bytes alive inside at most beyond those that were there."""

    results: list[tuple[torch.Size, tuple[int, ...], torch.dtype]]
    structure: Any
    rise: int


class Replay:
    """Runs functions under a PeakBytes, and replays the calls that it has recorded.

    Args:
        seen: counts the bytes; it must be entered when functions are called.
    """

    def __init__(self, seen: PeakBytes) -> None:
        self._seen = seen
        self._calls: dict[Hashable, _Call | None] = {}

    def call_operation(self, operation: Opaque, first: Tensor, *others: Any) -> Sequence[Tensor]:
        """The operation's own function, or what it told."""
        schema = getattr(torch.ops.tempo_kernels, operation.name).default._schema
        inputs = zip(schema.arguments, (first, *others), strict=True)
        sizes = (None if argument.name in PLACES else value for argument, value in inputs)
        found: Sequence[Tensor] = self.call((operation.name, *sizes), lambda: operation.call(first, *others))
        return found

    def call(self, key: Iterable[Any], function: Callable[[], Any]) -> Any:
        """What function returns; `key` names it and has everything on which sizes in it depend.

        A function that returns anything but new tensors, or leaves anything else behind, is run each time.
        """
        key = tuple(_describe(value) for value in key)
        call = self._calls.get(key)
        if call is None:
            start, known = self._seen.count_alive(), key in self._calls
            found, rise = self._seen.measure(function)
            if not known:
                self._calls[key] = self._note(found, rise, self._seen.count_alive() - start)
            return found
        self._seen.raise_peak(call.rise)
        results = [torch.empty_strided(size, stride, dtype=dtype) for size, stride, dtype in call.results]
        return tree_unflatten(results, call.structure)

    @staticmethod
    def _note(found: Any, rise: int, growth: int) -> _Call | None:
        tensors, structure = tree_flatten(found)
        if not all(isinstance(t, Tensor) and not t.requires_grad for t in tensors):
            return None
        results = [(t.shape, t.stride(), t.dtype) for t in tensors]
        # Storages of their own, each no larger than its tensor.
        if growth != sum(t.untyped_storage().nbytes() for t in tensors) or growth != sum(map(_count_bytes, tensors)):
            return None
        return _Call(results, structure, rise)


def _count_bytes(t: Tensor) -> int:
    """Of the smallest storage that holds it."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.element_size() if t.numel() else 0


def _describe(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.storage_offset() == 0
    return tuple(map(_describe, value)) if isinstance(value, (list, tuple)) else value

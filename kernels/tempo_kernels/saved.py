"""Reads and replaces what autograd keeps for backward, and says which outputs can be made again in its place.

An operation offers by `allow_refill` to make its output again; `recompute.drop` takes the offer. Torch counts the
writes to a tensor, even those that no graph sees, as under no_grad. An output that was written to differs from what its
operation would make, so `drop` refuses it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, cast

import torch
from torch import Tensor


class Refillable(Protocol):
    """The grad_fn of an output that can be made again: that of an autograd.Function which keeps inputs only and whose
    forward calls `allow_refill`."""

    refill: Callable[[Any, Tensor], None]
    """refill(grad_fn, out) makes `out`, of the output's shape, strides and dtype, hold the output once more."""

    version: int | None
    """The output's version when it was made; None where torch counts none."""

    saved_tensors: tuple[Tensor | None, ...]


def allow_refill(ctx: Any, y: Tensor, refill: Callable[[Any, Tensor], None]) -> None:
    """Lets the grad_fn of an autograd.Function make its output y again; called at the end of forward.

    Args:
        ctx: of the forward; becomes a `Refillable`.
        refill: see Refillable.
    """
    ctx.refill, ctx.version = refill, get_version(y)


def can_refill(y: Tensor) -> bool:
    """Whether `drop` can drop y: it has a graph, and `recompute` or an operation with keep="recompute" made it."""
    return hasattr(y.grad_fn, "refill")


def get_version(y: Tensor) -> int | None:
    """Returns how often y was written to; None for an inference tensor and under a compiler, which do not count it."""
    return None if torch.compiler.is_compiling() or y.is_inference() else y._version


def check_version(y: Tensor) -> None:
    """Raises ValueError if y, which its grad_fn can make again, was written to since."""
    producer = cast(Any, y.grad_fn)
    if producer.version not in (None, y._version):
        raise ValueError(
            f"y of shape {list(y.shape)} was written to in place after {producer.name()} made it, as by a forward hook "
            "under no_grad, and would be made again without that; expected it as it was made; let the hook return "
            "another tensor, or leave the operation to stock"
        )


class Kept:
    """The object that a pack hook returns in a tensor's place for others to replace it; the unpack hook calls `unpack`.

    Under other hooks (torch.utils.checkpoint, save_on_cpu) `drop` drops nothing: they decide what is kept.

    Args:
        use: what the tensor is for, in the error where it was written to since; without it nobody checks.
    """

    def __init__(self, tensor: Tensor, use: str | None = None) -> None:
        # Detached: a saved output that pointed back at its own node would never be freed.
        self.tensor: Tensor | None = tensor.detach()
        self._make: Callable[[], Tensor] | None = None
        self._use, self._version = use, get_version(tensor)

    def unpack(self) -> Tensor:
        """Returns the tensor, recomputed if it was dropped. Raises RuntimeError if it was written to since."""
        if self.tensor is None:
            assert self._make is not None
            return self._make()
        if self._use is not None and self._version not in (None, get_version(self.tensor)):
            raise RuntimeError(
                f"a tensor of shape {list(self.tensor.shape)}, {self._use}, was written to in place since it was used; "
                "expected it as it was; write to a copy, or leave Tempo's operation off there"
            )
        return self.tensor

    def replace(self, make: Callable[[], Tensor]) -> None:
        """Lets go of the tensor; `make` returns an equal one."""
        self.tensor, self._make = None, make


class KeepInput(torch.autograd.Function):
    """Returns x, in its memory, and keeps it for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


keeping: list[object] = []
"""The contexts under which a checkpoint keeps what attention makes, or gives it back; there it is an operator."""

_noted_by: list[Callable[[Kept], None]] = []


@contextlib.contextmanager
def follow_held(note: Callable[[Kept], None]) -> Iterator[None]:
    """Calls `note` inside the context with each tensor that an operation holds for its backward outside of the graph.
    `note` may replace it, then or later."""
    _noted_by.append(note)
    try:
        yield
    finally:
        _noted_by.remove(note)


def note_held(held: Kept) -> None:
    """Tells those who follow that an operation holds a tensor."""
    for note in _noted_by:
        note(held)


def find_nodes_since(number: int, outputs: Iterable[Tensor]) -> Iterator[Any]:
    """Yields the nodes of the graph of `outputs` that autograd has made since it gave one this sequence number."""
    pending, seen = [output.grad_fn for output in outputs], set[Any]()
    while pending:
        node = pending.pop()
        if node is None or node in seen or node._sequence_nr() < number:
            continue
        seen.add(node)
        yield node
        pending.extend(parent for parent, _ in node.next_functions)


def find_saved_tensors(node: Any) -> Iterator[tuple[Any, Tensor | Kept]]:
    """Yields (SavedTensor, the tensor or Kept in it) of a node, except those that other hooks keep."""
    for _, saved in _list_saved(node):
        for one in saved:
            held = one.data  # which skips the check for writes to the tensor; autograd makes it in backward
            if isinstance(held, Kept) or (isinstance(held, Tensor) and one.unpack_hook is None):
                yield one, held


def check_saved(node: Any) -> None:
    """Raises torch's RuntimeError if a tensor that a node keeps, by no hooks, was written to in place since."""
    for name, saved in _list_saved(node):
        if all(one.unpack_hook is None for one in saved):
            getattr(node, name)


def _list_saved(node: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yields (name of the attribute that gives tensors, their SavedTensors) of a node."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        yield "saved_tensors", cast(Any, node)._raw_saved_tensors
        return
    for name in _list_saved_names(cast(Any, type(node))):
        saved = getattr(node, name)
        yield name.removeprefix("_raw"), saved if isinstance(saved, tuple) else (saved,)


@functools.cache
def _list_saved_names(node_type: Any) -> list[str]:
    return [name for name in dir(node_type) if name.startswith("_raw_saved_")]

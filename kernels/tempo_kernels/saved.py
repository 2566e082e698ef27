"""Reads and replaces what autograd keeps for backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

# torch 2.6 does not say whether hooks keep a saved tensor.
CAN_ASK_FOR_HOOKS = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")


class Kept:
    """The object that a pack hook returns in a tensor's place for others to replace it; the unpack hook calls `unpack`.

    Under other hooks (torch.utils.checkpoint, save_on_cpu) `drop` drops nothing: they decide what is kept.
    """

    def __init__(self, tensor: Tensor) -> None:
        # Detached: a saved output that pointed back at its own node would never be freed.
        self.tensor: Tensor | None = tensor.detach()
        self._make: Callable[[], Tensor] | None = None

    def unpack(self) -> Tensor:
        """Returns the tensor, recomputed if it was dropped."""
        if self.tensor is not None:
            return self.tensor
        assert self._make is not None
        return self._make()

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
    is_python = isinstance(node, torch.autograd.function.BackwardCFunction)
    for name in ("_raw_saved_tensors",) if is_python else _list_saved_names(cast(Any, type(node))):
        saved = getattr(node, name)
        saved = saved if isinstance(saved, tuple) else (saved,)
        if CAN_ASK_FOR_HOOKS:
            # .data skips the check for writes to the tensor; autograd makes it in backward.
            kept = [one.data if one.unpack_hook is None or isinstance(one.data, Kept) else None for one in saved]
        else:
            value = node.saved_tensors if is_python else getattr(node, name.removeprefix("_raw"))
            kept = list(value) if isinstance(value, tuple) else [value]
        yield from ((one, held) for one, held in zip(saved, kept, strict=True) if isinstance(held, Tensor | Kept))


@functools.cache
def _list_saved_names(node_type: Any) -> list[str]:
    return [name for name in dir(node_type) if name.startswith("_raw_saved_")]


def check_saved(node: Any) -> None:
    """Raises torch's RuntimeError if a tensor that a node keeps, by no hooks, was written to in place since."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        if all(saved.unpack_hook is None for saved in cast(Any, node)._raw_saved_tensors):
            _ = node.saved_tensors
        return
    for name in _list_saved_names(cast(Any, type(node))):
        saved = getattr(node, name)
        if all(one.unpack_hook is None for one in (saved if isinstance(saved, tuple) else (saved,))):
            getattr(node, name.removeprefix("_raw"))

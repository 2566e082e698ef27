"""Who shares the memory of a tensor: asked before it is freed under them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def count_aliases(y: Tensor, outputs: tuple[Tensor, ...]) -> int:
    """How many holders of y's memory there are beside y itself and the operations between y and `outputs`.

    A holder is a tensor with the same storage, or whatever in C++ (an operation's saved tensor) holds y itself.
    Between means created after y, and reached from outputs by going back through the graph.
    """
    holders = _count_uses(y) - _uses_of_one_tensor()
    if holders == 0:
        return 0
    accounted, views = 0, set()
    for node in _nodes_between(y.grad_fn, outputs):
        for tensor in _saved_tensors(node):
            if tensor is y:
                accounted += 1
            elif tensor.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() and tensor._cdata not in views:
                views.add(tensor._cdata)
                accounted += 1 + (tensor._base is y)  # a view holds its base too
    return holders - accounted


def _count_uses(tensor: Any) -> int:
    return tensor._use_count() + torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@functools.cache
def _uses_of_one_tensor() -> int:
    """How many uses torch counts where there is one tensor and nobody else, the question itself included."""
    return _count_uses(torch.empty(1, requires_grad=True).clone())


def _nodes_between(producer: Any, outputs: tuple[Tensor, ...]) -> Iterator[Any]:
    """The nodes of the graph younger than producer that outputs come from."""
    pending, seen = [output.grad_fn for output in outputs], {producer}
    while pending:
        node = pending.pop()
        if node is None or node in seen or node._sequence_nr() < producer._sequence_nr():
            continue
        seen.add(node)
        yield node
        pending.extend(parent for parent, _ in node.next_functions)


def _saved_tensors(node: Any) -> Iterator[Tensor]:
    is_python = isinstance(node, torch.autograd.function.BackwardCFunction)
    names = () if is_python else _saved_names(type(node))  # type: ignore[arg-type]
    saved = node.saved_tensors if is_python else [getattr(node, name) for name in names]
    yield from (tensor for tensor in saved if isinstance(tensor, Tensor))


@functools.cache
def _saved_names(node_type: Any) -> list[str]:
    return [name for name in dir(node_type) if name.startswith("_saved_")]


def is_checkpointed() -> bool:
    """Whether this runs under torch.utils.checkpoint without reentrance, which keeps none of these tensors."""
    hooks = _saved_tensors_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def is_recorded() -> bool:
    """Whether somebody's hooks see what is kept; then saved tensors are stand-ins, and counting them says nothing."""
    return _saved_tensors_hooks() is not None


def _saved_tensors_hooks() -> tuple[Any, Any] | None:
    # torch 2.6 cannot be asked: there, what a checkpoint keeps for itself counts as an alias, and is refused.
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if hooks is None else hooks(True)

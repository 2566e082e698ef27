"""drop: in the graph, what the next operation keeps of y becomes a promise to make y again.

    y = recompute(function, x)            # or an operation of this package that keeps its input
    out = linear(y)                       # keeps y for its backward
    drop(y, after=out)                    # replaces y there by y's grad_fn, which can make y again
    del y                                 # nobody holds y: its memory is free ...
    out.backward(grad)                    # ... until the linear's backward asks for it

Ordinary reference counts free the memory. If somebody else holds y, it stays alive and stays right: nothing is saved,
and nothing is wrong. Only y's place in the nodes between y and `after` changes (SavedTensor.register_hooks). Hooks
around the linear (saved_tensors_hooks) would see its weight too, and would give autograd.Functions another object in
the weight's place, without the attributes that Megatron's linear looks for.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

# torch 2.6 does not say whether hooks keep a saved tensor.
_CAN_ASK_FOR_HOOKS = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")


class Refillable(Protocol):
    """The grad_fn of an output that can be made again: an autograd.Function that keeps inputs only."""

    refill: Callable[[Any, Tensor], None]
    """refill(grad_fn, out) makes `out`, of the output's shape, strides and dtype, hold the output once more."""

    saved_tensors: tuple[Tensor | None, ...]


class Kept:
    """What a pack hook returns in a tensor's place, so that `drop` works under it; the unpack hook calls `unpack`.

    Under other hooks (torch.utils.checkpoint, save_on_cpu) nothing is dropped: they decide what is kept.
    """

    def __init__(self, tensor: Tensor) -> None:
        # Detached: a saved output that pointed back at its own node would never be freed.
        self.tensor: Tensor | None = tensor.detach()
        self._make: Callable[[], Tensor] | None = None

    def unpack(self) -> Tensor:
        """The tensor, made again if it was dropped."""
        if self.tensor is not None:
            return self.tensor
        assert self._make is not None
        return self._make()

    def replace(self, make: Callable[[], Tensor]) -> None:
        """Let go of the tensor; `make` returns an equal one."""
        self.tensor, self._make = None, make


def can_refill(y: Tensor) -> bool:
    """Whether `drop` can drop y: `recompute` made it, or an operation with keep="input", and it has a graph."""
    return hasattr(y.grad_fn, "refill")


def drop(y: Tensor, *, after: Tensor | Sequence[Tensor]) -> None:
    """Let the operations between y and `after` keep y's grad_fn, which can make y again, in place of y.

    y's memory is free as soon as nobody else holds it: delete your own names for it. A view of y that an operation
    keeps (a linear flattens y) counts as y. Nothing happens where nothing is kept for backward (no_grad, eval), or
    where saved-tensor hooks keep it (a checkpointed region, whose activations go anyway; save_on_cpu). Derivatives of
    any order are those of a y that was kept, as far as the operation that made y has them.

    Args:
        y: the output of `recompute`, or of an operation with keep="input". A y that was written to has another grad_fn
            and is refused. A write under no_grad cannot be seen: y must not be written to before it was used.
        after: the result of the operation that used y, such as a linear's output, or the results of all operations
            that did. An operation whose result is not named keeps y.

    Costs: one more run of the operation in backward, shared by all operations that kept y, and microseconds of Python.
        A retained graph may run backward any number of times.
    Raises: ValueError where y cannot be made again.
    """
    if y.grad_fn is None or not torch.is_grad_enabled() or not (_CAN_ASK_FOR_HOOKS or _saves_without_hooks()):
        return
    if not can_refill(y):
        raise ValueError(
            f"y was made by {y.grad_fn.name()}, which cannot make it again; expected recompute(function, ...) or an "
            'operation with keep="input"; make y with one of them'
        )
    promise = _Promise(y)
    for node in _find_nodes_between(y.grad_fn, (after,) if isinstance(after, Tensor) else tuple(after)):
        for saved, kept in find_saved_tensors(node):
            tensor = kept.tensor if isinstance(kept, Kept) else kept
            if tensor is None or (part := promise.find_part(tensor)) is None:
                continue
            promise.num_users += 1
            if isinstance(kept, Kept):
                kept.replace(functools.partial(promise.make, part))
            else:
                saved.register_hooks(lambda _, part=part: part, promise.make)
    if promise.num_users > 1:
        promise.release_before_backward_of_y()


class _Part(NamedTuple):
    """A view of y: what as_strided needs, with the offset counted from y's own."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _Promise:
    """Makes y again, once for all its users in one backward."""

    def __init__(self, y: Tensor) -> None:
        self.num_users = 0
        self._producer = cast(Refillable, y.grad_fn)
        self._whole = _Part(y.size(), y.stride(), 0)
        self._num_elements = 1 + sum((size - 1) * stride for size, stride in zip(y.size(), y.stride(), strict=True))
        self._dtype, self._device, self._offset = y.dtype, y.device, y.storage_offset()
        self._storage = y.untyped_storage()._cdata if y.numel() else None
        self._shared: Tensor | None = None

    def find_part(self, tensor: Tensor) -> _Part | None:
        """The part of y that the tensor is; None where it is no part of y, or not only of y."""
        if tensor.untyped_storage()._cdata != self._storage or tensor.dtype != self._dtype:
            return None
        part = _Part(tensor.size(), tensor.stride(), tensor.storage_offset() - self._offset)
        last = part.offset + sum((size - 1) * stride for size, stride in zip(part.size, part.stride, strict=True))
        return part if tensor.numel() and part.offset >= 0 and last < self._num_elements else None

    @torch.no_grad()
    def make(self, part: _Part) -> Tensor:
        y = self._shared if self._shared is not None else self._refill()
        if self.num_users > 1 and is_about_to_run(self._producer):
            self._shared = y
        if part == self._whole:
            return y
        return y.as_strided(part.size, part.stride, y.storage_offset() + part.offset)

    def release_before_backward_of_y(self) -> None:
        """Let go of the shared y when its last user is through: then the gradient of y is complete."""
        reference = weakref.ref(self)  # the node lives as long as the promise, and must not hold it

        def release(_: Any) -> None:
            if (promise := reference()) is not None:
                promise._shared = None

        cast(Any, self._producer).register_prehook(release)

    def _refill(self) -> Tensor:
        kept = [tensor for tensor in self._producer.saved_tensors if tensor is not None]
        if any(tensor.numel() == 0 for tensor in kept if isinstance(tensor, torch.nn.Parameter)):
            raise RuntimeError(
                f"y of shape {list(self._whole.size)} cannot be made again: it was made with a parameter that ZeRO-3 "
                "has not gathered now; raise stage3_param_persistence_threshold to its size, or do not drop y"
            )
        # From a kept tensor, so that fake tensors make a fake one and meta tensors a meta one.
        out = kept[0].new_empty_strided(
            self._whole.size, self._whole.stride, dtype=self._dtype, device=self._device, requires_grad=False
        )
        self._producer.refill(self._producer, out)
        return out


def is_about_to_run(node: Any) -> bool:
    """Whether a backward runs now that will come to `node`."""
    return torch._C._current_graph_task_id() != -1 and torch._C._will_engine_execute_node(node)


def _find_nodes_between(producer: Any, outputs: tuple[Tensor, ...]) -> Iterator[Any]:
    """The nodes of the graph that lead from producer to outputs, those younger than producer."""
    pending, seen = [output.grad_fn for output in outputs], {producer}
    while pending:
        node = pending.pop()
        if node is None or node in seen or node._sequence_nr() < producer._sequence_nr():
            continue
        seen.add(node)
        yield node
        pending.extend(parent for parent, _ in node.next_functions)


def find_saved_tensors(node: Any) -> Iterator[tuple[Any, Tensor | Kept]]:
    """(SavedTensor, what it holds) of a node, without those that other hooks keep."""
    is_python = isinstance(node, torch.autograd.function.BackwardCFunction)
    for name in ("_raw_saved_tensors",) if is_python else _list_saved_names(cast(Any, type(node))):
        saved = getattr(node, name)
        saved = saved if isinstance(saved, tuple) else (saved,)
        if _CAN_ASK_FOR_HOOKS:
            # .data does not check whether the tensor was written to since: autograd does that, in backward.
            kept = [one.data if one.unpack_hook is None or isinstance(one.data, Kept) else None for one in saved]
        else:
            value = node.saved_tensors if is_python else getattr(node, name.removeprefix("_raw"))
            kept = list(value) if isinstance(value, tuple) else [value]
        yield from ((one, held) for one, held in zip(saved, kept, strict=True) if isinstance(held, Tensor | Kept))


@functools.cache
def _list_saved_names(node_type: Any) -> list[str]:
    return [name for name in dir(node_type) if name.startswith("_raw_saved_")]


def _saves_without_hooks() -> bool:
    """Whether autograd itself keeps what is saved now. Giving a saved tensor hooks shows it: under others it fails."""
    node: Any = torch.empty(0, dtype=torch.float32, requires_grad=True).square().grad_fn
    try:
        node._raw_saved_self.register_hooks(lambda tensor: tensor, lambda tensor: tensor)
    except RuntimeError:
        return False
    return True

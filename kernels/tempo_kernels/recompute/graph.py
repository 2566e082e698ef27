"""Defines `drop`: replaces y in the next operation's saved tensors by a promise to recompute y.

    y = recompute(function, x)            # or an operation of this package that keeps its input
    out = linear(y)                       # keeps y for its backward
    drop(y, after=out)                    # replaces y there by y's grad_fn, which can make y again
    del y                                 # nobody holds y: its memory is free ...
    out.backward(grad)                    # ... until the linear's backward asks for it

Reference counts free the memory. If somebody else holds y, y stays alive and correct; only its memory is not saved. The
change is limited to y's place in the nodes between y and `after` (SavedTensor.register_hooks). Hooks around the linear
(saved_tensors_hooks) would see its weight too, and autograd.Functions would get another object in the weight's place,
without the attributes that Megatron's linear looks for.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tempo_kernels.saved import (
    Kept,
    Refillable,
    can_refill,
    check_version,
    find_nodes_since,
    find_saved_tensors,
    note_held,
)


def drop(
    y: Tensor | Sequence[Tensor],
    *,
    after: Tensor | Sequence[Tensor],
    make: Callable[[], Sequence[Tensor]] | None = None,
    since: Tensor | None = None,
) -> None:
    """Makes the operations between y and `after` keep a promise to recompute y in place of y.

    y's memory is free as soon as nobody else holds it, so delete your own names for it. A view of y that an operation
    keeps (a linear flattens y) counts as y. Nothing happens if nothing is kept for backward (no_grad, eval), or if
    saved-tensor hooks keep it: in a checkpointed region, whose activations are freed anyway, and, with one warning,
    under save_on_cpu, offloading or other hooks, where y stays as well as the tensors from which it is made.
    Derivatives of any order are the same as if y was kept, as far as the operation that made y has them.

    Args:
        y: the output of `recompute`, or of an operation with keep="recompute", whose grad_fn can make it again; with
            `make` any tensors of the graph, such as a linear's output and tensors made from it, the earliest first. A
            y that was written to, as by a forward hook, is refused, because recomputing it would lose what was
            written. With `make` this goes unnoticed, so y must not be written to.
        after: the result of the operation that used y, such as a linear's output, or the results of all operations
            that did. An operation whose result is not named keeps y.
        make: runs under no_grad and returns new tensors like those of y, in order: with the same sizes, strides and
            offsets, in storages of the same size, shared where the originals share them.
        since: a tensor of the graph that was made before every operation that keeps y, and whose gradient is complete
            after their backwards; for a y with `make` that has no graph, such as indices.

    Costs: one more run of the operation in backward, shared by all operations that kept y, and microseconds of Python.
        A retained graph may run backward any number of times.
    Raises: ValueError where y cannot be made again, and where it was written to since it was made.
    """
    outputs = (y,) if isinstance(y, Tensor) else tuple(y)
    first = (outputs[0] if since is None else since).grad_fn
    if first is None or not torch.is_grad_enabled():
        return
    promise = _get_promise(outputs[0]) if make is None else _Promise(outputs, make, since)
    younger = find_nodes_since(first._sequence_nr(), (after,) if isinstance(after, Tensor) else after)
    is_found = False
    for node in (node for node in younger if node is not first):
        for saved, kept in find_saved_tensors(node):
            tensor = kept.tensor if isinstance(kept, Kept) else kept
            if tensor is None or (part := promise.find_part(tensor)) is None:
                continue
            if make is None:
                check_version(outputs[0])
            is_found = True
            make_part = promise.give(part)
            if isinstance(kept, Kept):
                kept.replace(make_part)
            else:
                saved.register_hooks(lambda _, make_part=make_part: make_part, lambda make_part: make_part())
    if not is_found:
        _warn_of_hooks()


def hold(y: Tensor) -> Callable[[], Tensor]:
    """Returns a function that gives y, without its graph, in backward: for a `make` of `drop` that needs y.

    The function holds y, unless y can be recomputed: then it shares the recomputation with `drop`. Call `hold` before
    `drop` drops y. Raises ValueError if a y that can be recomputed was written to. The function raises RuntimeError if
    a y that it holds was written to since.
    """
    if not can_refill(y):
        held = Kept(y, "from which a dropped tensor is made again")
        note_held(held)
        return held.unpack
    check_version(y)
    promise = _get_promise(y)
    whole = promise.find_part(y)
    if whole is None:  # y is empty
        return functools.partial(torch.empty_like, y.detach())
    return promise.give(whole)


class _Part(NamedTuple):
    """A view of one of the outputs: the arguments of as_strided, with the offset counted from the output's own."""

    output: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _Output:
    """A description of one output: its storage, and its place in it."""

    def __init__(self, y: Tensor, since: Tensor) -> None:
        self.producer = cast(Any, since.grad_fn)
        self.size, self.stride, self.dtype, self.device = y.size(), y.stride(), y.dtype, y.device
        self.offset, self.nbytes = y.storage_offset(), y.untyped_storage().nbytes()
        self.num_elements = 1 + sum((size - 1) * stride for size, stride in zip(y.size(), y.stride(), strict=True))
        self.storage = y.untyped_storage()._cdata if y.numel() else None
        self.num_users = 0
        self.shared: Tensor | None = None

    def is_made_like(self, y: Tensor) -> bool:
        """Whether y lies in its storage as the output did."""
        found = (y.size(), y.stride(), y.dtype, y.storage_offset(), y.untyped_storage().nbytes())
        return found == (self.size, self.stride, self.dtype, self.offset, self.nbytes)


class _Promise:
    """Makes tensors again, once for all their users in one backward.

    With `make` None there is one tensor, and its grad_fn makes it."""

    def __init__(
        self, outputs: Sequence[Tensor], make: Callable[[], Sequence[Tensor]] | None = None, since: Tensor | None = None
    ) -> None:
        self._outputs = [_Output(y, y if since is None else since) for y in outputs]
        self._make = make
        # One run of `make` serves all outputs, and every promise whose tensors are made from them.
        self._num_unshared = 1 if make is None else 0

    def find_part(self, tensor: Tensor) -> _Part | None:
        """Finds which part of which output the tensor is; None if it is no part, or not of exactly one."""
        storage, dtype = tensor.untyped_storage()._cdata, tensor.dtype
        for index, output in enumerate(self._outputs):
            if (storage, dtype) != (output.storage, output.dtype):
                continue
            # A view without elements, as of an expert without tokens, holds the storage too.
            part = _Part(index, tensor.size(), tensor.stride(), tensor.storage_offset() - output.offset)
            last = part.offset + sum((size - 1) * stride for size, stride in zip(part.size, part.stride, strict=True))
            # `make` restores the whole storage, a grad_fn its output only.
            if self._make is not None or (part.offset >= 0 and last < output.num_elements):
                return part
        return None

    def give(self, part: _Part) -> Callable[[], Tensor]:
        """Returns what makes a part, for one more user."""
        output = self._outputs[part.output]
        output.num_users += 1
        if output.num_users == self._num_unshared + 1:
            _release_before_backward(output)
        return functools.partial(self._make_part, part)

    @torch.no_grad()
    def _make_part(self, part: _Part) -> Tensor:
        output = self._outputs[part.output]
        y = output.shared if output.shared is not None else self._make_all()[part.output]
        if (part.size, part.stride, part.offset) == (output.size, output.stride, 0):
            return y
        return y.as_strided(part.size, part.stride, y.storage_offset() + part.offset)

    def _make_all(self) -> Sequence[Tensor]:
        if self._make is None:
            made: Sequence[Tensor] = (self._refill(),)
        else:
            made = self._make()
            assert all(output.is_made_like(y) for output, y in zip(self._outputs, made, strict=True))
        for output, y in zip(self._outputs, made, strict=True):
            if output.num_users > self._num_unshared and is_about_to_run(output.producer):
                output.shared = y
        return made

    def _refill(self) -> Tensor:
        (output,) = self._outputs
        producer = cast(Refillable, output.producer)
        kept = [tensor for tensor in producer.saved_tensors if tensor is not None]
        if any(tensor.numel() == 0 for tensor in kept if isinstance(tensor, torch.nn.Parameter)):
            raise RuntimeError(
                f"y of shape {list(output.size)} cannot be made again: it was made with a parameter that ZeRO-3 "
                "has not gathered now; raise stage3_param_persistence_threshold to its size, or do not drop y"
            )
        # Made from a kept tensor, so that fake tensors give a fake one and meta tensors a meta one.
        out = kept[0].new_empty_strided(
            output.size, output.stride, dtype=output.dtype, device=output.device, requires_grad=False
        )
        producer.refill(producer, out)
        return out


def _release_before_backward(output: _Output) -> None:
    """Lets go of a shared output after its last user, when its gradient is complete."""
    reference = weakref.ref(output)  # the promise holds the node, so the node must not hold the promise

    def release(_: Any) -> None:
        if (found := reference()) is not None:
            found.shared = None

    output.producer.register_prehook(release)


def _get_promise(y: Tensor) -> _Promise:
    """Returns the promise of y's grad_fn to recompute y, shared by all who drop or hold y; ValueError if it cannot."""
    producer = cast(Any, y.grad_fn)
    if not can_refill(y):
        raise ValueError(
            f"y was made by {producer.name()}, which cannot make it again; expected recompute(function, ...) or an "
            'operation with keep="recompute"; make y with one of them'
        )
    reference = getattr(producer, "promise", None)
    promise = reference() if reference is not None else None
    if promise is None:
        promise = _Promise((y,))
        producer.promise = weakref.ref(promise)  # weak: the promise holds the node
    return promise


def is_about_to_run(node: Any) -> bool:
    """Whether a backward is running that will reach `node`."""
    return torch._C._current_graph_task_id() != -1 and torch._C._will_engine_execute_node(node)


def _warn_of_hooks() -> None:
    """Warns once that nothing is dropped if hooks keep the tensors: neither a checkpoint's hooks nor those under which
    `drop` works."""
    hooks = cast(Any, torch._C._autograd)._top_saved_tensors_default_hooks(True)
    home = "" if hooks is None else str(getattr(hooks[1], "__module__", ""))
    if hooks is not None and not home.startswith(("torch.utils.checkpoint", "tempo_")):
        _warn_of_hooks_from(home)


@functools.cache
def _warn_of_hooks_from(home: str) -> None:
    warnings.warn(
        f"saved_tensors_hooks (of {home}) decide what is kept, and under them Tempo drops nothing: an operation that "
        "recomputes keeps its input and its output, as stock does, and results stay right. To keep less, leave the "
        "hooks out, or checkpoint the layers in place of them",
        RuntimeWarning,
        stacklevel=4,
    )

"""recompute and drop: the producer's autograd.Function, and the storage that goes and comes back.

    y = recompute(function, x)            # or an operation of this package that keeps its input
    out = linear(y)                       # keeps y for its backward
    drop(y, after=out)                    # y's memory is free from here ...
    out.backward(grad)                    # ... to here, where it is filled again before the linear's backward

Nothing is drawn anew and no state of a random generator is kept: the operation must be a function of its inputs. What
drop needs of a producer is an autograd.Function that keeps inputs only and whose ctx has `refill(ctx, out)`, which
writes the output into `out` once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tempo_kernels.recompute.aliases import count_aliases, is_checkpointed, is_recorded


def recompute(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """function(*inputs), keeping the inputs only: an output for `drop`, of any differentiable elementwise function.

    Args:
        function: deterministic; returns one new contiguous tensor.
        inputs: tensors and anything else.

    Returns:
        y, equal to function(*inputs).

    Keeps for backward: the input tensors. function runs once more in backward, for y and its derivative together.
    Raises: ValueError where y is not new, contiguous memory of its own; RuntimeError on a second derivative.
    """
    return _Recomputed.apply(function, *inputs)


def drop(y: Tensor, *, after: Tensor | Sequence[Tensor], is_private: bool = False) -> None:
    """Free y's memory until the backward of what used it.

    y must not be read again but by the backward of the operations between it and `after`. Where nothing is kept for
    backward (no_grad, eval, a checkpointed region, whose activations go anyway), nothing happens.

    Args:
        y: made by an operation that can refill it: `recompute`, or one with keep="input".
        after: the result of the operation that used y, such as a linear's output; all of them where several did.
        is_private: the caller vouches that nobody else will read y, and the memory's holders are not counted: for
            linears that gather y over a group, whose collectives may hold it a moment longer than they need it.

    Costs: one more run of the operation in backward, and microseconds of Python; refilled memory goes again as soon as
        the gradient of y is complete, so a retained graph may run backward any number of times.
    Raises: ValueError where y cannot be refilled, or where others share its memory and would read what is gone.
    """
    producer = y.grad_fn
    if producer is None or not torch.is_grad_enabled() or is_checkpointed():
        return
    if not hasattr(producer, "refill"):
        raise ValueError(
            f"y was made by {producer.name()}, which cannot make it again; make it by recompute(function, ...) or by "
            'an operation with keep="input"'
        )
    outputs = (after,) if isinstance(after, Tensor) else tuple(after)
    storage = y.untyped_storage()
    if storage.nbytes() == 0:
        return
    _check_owns_memory(y)
    if not is_private and not is_recorded():
        _check_is_not_shared(y, outputs)
    # Memory of the same storage with a version counter of its own: y's must not see that it is written to.
    memory = torch.empty(0, dtype=y.dtype, device=y.device).set_(storage, 0, y.shape, y.stride())
    num_bytes = storage.nbytes()

    def refill(_: Tensor) -> None:
        if storage.nbytes():
            return  # another of the outputs came first
        storage.resize_(num_bytes)
        try:
            with torch.no_grad():
                producer.refill(producer, memory)
        except BaseException:
            storage.resize_(0)
            raise

    def release(_: Tensor) -> None:
        storage.resize_(0)

    for output in outputs:
        if output.requires_grad:
            output.register_hook(refill)
    y.register_hook(release)
    storage.resize_(0)


def _check_owns_memory(y: Tensor) -> None:
    if not y.is_contiguous() or y.untyped_storage().nbytes() != y.numel() * y.element_size():
        raise ValueError(
            f"y of shape {list(y.shape)} is a part of a larger tensor or not contiguous; a contiguous tensor with "
            "memory of its own is wanted; drop what it is a view of, or nothing"
        )


def _check_is_not_shared(y: Tensor, outputs: tuple[Tensor, ...]) -> None:
    if any(output.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() for output in outputs):
        raise ValueError("`after` is y or a view of it, which would lose its memory too; give what was computed from y")
    if others := count_aliases(y, outputs):
        raise ValueError(
            f"y's memory is shared by {others} other tensor(s) or operation(s) not between y and `after`, which would "
            "read what is gone; name every result that used y in `after`, and keep no view of y"
        )


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        y = function(*inputs)
        pointers = {t.untyped_storage().data_ptr() for t in inputs if isinstance(t, Tensor)}
        if y.numel() and y.untyped_storage().data_ptr() in pointers:
            raise ValueError("function returns one of its inputs or a view of it; a new tensor is wanted")
        _check_owns_memory(y)
        ctx.function, ctx.refill, ctx.graph = function, _refill, None
        ctx.others = [None if isinstance(t, Tensor) else t for t in inputs]
        ctx.places = [place for place, t in enumerate(inputs) if isinstance(t, Tensor)]
        ctx.save_for_backward(*(inputs[place] for place in ctx.places))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        y, leaves = ctx.graph or _run(ctx)
        ctx.graph = None
        needed = [place for place in ctx.places if ctx.needs_input_grad[1 + place]]
        found = torch.autograd.grad(y, [leaves[place] for place in needed], grad_y, allow_unused=True)
        grads: list[Tensor | None] = [None] * (1 + len(leaves))
        for place, grad in zip(needed, found, strict=True):
            grads[1 + place] = grad
        return tuple(grads)


def _run(ctx: Any) -> tuple[Tensor, list[Any]]:
    """y once more, and the leaves of its graph."""
    leaves = list(ctx.others)
    for place, t in zip(ctx.places, ctx.saved_tensors, strict=True):
        leaves[place] = t.detach().requires_grad_(ctx.needs_input_grad[1 + place])
    with torch.enable_grad():
        return ctx.function(*leaves), leaves


def _refill(ctx: Any, out: Tensor) -> None:
    # The derivative follows soon: its graph is built here, so that function runs only once.
    ctx.graph = _run(ctx)
    out.copy_(ctx.graph[0])

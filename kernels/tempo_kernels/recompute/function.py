"""Defines `recompute`: turns a function into an operation that keeps its input and can make its output again; and
`adopt`, which does so with an output that is there already."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tempo_kernels.derivative import check_transforms, first_derivative_only
from tempo_kernels.recompute.graph import is_about_to_run
from tempo_kernels.saved import allow_refill, find_nodes_since


def recompute(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Returns function(*args, **kwargs) and keeps only the arguments; `drop` can drop the output.

    Args:
        function: returns one new tensor that depends on its arguments alone, and does not write to them.
        args, kwargs: tensors, also inside lists, tuples and dictionaries, and anything else.

    Returns:
        y, equal to function(*args, **kwargs).

    Keeps for backward: the tensors given. function runs once more in backward, for y and its derivative together, under
        the autocast of its first run.
    Error: none; y and every gradient are those of function itself.
    Raises: ValueError where function is a module with parameters or buffers, uses a tensor that needs a gradient and is
        not an argument, draws random numbers from torch's default generators, writes to its arguments, or returns
        anything but one new tensor; RuntimeError on a second derivative. Draws from another generator, or inside a fork
        that restores the default one, go unnoticed and differ in the second run.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    return _apply("recompute", None, function, args, kwargs)


def adopt(y: Tensor, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Returns y, which function(*args, **kwargs) has returned, as if `recompute` had made it: only the arguments are
    kept, and `drop` can drop it.

    For a function that others call. What y's own graph keeps is free once nobody holds the y given.

    Args:
        y: the result of function(*args, **kwargs), with its graph.
        function, args, kwargs: as for `recompute`, which checks them; `adopt` does not run the function, and so cannot.

    Returns:
        y, in the same memory.

    Keeps for backward: as `recompute`.
    Error: none; every gradient is that of function itself.
    Raises: ValueError where function is a module with parameters or buffers; RuntimeError on a second derivative.
    """
    return _apply("adopt", y, function, args, kwargs) if y.requires_grad else y


def _apply(name: str, made: Tensor | None, function: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
    """Returns `made`, or else function(*args, **kwargs), with the graph of a recomputed tensor."""
    if isinstance(function, torch.nn.Module) and [*function.parameters(), *function.buffers()]:
        raise ValueError(
            f"function is a {type(function).__name__} with parameters or buffers; expected one whose arguments are all "
            "its tensors; give torch.func.functional_call as the function, then the module, a dictionary of its "
            "parameters and buffers, and a tuple of its arguments"
        )
    call = Call(function, args, kwargs)
    tensors = call.take_tensors()
    check_transforms(name, tensors)
    call.made = made
    y: Tensor = _Recomputed.apply(call, *tensors)
    return y


class Call:
    """A call function(*args, **kwargs) without its tensors; `run` takes others in their place."""

    made: Tensor | None = None
    """The result of a first run by others, until forward takes it."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._function = function
        self._leaves, self._structure = pytree.tree_flatten((args, kwargs))
        self._places = [place for place, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        self._autocast: list[tuple[str, bool, torch.dtype]] = []

    def take_tensors(self) -> list[Tensor]:
        """Removes and returns the tensors among the arguments."""
        tensors = [self._leaves[place] for place in self._places]
        for place in self._places:
            self._leaves[place] = None
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted({tensor.device.type for tensor in tensors})
            if torch.amp.is_autocast_available(kind)
        ]
        return tensors

    def run(self, tensors: Sequence[Tensor], with_graph: bool = True) -> Any:
        """Runs function on these tensors and the other arguments under the first run's autocast."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(with_graph))
            for kind, is_on, dtype in self._autocast:
                if is_on or torch.is_autocast_enabled(kind):
                    # No cache: autocast would hold casts of these tensors, which are leaves here, until it ends.
                    autocast = torch.autocast(kind, dtype if is_on else None, enabled=is_on, cache_enabled=False)
                    stack.enter_context(autocast)
            return self._function(*args, **kwargs)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> Tensor:
        y, call.made = call.made, None
        if y is None:
            y = _run_first_time(call, _make_leaves(tensors, ctx.needs_input_grad[1:]))
        ctx.call, ctx.graph = call, None
        ctx.save_for_backward(*tensors)
        # .data has neither the graph of this first run nor its version counter.
        result = y.data
        allow_refill(ctx, result, _refill)
        if not y.requires_grad:
            ctx.mark_non_differentiable(result)
        return result

    @staticmethod
    @first_derivative_only("recompute")
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        y, leaves = ctx.graph or _run_again(ctx)
        ctx.graph = None
        needed = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(y, needed, grad_y, allow_unused=True))
        return None, *(next(found) if leaf.requires_grad else None for leaf in leaves)


def _make_leaves(tensors: Sequence[Tensor], needs_grad: Sequence[bool]) -> list[Tensor]:
    return [tensor.detach().requires_grad_(needed) for tensor, needed in zip(tensors, needs_grad, strict=True)]


def _run_first_time(call: Call, leaves: list[Tensor]) -> Tensor:
    """Returns y with its graph but without saved tensors.

    Raises ValueError if a second run would give another result, or a gradient would be lost.
    """
    versions = [leaf._version for leaf in leaves]
    states = read_random_states(leaves)
    with torch.autograd.graph.saved_tensors_hooks(lambda _: None, _refuse_to_unpack):
        y = call.run(leaves)
        if states != read_random_states(leaves):
            # Another thread may have drawn instead: only a second run tells.
            states = read_random_states(leaves)
            call.run(leaves)
            if states != read_random_states(leaves):
                raise ValueError(
                    "function draws random numbers, and would draw others in its second run; draw outside of it, and "
                    "pass what was drawn, such as a mask, as an argument"
                )
    if not isinstance(y, Tensor):
        raise ValueError(f"function returns {type(y).__name__}; expected one tensor; recompute its parts one by one")
    if versions != [leaf._version for leaf in leaves]:
        raise ValueError(
            "function writes to an argument, and would write again in its second run; expected a function that works "
            "out of place"
        )
    if y.numel() and any(y.untyped_storage()._cdata == leaf.untyped_storage()._cdata for leaf in leaves):
        raise ValueError(
            "function returns one of its arguments or a view of one; expected a new tensor; call it without recompute"
        )
    if (other := find_other_leaf(leaves, y)) is not None:
        raise ValueError(
            f"function uses a tensor of shape {list(other.shape)} that needs a gradient and is not an argument; "
            "pass it as an argument"
        )
    return y


def find_other_leaf(leaves: list[Tensor], y: Tensor) -> Tensor | None:
    """Finds a leaf of y's graph that is not among `leaves`; None if there is none."""
    own = {id(leaf) for leaf in leaves}
    found = (node.variable for node in find_nodes_since(0, (y,)) if type(node).__name__ == "AccumulateGrad")
    return next((leaf for leaf in found if id(leaf) not in own), None)


def _refuse_to_unpack(_: None) -> Tensor:
    raise RuntimeError("function differentiates inside itself, which recompute does not support; call it directly")


def read_random_states(tensors: Sequence[Tensor]) -> list[Any]:
    """Returns the states of torch's default generators, of the CPU and of the GPUs that hold these tensors, as what can
    be compared; none under fake tensors, which draw no numbers.
    """
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return []
    states: list[Any] = [torch.default_generator.get_state().numpy().tobytes()]
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        # A generator cannot be read while a graph is captured; the warm-up runs before the capture checked it.
        if not torch.cuda.is_current_stream_capturing():
            states.append(torch.cuda.default_generators[device.index].get_offset())
    return states


def _run_again(ctx: Any) -> tuple[Tensor, list[Tensor]]:
    leaves = _make_leaves(ctx.saved_tensors, ctx.needs_input_grad[1:])
    return ctx.call.run(leaves), leaves


def _refill(ctx: Any, out: Tensor) -> None:
    graph = ctx.graph or _run_again(ctx)
    if is_about_to_run(ctx):
        # Backward differentiates y soon: keep this graph for it, so that function runs only once more.
        ctx.graph = graph
    out.set_(graph[0].detach())  # type: ignore[arg-type]  # the stub knows storages only

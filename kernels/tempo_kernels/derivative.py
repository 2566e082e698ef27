"""Refuses the derivatives that no operation here has: vmap, torch.func's transforms, forward mode, and second ones; and
DTensors, whose memory has no address: a kernel would read from address 0.

torch's `once_differentiable` checks the incoming gradients only. Where they are constants, as in a gradient penalty, it
returns the first derivative as a constant, whose gradient is then silently 0.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

P = ParamSpec("P")
ResultT = TypeVar("ResultT")
Backward = Callable[..., Any]

_ORDINARY = frozenset((Tensor, torch.nn.Parameter, type(None), bool, int, float, str, tuple))
_transforms_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def takes_plain_tensors(operation: Callable[P, ResultT]) -> Callable[P, ResultT]:
    """Decorates a public operation to raise ValueError under vmap or a transform of torch.func, and if an argument has
    a tangent or is a DTensor. Under torch.compile torch's own errors stay."""

    @functools.wraps(operation)
    def call(*args: P.args, **kwargs: P.kwargs) -> ResultT:
        if not torch.compiler.is_compiling():
            given = (*args, *kwargs.values())
            check_transforms(operation.__name__, given)
            if not _ORDINARY.issuperset(map(type, given)):
                _refuse_dtensors(operation, args, kwargs)
        return operation(*args, **kwargs)

    return call


def check_transforms(name: str, given: Iterable[Any]) -> None:
    """Raises ValueError under vmap or a transform of torch.func, and if a tensor among `given` has a tangent; `name` is
    the operation's."""
    if _transforms_are_active():
        raise ValueError(
            f"{name} was called under vmap or a transform of torch.func, such as grad or jvp, and it has none of them; "
            "expected a plain call; give it the whole batch and differentiate by backward, or use torch's operation"
        )
    tensors = (value for value in given if isinstance(value, Tensor))
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise ValueError(
            f"{name} was given a tensor with a tangent, and it has no forward-mode derivative; expected tensors "
            "without; differentiate by backward, or use torch's operation"
        )


def first_derivative_only(
    operation: str | Callable[[Any], str], switch: str | None = None
) -> Callable[[Backward], Backward]:
    """Decorates the backward of an autograd.Function whose derivative must not be differentiated again.

    Args:
        operation: the name in the error, or a function that returns it for a ctx.
        switch: the name in TempoConfig of the switch that leaves the operation to stock Megatron, if there is one.

    The derivative stays connected to the incoming gradients and to the tensors that `save_for_backward` got. These must
    include an input or the output, or a second derivative goes unnoticed. It costs nothing under create_graph=False.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def differentiate(ctx: Any, *grads: Tensor | None) -> Any:
            if torch.is_grad_enabled():
                name = operation if isinstance(operation, str) else operation(ctx)
                return _FirstDerivative.apply((name, switch), backward, ctx, len(grads), *grads, *ctx.saved_tensors)
            try:
                return backward(ctx, *grads)
            except RuntimeError as error:
                _refuse_batched(operation if isinstance(operation, str) else operation(ctx), grads, error)
                raise

        return differentiate

    return decorate


class _FirstDerivative(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, names: tuple[str, str | None], backward: Backward, outer: Any, num_grads: int, *tensors: Tensor | None
    ) -> Any:
        ctx.names = names
        return backward(outer, *tensors[:num_grads])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        operation, switch = ctx.names
        in_megatron = f', in Megatron by setting tempo.{switch} to "off"' if switch else ""
        raise RuntimeError(
            f"{operation} is not twice differentiable, and a second derivative was asked for; use torch's operation "
            f"instead{in_megatron}"
        )


def _refuse_batched(name: str, grads: Iterable[Tensor | None], error: RuntimeError) -> None:
    """Raises ValueError if a backward failed with `error` and its gradients are batched. Some operations of torch
    inside a backward do not take batched gradients; where all do, the batched result is correct."""
    if any("Batched" in str(torch._C._dispatch_keys(grad)) for grad in grads if grad is not None):
        raise ValueError(
            f"the backward of {name} was given batched gradients (vmap, is_grads_batched, vectorize=True), which it "
            "does not take; expected one gradient; call backward for one after the other, or use torch's operation"
        ) from error


def _refuse_dtensors(operation: Callable[..., Any], args: Any, kwargs: Any) -> None:
    # Not imported here, which takes long: if there is a DTensor, somebody has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    for name, value in inspect.signature(operation).bind(*args, **kwargs).arguments.items():
        if module is not None and isinstance(value, module.DTensor):
            raise ValueError(
                f"{operation.__name__}: {name} is a DTensor; expected plain tensors; give each rank's part, "
                f"{name}.to_local(), and make a DTensor of the result with DTensor.from_local"
            )

"""Refuses vmap, torch.func's transforms, forward-mode differentiation and DTensors, which no operation here supports.

Torch itself refuses the first three in words about autograd.Function. It does not refuse a DTensor, whose memory has no
address: a kernel would read from address 0.
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

_ORDINARY = frozenset((Tensor, torch.nn.Parameter, type(None), bool, int, float, str, tuple))
_transforms_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def takes_plain_tensors(operation: Callable[P, ResultT]) -> Callable[P, ResultT]:
    """Decorates a public operation to raise ValueError under vmap or a transform of torch.func, and if an argument has
    a tangent or is a DTensor. Under torch.compile torch's own errors stay."""
    name = operation.__name__

    @functools.wraps(operation)
    def call(*args: P.args, **kwargs: P.kwargs) -> ResultT:
        if not torch.compiler.is_compiling():
            given = (*args, *kwargs.values())
            if _transforms_are_active() or forward_ad._current_level >= 0:
                check_transforms(name, given)
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
    if forward_ad._current_level >= 0 and any(map(_has_tangent, given)):
        raise ValueError(
            f"{name} was given a tensor with a tangent, and it has no forward-mode derivative; expected tensors "
            "without; differentiate by backward, or use torch's operation"
        )


def refuse_batched(name: str, grads: Iterable[Tensor | None], error: RuntimeError) -> None:
    """Raises ValueError if a backward failed with `error` and its gradients are batched. Some operations of torch
    inside a backward do not take batched gradients; where all do, the batched result is correct."""
    if any("Batched" in str(torch._C._dispatch_keys(grad)) for grad in grads if grad is not None):
        raise ValueError(
            f"the backward of {name} was given batched gradients (vmap, is_grads_batched, vectorize=True), which it "
            "does not take; expected one gradient; call backward for one after the other, or use torch's operation"
        ) from error


def _has_tangent(value: Any) -> bool:
    return isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None


def _refuse_dtensors(operation: Callable[..., Any], args: Any, kwargs: Any) -> None:
    # Not imported here, which takes long: if there is a DTensor, somebody has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    for name, value in inspect.signature(operation).bind(*args, **kwargs).arguments.items():
        if module is not None and isinstance(value, module.DTensor):
            raise ValueError(
                f"{operation.__name__}: {name} is a DTensor; expected plain tensors; give each rank's part, "
                f"{name}.to_local(), and make a DTensor of the result with DTensor.from_local"
            )

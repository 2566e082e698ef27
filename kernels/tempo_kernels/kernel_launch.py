"""Launches Triton kernels by plans: what launches of equal shapes, dtypes and flags share is computed once.

Triton's own launch costs the host tens of microseconds: it reads every argument to find the variant that it compiled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

PlanT = TypeVar("PlanT")

MULTIPROCESSORS = 132
"""Those of an H100, assumed where there is no GPU to ask."""
MAX_PLANS = 512
"""Plans kept per function that makes them; the least recently used go first."""

_caches: list[Any] = []


class Plan:
    """The arguments that launches of one kernel share.

    Args:
        grid: the numbers of programs.
        varying: the names of the numbers that differ from launch to launch. The kernel lists them in do_not_specialize,
            or Triton would compile it again for some of their values.
        named: all arguments but those and the pointers, which come first, and Triton's options.
    """

    def __init__(self, grid: tuple[int, ...], varying: Sequence[str] = (), /, **named: Any) -> None:
        self.grid, self.varying, self.named = grid, tuple(varying), named


def launch(kernel: Any, plan: Plan, tensors: Sequence[Any], numbers: Sequence[int] = ()) -> None:
    """Launches `kernel` on the device of the first tensor, which must not be None.

    Args:
        tensors: all of the kernel's pointers, in its order: tensors, None, or tuples of them.
        numbers: the values of plan.varying.
    """
    first = tensors[0]
    assert first is not None
    with guard_device(first):
        kernel[plan.grid](*tensors, **dict(zip(plan.varying, numbers, strict=True)), **plan.named)


def cache_plans(function: Callable[..., PlanT]) -> Callable[..., PlanT]:
    """Decorates a function that makes a plan from numbers, dtypes and flags: equal arguments return the same plan."""
    cached = functools.lru_cache(maxsize=MAX_PLANS, typed=True)(function)
    _caches.append(cached)
    return cached


def forget_plans() -> None:
    """Forgets all plans, for when something changed on which plans depend besides their arguments."""
    for cached in _caches:
        cached.cache_clear()


@functools.cache
def count_multiprocessors(device: torch.device) -> int:
    """Returns how many multiprocessors a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else MULTIPROCESSORS


def guard_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the tensor's GPU the current one, on which Triton launches; costs nothing if it already is."""
    device = tensor.get_device()
    is_current = device < 0 or device == torch.cuda.current_device()
    return contextlib.nullcontext() if is_current else torch.cuda.device(device)

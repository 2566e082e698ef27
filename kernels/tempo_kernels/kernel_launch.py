"""Launches of kernels at the price of reading their addresses.

Triton looks anew at every argument of every launch, to find the variant that it compiled for their types, alignments
and numbers: tens of microseconds, which a short kernel does not hide. Of the same arguments it makes the same choice.
A `Plan` holds what launches of equal shapes, dtypes and flags have in common. `launch` notes in it which variant Triton
chose, under all else that Triton tells apart, and launches that variant itself when the same comes again:

- of a tensor its dtype, its device, and its address modulo 16;
- of a varying number nothing, since it is in the kernel's do_not_specialize and has 32 bits.

Triton makes the first launch of each variant, every one with a wider number, every one while somebody has hooks on
launches (profilers do), and all under its interpreter. What is given up is what it looks at again in later launches:
its environment variables, the values of the kernel's global names, and whether the GPU can read an address, which the
tensor's device says already.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor
from triton.runtime import JITFunction, driver

# Before Triton 3.4 the hooks lie elsewhere and the launcher takes other arguments: there Triton makes every launch.
_KNOBS: Any = getattr(triton, "knobs", None)


PlanT = TypeVar("PlanT")

MULTIPROCESSORS = 132
"""Of an H100, where there is no GPU to ask."""
MAX_PLANS = 512
"""Of one function that makes plans. Of ever new shapes those are forgotten that were not used for longest; Triton still
knows what it compiled."""

_caches: list[Any] = []
_NO_GUARD = contextlib.nullcontext()


def cache_plans(function: Callable[..., PlanT]) -> Callable[..., PlanT]:
    """Decorates a function that makes plans of numbers, dtypes and flags: it is called once for each of them."""
    cached = functools.lru_cache(maxsize=MAX_PLANS, typed=True)(function)
    _caches.append(cached)
    return cached


def forget_plans() -> None:
    """Has all plans made anew, as after a change of what they are made from beside their arguments."""
    for cached in _caches:
        cached.cache_clear()


@functools.cache
def count_multiprocessors(device: torch.device) -> int:
    """Those of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else MULTIPROCESSORS


def guard_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context in which the tensor's GPU is the current one; it costs something only where another one is."""
    device = tensor.get_device()
    return _NO_GUARD if device < 0 or device == torch.cuda.current_device() else torch.cuda.device(device)


class Plan:
    """What launches of one kernel with equal shapes, dtypes and flags have in common.

    Args:
        grid: the numbers of programs.
        varying: the names of the numbers that each launch has of its own, all of them in do_not_specialize.
        named: all other arguments behind the kernel's pointers, which are its first ones; and Triton's options.
    """

    __slots__ = ("grid", "kernel", "named", "places", "values", "variants", "varying")

    def __init__(self, grid: tuple[int, ...], varying: Sequence[str] = (), **named: Any) -> None:
        self.grid, self.varying, self.named = grid, tuple(varying), named
        self.kernel: Any = None
        self.variants: dict[Any, Any] = {}
        self.values: list[Any] = []
        self.places: list[int] = []

    def note(self, kernel: Any, num_tensors: int, key: Any, compiled: Any) -> None:
        """Keeps the variant that Triton launched for `key`, and the arguments behind the pointers in their order."""
        if self.kernel is not kernel:
            names = kernel.arg_names
            assert all(parameter.do_not_specialize for parameter in kernel.params if parameter.name in self.varying)
            self.values = [self.named.get(name) for name in names[num_tensors:]]
            self.places = [names.index(name) for name in self.varying]
            assert not any(place < num_tensors for place in self.places)
            self.kernel, self.variants = kernel, {}
        self.variants[key] = compiled.run, *(*self.grid, 1, 1)[:3], compiled.function, compiled.packed_metadata


def launch(kernel: Any, plan: Plan, tensors: Sequence[Tensor | None], numbers: Sequence[int] = ()) -> None:
    """Launches `kernel` on the device of the first tensor, which must not be None.

    Args:
        tensors: all of the kernel's pointers, in its order.
        numbers: those that plan.varying names.
    """
    values: list[Any] = []
    key: list[Any] = []
    for tensor in tensors:
        if tensor is None:
            values.append(None)
            key.append(None)
        else:
            address = tensor.data_ptr()
            values.append(address)
            key += (tensor.dtype, tensor.get_device(), address & 15)
    found = tuple(key)
    variant = plan.variants.get(found) if plan.kernel is kernel and not _has_hooks(kernel) else None
    if variant is None or (numbers and not _have_32_bits(numbers)):
        _launch_by_triton(kernel, plan, tensors, numbers, found)
        return
    device, active = found[1], driver.active
    if device != active.get_current_device():
        with torch.cuda.device(device):
            launch(kernel, plan, tensors, numbers)
        return
    values += plan.values
    for place, number in zip(plan.places, numbers):  # noqa: B905 - it is asked for by name, and costs
        values[place] = number
    run, x, y, z, function, metadata = variant
    run(x, y, z, active.get_current_stream(device), function, metadata, None, None, None, *values)


def _launch_by_triton(
    kernel: Any, plan: Plan, tensors: Sequence[Tensor | None], numbers: Sequence[int], key: Any
) -> None:
    first = tensors[0]
    assert first is not None
    with torch.cuda.device_of(first):
        compiled = kernel[plan.grid](*tensors, **dict(zip(plan.varying, numbers, strict=True)), **plan.named)
    if type(kernel) is JITFunction and _KNOBS is not None and _have_32_bits(numbers):
        plan.note(kernel, len(tensors), key, compiled)


def _has_hooks(kernel: Any) -> bool:
    """Whether somebody wants to be called at every launch."""
    runtime = _KNOBS.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(kernel.pre_run_hooks or getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _have_32_bits(numbers: Sequence[int]) -> bool:
    return not numbers or (min(numbers) >= -0x80000000 and max(numbers) < 0x80000000)

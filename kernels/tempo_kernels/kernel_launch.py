"""Launches Triton kernels with little work for the host: the choice of a compiled variant is remembered.

Triton inspects every argument of every launch to find the variant that it compiled for these types, alignments and
numbers. This takes tens of microseconds, which a short kernel does not hide. Equal arguments lead to the same variant,
so a `Plan` holds what launches of equal shapes, dtypes and flags share, and `launch` remembers in it which variant
Triton chose. The key is everything else by which Triton tells variants apart:

- of a tensor its dtype, its device, and its address modulo 16; how it is described is the plan's;
- of a varying number nothing, because it is listed in the kernel's do_not_specialize and has 32 bits.

Triton itself makes the first launch of each variant, any launch with a wider number or with tensors of two devices, any
launch while launch hooks are set (profilers set them), and all launches under its interpreter. A remembered launch
skips three checks of Triton: its environment variables, the values of the kernel's global names, and whether the GPU
can read an address, which follows from the tensor's device. It also skips the method around Triton's launcher in C,
which allocates scratch memory for kernels that need some; those keep the method. And it encodes the descriptor of a
tensor once per address: the encoding takes about as long as all else of a launch, depends on nothing but the variant,
the layout and the address, and is copied into each launch. Memory that torch's allocator gives again and again has few
addresses.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor
from triton.runtime import JITFunction, driver

# Before Triton 3.4 the hooks lie elsewhere and the launcher takes other arguments, so Triton makes every launch.
_KNOBS: Any = getattr(triton, "knobs", None)


_IS_NEW = [int(part) for part in triton.__version__.split(".")[:2]] >= [3, 6]
HAS_DESCRIPTORS = _IS_NEW and os.environ.get("TEMPO_DESCRIPTORS") != "0"
"""Whether launches may describe tensors: older versions of Triton were not tried, the oldest have no descriptors."""
if _IS_NEW:
    from triton.tools.tensor_descriptor import TensorDescriptor

PlanT = TypeVar("PlanT")

MULTIPROCESSORS = 132
"""Those of an H100, assumed where there is no GPU to ask."""
MAX_PLANS = 512
"""Plans kept per function that makes them; the least recently used go first. Triton still has what it compiled."""
MAX_ENCODED = 1024
"""Encoded descriptors kept per variant of a plan, half a kilobyte each: two for each layer of a large model."""

_caches: list[Any] = []
_NO_GUARD = contextlib.nullcontext()


def cache_plans(function: Callable[..., PlanT]) -> Callable[..., PlanT]:
    """Decorates a function that makes a plan from numbers, dtypes and flags: equal arguments return the same plan."""
    cached = functools.lru_cache(maxsize=MAX_PLANS, typed=True)(function)
    _caches.append(cached)
    return cached


def forget_plans() -> None:
    """Forgets all plans, for when something changed that plans depend on beside their arguments."""
    for cached in _caches:
        cached.cache_clear()


@functools.cache
def count_multiprocessors(device: torch.device) -> int:
    """Returns how many multiprocessors a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else MULTIPROCESSORS


def guard_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the tensor's GPU the current one; costs nothing if it already is."""
    device = tensor.get_device()
    return _NO_GUARD if device < 0 or device == torch.cuda.current_device() else torch.cuda.device(device)


class Layout:
    """How a tensor descriptor sees a tensor from its first element on. The GPU copies a block of it to shared memory by
    one instruction (TMA), with zeros where the block reaches beyond the shape.

    Args:
        shape, strides, block_shape: in elements, for up to 5 dimensions. The last stride is 1; the others times the
            element's size are multiples of 16 bytes, and so is the tensor's address.
    """

    __slots__ = ("fields",)

    def __init__(self, shape: Sequence[int], strides: Sequence[int], block_shape: Sequence[int]) -> None:
        self.fields = {"shape": list(shape), "strides": list(strides), "block_shape": list(block_shape)}

    def describe(self, tensor: Tensor | None) -> Any:
        """Makes the descriptor that a launch takes in place of the tensor, in a third of the time of its constructor,
        which would check the layout each time."""
        described = object.__new__(TensorDescriptor)
        vars(described).update(self.fields, base=tensor)
        return described


class Plan:
    """The arguments that launches of one kernel with equal shapes, dtypes and flags share.

    Args:
        grid: the numbers of programs.
        varying: the names of the numbers that differ from launch to launch, all of them in do_not_specialize.
        layouts: of those among the kernel's pointers that are tensor descriptors, by place; kept from the last one on.
        named: all other arguments behind the kernel's pointers, which come first, and Triton's options.
    """

    __slots__ = ("grid", "kernel", "layouts", "named", "places", "values", "variants", "varying")

    def __init__(
        self,
        grid: tuple[int, ...],
        varying: Sequence[str] = (),
        layouts: Mapping[int, Layout] | None = None,
        /,
        **named: Any,
    ) -> None:
        self.grid, self.varying, self.named = grid, tuple(varying), named
        self.layouts = dict(sorted((layouts or {}).items(), reverse=True))
        self.kernel: Any = None
        self.variants: dict[Any, Any] = {}
        self.values: list[Any] = []
        self.places: list[int] = []

    def note(self, kernel: Any, num_tensors: int, key: Any, compiled: Any) -> None:
        """Remembers the variant that Triton launched for `key`, and the arguments behind the pointers in order."""
        if self.kernel is not kernel:
            names = kernel.arg_names
            assert all(parameter.do_not_specialize for parameter in kernel.params if parameter.name in self.varying)
            self.values = [self.named.get(name) for name in names[num_tensors:]]
            self.places = [names.index(name) for name in self.varying]
            assert not any(place < num_tensors for place in self.places)
            self.kernel, self.variants = kernel, {}
        self.variants[key] = _find_call(compiled, (*(*self.grid, 1, 1)[:3],), self.layouts)


class _Call(NamedTuple):
    """How a compiled variant is launched: launch(*before, stream, *between, *values), with the values in one tuple if
    is_packed."""

    launch: Callable[..., None]
    before: tuple[int, ...]
    """The grid."""
    between: tuple[Any, ...]
    is_packed: bool
    encode: Callable[[int, Tensor, int], Sequence[Any]] | None
    """Returns what takes the place of a described tensor, by its place, the tensor and its address; None where `launch`
    takes descriptors."""


def _find_call(compiled: Any, grid: tuple[int, ...], layouts: Mapping[int, Layout]) -> _Call:
    """Finds how to launch a variant, by what its launcher hands to the launcher in C for marked arguments."""
    run, stream, value = compiled.run, object(), object()
    between = (compiled.function, compiled.packed_metadata, None, None, None)
    handed: list[Any] = []
    scratch = [getattr(run, name, 0) for name in ("global_scratch_size", "profile_scratch_size", "gsan_enabled")]
    if not any(scratch) and hasattr(run, "launch"):
        marked = copy.copy(run)
        marked.launch = lambda *arguments: handed.extend(arguments)
        marked(*grid, stream, *between, value)
        if handed[:4] == [*grid, stream] and handed[-1] in (value, (value,)):
            between, is_packed = tuple(handed[4:-1]), handed[-1] is not value
            encode = _find_encoder(compiled, layouts)
            inner = run.launch if encode is None else _read_closure(run.launch)["launcher"]
            return _Call(inner, grid, between, is_packed, encode)
    return _Call(run, grid, between, False, None)


def _find_encoder(compiled: Any, layouts: Mapping[int, Layout]) -> Callable[[int, Tensor, int], Sequence[Any]] | None:
    """Returns the `encode` of a variant's _Call. Triton's launcher encodes descriptors in each launch, in a function
    around the launcher in C; this calls its part for one descriptor, and remembers the result."""
    formats = getattr(compiled.metadata, "tensordesc_meta", None)
    if not layouts or not formats or "launcher" not in _read_closure(compiled.run.launch):
        return None
    from triton.backends.nvidia.driver import make_tensordesc_arg

    format_by_place = dict(zip(sorted(layouts), formats, strict=True))
    more = (None,) * (len(inspect.signature(make_tensordesc_arg).parameters) - 2)  # newer ones take a third, for others
    encoded: OrderedDict[tuple[int, int], Sequence[Any]] = OrderedDict()

    def encode(place: int, tensor: Tensor, address: int) -> Sequence[Any]:
        found = encoded.get((place, address))
        if found is None:
            found = make_tensordesc_arg(layouts[place].describe(tensor), format_by_place[place], *more)
            encoded[place, address] = found
            if len(encoded) > MAX_ENCODED:
                encoded.popitem(last=False)
        return found

    return encode


def _read_closure(function: Any) -> Mapping[str, Any]:
    """Returns what a function in Python has of the one around it; a function in C has nothing."""
    return inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}


def launch(kernel: Any, plan: Plan, tensors: Sequence[Tensor | None], numbers: Sequence[int] = ()) -> None:
    """Launches `kernel` on the device of the first tensor, which must not be None.

    Args:
        tensors: all of the kernel's pointers, in its order.
        numbers: the values of plan.varying.
    """
    device = tensors[0].get_device()  # type: ignore[union-attr]
    values: list[Any] = []
    key: list[Any] = [device]
    bits, is_mixed = 0, False
    for tensor in tensors:
        if tensor is None:
            values.append(None)
            key.append(None)
        else:
            address = tensor.data_ptr()
            bits |= address
            values.append(address)
            key.append(tensor.dtype)
            if tensor.get_device() != device:
                is_mixed = True
    if bits & 15:
        key += [None if address is None else address & 15 for address in values]
    found = None if is_mixed else tuple(key)
    variant = plan.variants.get(found) if plan.kernel is kernel and not _has_hooks(kernel) else None
    if variant is None or not _have_32_bits(numbers):
        _launch_by_triton(kernel, plan, tensors, numbers, found)
        return
    # Triton's launcher uses the current device and its stream, so the tensors' device has to be the current one.
    active = driver.active
    if device != active.get_current_device():
        with torch.cuda.device(device):
            launch(kernel, plan, tensors, numbers)
        return
    inner, before, between, is_packed, encode = variant
    values += plan.values
    for place, number in zip(plan.places, numbers):  # noqa: B905 - strict= costs time
        values[place] = number
    if plan.layouts:
        # From the last one on, as an encoded descriptor takes several places.
        for place, layout in plan.layouts.items():
            if encode is None:
                values[place] = layout.describe(tensors[place])
            else:
                values[place : place + 1] = encode(place, tensors[place], values[place])
    stream = active.get_current_stream(device)
    if is_packed:
        inner(*before, stream, *between, tuple(values))
    else:
        inner(*before, stream, *between, *values)


def _launch_by_triton(
    kernel: Any, plan: Plan, tensors: Sequence[Tensor | None], numbers: Sequence[int], key: Any
) -> None:
    first = tensors[0]
    assert first is not None
    given: list[Any] = list(tensors)
    for place, layout in plan.layouts.items():
        given[place] = layout.describe(given[place])
    try:
        with torch.cuda.device_of(first):
            compiled = kernel[plan.grid](*given, **dict(zip(plan.varying, numbers, strict=True)), **plan.named)
    except Exception as error:
        if not plan.layouts:
            raise
        raise RuntimeError(
            f"{kernel.__name__}: the GPU or its driver takes no tensor descriptors ({error}); set TEMPO_DESCRIPTORS=0 "
            "in the environment to read by pointers"
        ) from error
    if type(kernel) is JITFunction and _KNOBS is not None and key is not None and _have_32_bits(numbers):
        plan.note(kernel, len(tensors), key, compiled)


def _has_hooks(kernel: Any) -> bool:
    """Whether a launch hook is set, which must see every launch."""
    runtime = _KNOBS.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(kernel.pre_run_hooks or getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _have_32_bits(numbers: Sequence[int]) -> bool:
    return not numbers or (min(numbers) >= -0x80000000 and max(numbers) < 0x80000000)

"""Makes functions opaque: torch.compile, fake tensors and autocast do not look into them.

In a compiled graph such a function is one node whose shapes are known beforehand. Nothing in it is traced: no size,
number or key is compiled in, and no branch on data breaks the graph. Fake and meta tensors get results of the same
shapes without any computation. With ordinary tensors the function is called directly, at no cost.

Autocast does not reach inside: the dtype of the inputs is that of the products, in forward and in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tempo_kernels.fakes import find_simulation

Function = Callable[..., Sequence[Tensor]]
ResultT = TypeVar("ResultT")

_WORD = 1 << 32


class Opaque:
    """A function into which the compiler does not look; `opaque` makes it."""

    def __init__(self, schema: str, function: Function, shapes: Function) -> None:
        name, signature = schema.split("(", 1)

        def call(*args: Any) -> list[Tensor]:
            return list(self.call(*args))

        self.name = name
        self._function = function
        self._operator = torch.library.custom_op(
            f"tempo_kernels::{name}", call, mutates_args=(), schema=f"({signature}"
        )
        self._operator.register_fake(shapes)

    def call(self, first: Tensor, *others: Any, **more: Any) -> Sequence[Tensor]:
        """Calls the function itself, whatever `first` is. `more` may hold arguments that an operator cannot take."""
        if _is_autocast(first):
            with without_autocast(first.device.type):
                return self._function(first, *others, **more)
        return self._function(first, *others, **more)

    def trace(self, first: Tensor, *others: Any) -> Sequence[Tensor]:
        """Calls the operator: in a graph it becomes a node, with fake tensors it returns empty results."""
        results: Sequence[Tensor] = self._operator(first, *others)
        return results

    def __call__(self, first: Tensor, *others: Any) -> Sequence[Tensor]:
        """Calls the function, as an operator if `first` is traced."""
        if is_traced(first):
            simulation = find_simulation(first)
            return self.trace(first, *others) if simulation is None else simulation(self, first, *others)
        return self.call(first, *others) if _is_autocast(first) else self._function(first, *others)


def _is_autocast(tensor: Tensor) -> bool:
    # Asking about all devices first is ten times cheaper than asking about this one.
    return torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(tensor.device.type)


def call_untraced(function: Callable[..., ResultT], first: Tensor, *others: Any) -> ResultT:
    """Returns function(*others), called as an opaque function is where nothing traces `first`, but without packing the
    arguments into an operator's operands."""
    if _is_autocast(first):
        with without_autocast(first.device.type):
            return function(*others)
    return function(*others)


def is_traced(tensor: Tensor) -> bool:
    """Whether torch.compile traces this call, or the tensor is fake or meta."""
    return torch.compiler.is_compiling() or isinstance(tensor, FakeTensor) or tensor.is_meta


def opaque(schema: str, shapes: Function) -> Callable[[Function], Opaque]:
    """Decorates a function of tensors and numbers that returns a sequence of new tensors.

    Args:
        schema: name, arguments and results, as torch.library writes them; the first argument is a tensor.
        shapes: takes the same arguments and returns empty tensors of the results' shapes and dtypes.
    """
    return lambda function: Opaque(schema, function, shapes)


def separate(*tensors: Tensor | None) -> list[Tensor | None]:
    """Returns the tensors, under torch.compile as distinct objects: it refuses an autograd.Function that is given the
    same object twice, as in attention(x, x, x)."""
    if not torch.compiler.is_compiling():
        return list(tensors)
    return [None if t is None else t.view_as(t) for t in tensors]


def without_autocast(device_type: str) -> torch.autocast:
    """Returns a context in which no operation casts its inputs."""
    return torch.autocast(device_type, enabled=False)


def split_key(key: int | Tensor | None) -> tuple[int, int]:
    """Splits a key, signed or not, into its low and high 32 bits, because an operator's numbers have only 63 bits.
    Returns (0, 0) for a tensor, which the operator takes separately."""
    if key is None or isinstance(key, Tensor):
        return 0, 0
    return key % _WORD, key // _WORD % _WORD


def join_key(low: int, high: int) -> int:
    """Returns the key that has these words."""
    return low | high << 32

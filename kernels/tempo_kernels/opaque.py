"""Makes functions opaque: torch.compile, fake tensors and autocast do not look into them.

In a compiled graph such a function is one node whose shapes are known beforehand: no size, number or key is compiled
in, and no branch on data breaks the graph. Fake and meta tensors get results of the same shapes without any
computation; a program that counts memory on fake tensors passes to `simulate` what runs instead. With ordinary tensors
the function is called directly. Autocast does not reach inside: the inputs' dtype is the products', in both directions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Function = Callable[..., Sequence[Tensor]]
ResultT = TypeVar("ResultT")
RoundT = TypeVar("RoundT")

NUM_ROUNDS = 3
"""The rounds that a loop over fake blocks runs: the first, one that represents all others, and the last."""

_simulation: Callable[..., Any] | None = None
_block_sizes: dict[str, int] = {}
_WORD = 1 << 32


class Opaque:
    """A function into which the compiler does not look; `opaque` makes it."""

    def __init__(self, schema: str, function: Function, shapes: Function) -> None:
        self.name, signature = schema.split("(", 1)
        self._function = function
        self._operator = torch.library.custom_op(
            f"tempo_kernels::{self.name}", lambda *args: list(self.call(*args)), mutates_args=(), schema=f"({signature}"
        )
        self._operator.register_fake(shapes)

    def call(self, first: Tensor, *others: Any, **more: Any) -> Sequence[Tensor]:
        """Calls the function itself, whatever `first` is, without the autocast of its device. `more` may hold arguments
        that an operator cannot take."""
        device_type = first.device.type
        if torch.is_autocast_enabled(device_type):
            with torch.autocast(device_type, enabled=False):
                return self._function(first, *others, **more)
        return self._function(first, *others, **more)

    def trace(self, first: Tensor, *others: Any) -> Sequence[Tensor]:
        """Calls the operator: in a graph it becomes a node, with fake tensors it returns empty results."""
        results: Sequence[Tensor] = self._operator(first, *others)
        return results

    def __call__(self, first: Tensor, *others: Any) -> Sequence[Tensor]:
        """Calls the function, as an operator if `first` is traced."""
        if not is_traced(first):
            return self.call(first, *others)
        if _simulation is None or not isinstance(first, FakeTensor):
            return self.trace(first, *others)
        results: Sequence[Tensor] = _simulation(self, first, *others)
        return results


def opaque(schema: str, shapes: Function) -> Callable[[Function], Opaque]:
    """Decorates a function of tensors and numbers that returns a sequence of new tensors.

    Args:
        schema: name, arguments and results, as torch.library writes them; the first argument is a tensor.
        shapes: takes the same arguments and returns empty tensors of the results' shapes and dtypes.
    """
    return lambda function: Opaque(schema, function, shapes)


def is_traced(tensor: Tensor) -> bool:
    """Whether torch.compile traces this call, or the tensor is fake or meta."""
    return torch.compiler.is_compiling() or isinstance(tensor, FakeTensor) or tensor.is_meta


def is_recorded() -> bool:
    """Whether make_fx or torch.compile records the operations that are called: a loop over blocks of a tensor would be
    recorded block by block."""
    is_traced_by_make_fx = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    return torch.compiler.is_compiling() or is_traced_by_make_fx


def separate(*tensors: Tensor | None) -> list[Tensor | None]:
    """Returns the tensors, under torch.compile as distinct objects: it refuses an autograd.Function that is given the
    same object twice, as in attention(x, x, x)."""
    if not torch.compiler.is_compiling():
        return list(tensors)
    return [None if t is None else t.view_as(t) for t in tensors]


def split_draw(
    key: int | Tensor, first_sample: int | Tensor
) -> tuple[tuple[int, int, int], tuple[Tensor | None, Tensor | None]]:
    """Splits what a mask is drawn by into an operator's numbers, which have only 63 bits, and its tensors: the low and
    the high 32 bits of a key, signed or not, and the first sample, 0 for tensors; and both where they are tensors."""
    key_tensor, sample_tensor = (t if isinstance(t, Tensor) else None for t in (key, first_sample))
    key, first_sample = (0 if isinstance(n, Tensor) else n for n in (key, first_sample))
    return (key % _WORD, key // _WORD % _WORD, first_sample), (key_tensor, sample_tensor)


def join_draw(
    low: int, high: int, number: int, key: Tensor | None, first_sample: Tensor | None
) -> tuple[int | Tensor, int | Tensor]:
    """Returns the key and the first sample that `split_draw` split."""
    return low | high << 32 if key is None else key, number if first_sample is None else first_sample


@contextlib.contextmanager
def simulate(run: Callable[..., Any]) -> Iterator[None]:
    """Replaces calls of `function` with fake tensors inside the context by run(function, *inputs, **numbers), where
    `function` is an Opaque operation or was given to `run_or_simulate`."""
    global _simulation
    before, _simulation = _simulation, run
    try:
        yield
    finally:
        _simulation = before


def run_or_simulate(function: Callable[..., ResultT], first: Tensor, *others: Any, **numbers: Any) -> ResultT:
    """Returns function(first, *others, **numbers), or, if `first` is fake, what the innermost `simulate` returns
    instead. No size depends on `numbers`."""
    if _simulation is None or not isinstance(first, FakeTensor):
        return function(first, *others, **numbers)
    result: ResultT = _simulation(function, first, *others, **numbers)
    return result


@contextlib.contextmanager
def use_blocks(**sizes: int) -> Iterator[None]:
    """Sets sizes of blocks inside the context, by name.

    `attention`, `norm` and `linear_cross_entropy` are the elements of a block of that operation; `attention_rows` is
    the smallest number of queries in one.
    """
    global _block_sizes
    before, _block_sizes = _block_sizes, {**_block_sizes, **sizes}
    try:
        yield
    finally:
        _block_sizes = before


def get_block_size(name: str, own: int) -> int:
    """Returns the size that `use_blocks` has set, else `own`."""
    return _block_sizes.get(name, own)


def cut(size: int, step: int) -> list[slice]:
    """Returns the slices, of `step` each but for the last, that make up `size`."""
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def skip_alike(rounds: Sequence[RoundT], x: Tensor) -> Sequence[RoundT]:
    """Returns the rounds of a loop over blocks of x, or, if x is fake, only the first two and the last: the rounds
    between make and free what the second one does."""
    if len(rounds) <= NUM_ROUNDS or not isinstance(x, FakeTensor):
        return rounds
    return [*rounds[: NUM_ROUNDS - 1], rounds[-1]]

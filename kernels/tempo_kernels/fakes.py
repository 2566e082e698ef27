"""Decides what operations do with fake tensors, which have sizes but no numbers.

By default nothing runs, and results have the right sizes. A program that counts memory on fake tensors passes to
`simulate` the function that runs instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

ResultT = TypeVar("ResultT")
RoundT = TypeVar("RoundT")

NUM_ROUNDS = 3
"""The rounds that a loop over fake blocks runs: the first, one that represents all others, and the last."""

_simulation: Callable[..., Any] | None = None


@contextlib.contextmanager
def simulate(run: Callable[..., Any]) -> Iterator[None]:
    """Replaces calls of `function` with fake tensors inside the context by run(function, *inputs, **numbers).

    `function` is an Opaque operation, or was given to `run_or_simulate`.
    """
    global _simulation
    before, _simulation = _simulation, run
    try:
        yield
    finally:
        _simulation = before


def find_simulation(x: Tensor) -> Callable[..., Any] | None:
    """Returns the function that replaces calls with x: that of the innermost `simulate` if x is fake, else None."""
    return _simulation if _simulation is not None and isinstance(x, FakeTensor) else None


def run_or_simulate(function: Callable[..., ResultT], first: Tensor, *others: Any, **numbers: Any) -> ResultT:
    """Returns function(first, *others, **numbers), or, if `first` is fake, what a simulation returns instead. No size
    depends on `numbers`."""
    simulation = find_simulation(first)
    if simulation is None:
        return function(first, *others, **numbers)
    found: ResultT = simulation(function, first, *others, **numbers)
    return found


def skip_alike(rounds: Sequence[RoundT], x: Tensor) -> Sequence[RoundT]:
    """Returns the rounds of a loop over blocks of x, or, if x is fake, only the first two and the last: the rounds
    between make and free what the second one does."""
    if len(rounds) <= NUM_ROUNDS or not isinstance(x, FakeTensor):
        return rounds
    return [*rounds[: NUM_ROUNDS - 1], rounds[-1]]

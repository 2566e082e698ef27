"""What operations do with fake tensors, which have sizes and no numbers.

By default nothing: results have the right sizes, and nothing runs. Whoever counts memory on fake tensors says in
`simulate` what runs instead.
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
"""Of a loop over fake blocks: the first round, one that stands for all after it, and the last."""

_simulation: Callable[..., Any] | None = None


@contextlib.contextmanager
def simulate(run: Callable[..., Any]) -> Iterator[None]:
    """Inside, run(function, *inputs, **numbers) stands in for a call of `function` with fake tensors.

    `function` is an Opaque operation, or was given to `run_or_simulate`.
    """
    global _simulation
    before, _simulation = _simulation, run
    try:
        yield
    finally:
        _simulation = before


def find_simulation(x: Tensor) -> Callable[..., Any] | None:
    """What stands in for calls with x: the innermost `simulate`'s function where x is fake, else None."""
    return _simulation if _simulation is not None and isinstance(x, FakeTensor) else None


def run_or_simulate(function: Callable[..., ResultT], first: Tensor, *others: Any, **numbers: Any) -> ResultT:
    """function(first, *others, **numbers); where `first` is fake, what a simulation does instead. No size depends on
    `numbers`."""
    simulation = find_simulation(first)
    if simulation is None:
        return function(first, *others, **numbers)
    found: ResultT = simulation(function, first, *others, **numbers)
    return found


def skip_alike(rounds: Sequence[RoundT], x: Tensor) -> Sequence[RoundT]:
    """The rounds of a loop over blocks of x; where x is fake, only the first two and the last one. Those between make
    and free what the second one does."""
    if len(rounds) <= NUM_ROUNDS or not isinstance(x, FakeTensor):
        return rounds
    return [*rounds[: NUM_ROUNDS - 1], rounds[-1]]

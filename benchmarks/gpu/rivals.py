"""Functions that compute the same thing from inputs of their own, one after the other, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpu import timing


class Rival(NamedTuple):
    name: str
    function: Callable[..., Tensor]
    tensors: Sequence[Tensor]
    """Its inputs, of which all want a gradient."""
    grad: Tensor
    """Of its output."""

    def step(self) -> list[Tensor]:
        """The gradients of one forward and backward."""
        leaves = [t.detach().requires_grad_() for t in self.tensors]
        return list(torch.autograd.grad(self.function(*leaves), leaves, self.grad))


def times(compared: Sequence[Rival], clock: Any) -> tuple[dict[str, float], dict[str, str]]:
    """Milliseconds of those that run, and of the others why they do not."""
    left_out = {}
    for one in compared:
        try:
            one.step()
        except (RuntimeError, ImportError, LookupError, TypeError) as error:
            left_out[one.name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    passes = [timing.Pass(one.name, one.step, 1) for one in compared if one.name not in left_out]
    return {name: found.ms for name, found in timing.measure(passes, clock).items()}, left_out


def peak_bytes(one: Rival) -> int:
    """What a step allocates at its highest, its gradients included; 0 where torch does not count."""
    if one.tensors[0].device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    one.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before

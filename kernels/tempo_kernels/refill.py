"""The protocol by which an operation tells `recompute.drop` how to make its output again.

Torch counts the writes to a tensor, even those that no graph sees, as under no_grad. An output that was written to
differs from what its operation would make, so `drop` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor


class Refillable(Protocol):
    """The grad_fn of an output that can be made again: that of an autograd.Function which keeps inputs only and whose
    forward calls `allow_refill`."""

    refill: Callable[[Any, Tensor], None]
    """refill(grad_fn, out) makes `out`, of the output's shape, strides and dtype, hold the output once more."""

    version: int | None
    """The output's version when it was made; None where torch counts none."""

    saved_tensors: tuple[Tensor | None, ...]


def allow_refill(ctx: Any, y: Tensor, refill: Callable[[Any, Tensor], None]) -> None:
    """Lets the grad_fn of an autograd.Function make its output y again; called at the end of forward.

    Args:
        ctx: of the forward; becomes a `Refillable`.
        refill: see Refillable.
    """
    ctx.refill, ctx.version = refill, find_version(y)


def find_version(y: Tensor) -> int | None:
    """Returns how often y was written to; None for an inference tensor and under a compiler, which do not count it."""
    return None if torch.compiler.is_compiling() or y.is_inference() else y._version


def can_refill(y: Tensor) -> bool:
    """Whether `drop` can drop y: it has a graph, and `recompute` or an operation with keep="input" made it."""
    return hasattr(y.grad_fn, "refill")


def check_version(y: Tensor) -> None:
    """Raises ValueError if y, which its grad_fn can make again, was written to since."""
    producer = cast(Any, y.grad_fn)
    if producer.version not in (None, y._version):
        raise ValueError(
            f"y of shape {list(y.shape)} was written to in place after {producer.name()} made it, as by a forward hook "
            "under no_grad, and would be made again without that; expected it as it was made; let the hook return "
            "another tensor, or leave the operation to stock"
        )

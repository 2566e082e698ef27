"""Stands in for a kernel: makes what it makes, keeps what it keeps for backward, and makes its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Made = tuple[Any, Sequence[Tensor]]
"""A kernel's result, or several, and what it keeps."""


def stand_in(
    make: Callable[..., Made],
    *inputs: Tensor,
    differentiate: Callable[..., Sequence[Tensor]] | None = None,
) -> Any:
    """What `make` returns of the inputs without what is kept, on autograd's graph.

    Args:
        make: called with the inputs.
        inputs: with a gradient each.
        differentiate: called with the kept tensors and the gradients of the results, returns those of the inputs; None
            makes new tensors. It must hold no tensor, which would be kept.
    """
    return _StandIn.apply(make, differentiate, *inputs)


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[..., Made], differentiate: Any, *inputs: Tensor) -> Any:
        result, kept = make(*inputs)
        ctx.save_for_backward(*kept)
        ctx.differentiate, ctx.sizes = differentiate, [(x.shape, x.dtype) for x in inputs]
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        if ctx.differentiate is not None:
            return (None, None, *ctx.differentiate(kept, *grads))
        return (None, None, *(torch.empty(shape, dtype=dtype) for shape, dtype in ctx.sizes))

"""Replaces linears by ones that do not keep an input that can be recomputed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tempo_kernels.recompute import can_refill, drop, find_saved_tensors, hold
from tempo_torch.replace import Replaced


class DropsInput(Replaced):
    """nn.Linear, or transformers' Conv1D, that keeps a promise in place of an input that Tempo can recompute. Such an
    input is the output of Tempo's activation, norm, dropout or attention, or a product of one and another tensor, as in
    a gated MLP. Any other input it keeps as before."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the stock linear returns."""
        # Not in forward, because hooks, such as ZeRO-3's, wrap the input that forward sees.
        out = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if args and not torch.compiler.is_compiling() and isinstance(out, Tensor):
            drop_input(args[0], out)
        return out


def is_linear(module: Any) -> bool:
    """Returns whether a module is one that `DropsInput` replaces."""
    kind = type(module)
    return kind is nn.Linear or (kind.__name__, kind.__module__) == ("Conv1D", "transformers.pytorch_utils")


def can_be_made(x: Tensor) -> bool:
    """Returns whether x, or the tensor that it is a view of, can be recomputed."""
    return _get_source(x) is not None or _get_factors(x) is not None


def drop_input(x: Any, out: Tensor) -> None:
    """Makes the operation that computed `out` from x keep a promise in place of x, if `can_be_made(x)`."""
    if not isinstance(x, Tensor) or out.grad_fn is None:
        return
    if (source := _get_source(x)) is not None:
        drop(source, after=out)
    elif (factors := _get_factors(x)) is not None:
        first, second = map(hold, factors)
        drop(x, after=out, make=lambda: (first() * second(),))
        for factor in factors:
            if can_refill(factor):
                drop(factor, after=x)


def _get_source(x: Tensor) -> Tensor | None:
    return next((y for y in (x, getattr(x, "_base", None)) if isinstance(y, Tensor) and can_refill(y)), None)


def _get_factors(x: Tensor) -> list[Tensor] | None:
    """Returns the factors of a product of which one can be recomputed, such as silu(gate) and up."""
    if x.grad_fn is None or x.grad_fn.name() != "MulBackward0" or not torch.is_grad_enabled():
        return None
    factors = [kept for _, kept in find_saved_tensors(x.grad_fn) if isinstance(kept, Tensor)]
    same = [t for t in factors if (t.shape, t.dtype) == (x.shape, x.dtype)]
    # A product that was written to since is not the product of its factors any more.
    is_product = x.is_contiguous() and x._version == 0
    return same if len(same) == 2 and any(map(can_refill, same)) and is_product else None

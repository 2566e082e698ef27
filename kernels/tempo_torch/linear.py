"""Linears that do not keep an input that can be made again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tempo_kernels.recompute import can_refill, drop
from tempo_torch.replace import Replaced


class DropsInput(Replaced):
    """nn.Linear, or Conv1D of transformers, that keeps a promise in place of an input that an activation, a norm, a
    dropout or an attention of Tempo can make again; every other input it keeps as before."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the linear returns."""
        # Not in forward: hooks, as of ZeRO-3, wrap the input that forward sees.
        out = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if args and not torch.compiler.is_compiling() and isinstance(out, Tensor):
            drop_source(args[0], out)
        return out


def drop_source(x: Any, out: Tensor) -> None:
    """Let what made `out` of x keep a promise in place of x, where x, or what x is a view of, can be made again."""
    for y in (x, getattr(x, "_base", None)):
        if isinstance(y, Tensor) and can_refill(y):
            drop(y, after=out)
            return

"""What describes an operation: its inputs, the fewest bytes it must move, its forms, and who else computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

VECTORS = ("bias", "weight", "norm_bias")


class Sizes(NamedTuple):
    """[s, b] tokens, the widths of the layer, and what else a measurement depends on."""

    s: int
    b: int
    h: int
    ffn: int
    gated_ffn: int
    p: float
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        return self.s * self.b


class Traffic(NamedTuple):
    """The bytes that one pass must move: each input read once, each output written once."""

    tensors: int
    """[tokens, width] of the operation's dtype; a gated operation's x counts as two."""
    vectors: int = 0
    """[width] of the operation's dtype."""
    row_bytes: int = 0
    bits_per_element: int = 0
    column_bytes: int = 0

    def num_bytes(self, sizes: Sizes, width: int) -> int:
        elements = sizes.tokens * width
        return (
            (self.tensors * elements + self.vectors * width) * sizes.dtype.itemsize
            + self.row_bytes * sizes.tokens
            + self.column_bytes * width
            + (self.bits_per_element * elements + 7) // 8
        )


# Of the dropout probability: a function of tensors only, as torch.compile expects it.
Factory = Callable[[float], Callable[..., Any]]


class Form(NamedTuple):
    """Tempo's operation in one of its forms, by what it keeps for backward."""

    keeps: str
    factory: Factory
    forward: Traffic
    backward: Traffic
    refill: Traffic | None = None
    """Of writing the dropped output again; None where the output stays."""


@dataclass(frozen=True)
class Operation:
    name: str
    inputs: tuple[str, ...]
    """x and residual [s, b, width], x_gated [s, b, 2 width], or a vector [width]."""
    width: str
    """The member of Sizes that it is."""
    forms: tuple[Form, ...]
    plain: Factory
    liger: Callable[..., Any] | None = None
    """The same by a kernel of Liger, of the same inputs; raises LookupError where the package does not have it."""
    kept_output: int | None = 0
    """Which output the next linear keeps; None where none is followed by a linear."""
    draws: bool = False

    def width_of(self, sizes: Sizes) -> int:
        return int(getattr(sizes, self.width))

    def tensors(self, sizes: Sizes, device: torch.device | str) -> list[Tensor]:
        """Random inputs, in the order of `inputs`."""
        width = self.width_of(sizes)
        found = []
        for name in self.inputs:
            if name in VECTORS:
                t = torch.randn(width, device=device) * 0.1 + (1.0 if name == "weight" else 0.0)
            else:
                t = torch.randn(sizes.s, sizes.b, width * (2 if name == "x_gated" else 1), device=device)
            found.append(t.to(sizes.dtype))
        return found

"""Holds the numbers or device data from which a dropout mask is drawn, and checks the tensors that it is applied to."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tempo_kernels.opaque import join_draw, split_draw
from tempo_kernels.philox import LANES, check_drawn_from, check_place, threshold

OPERANDS = (
    "float p, SymInt key_low, SymInt key_high, SymInt sample, SymInt first_row, SymInt first_column, Tensor? key, "
    "Tensor? first_sample, Tensor? rows, Tensor? samples"
)


class Draw(NamedTuple):
    """The arguments of one mask; see `bias_dropout_add`."""

    p: float
    key: int | Tensor
    first_sample: int | Tensor
    first_row: int
    first_column: int = 0
    rows: Tensor | None = None
    samples: Tensor | None = None

    def check(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
        """Raises ValueError unless the tensors fit one another and the draw fits them."""
        shape = x.shape
        if len(shape) != 3 or not x.is_floating_point():
            raise ValueError(
                f"x is {x.dtype} of shape {list(shape)}; expected a floating-point [s, b, h]; cast or reshape it"
            )
        if bias is not None and (bias.shape != shape[-1:] or not bias.is_floating_point()):
            raise ValueError(
                f"bias is {bias.dtype} of shape {list(bias.shape)}; expected floating-point [{shape[-1]}], as x's "
                "last dimension; cast or reshape it"
            )
        if residual is not None and (residual.shape != shape or residual.dtype != x.dtype):
            raise ValueError(
                f"residual is {residual.dtype} of shape {list(residual.shape)}; "
                f"expected {x.dtype} of shape {list(shape)}, as x; cast it first"
            )
        if threshold(self.p):
            first_sample = 0 if isinstance(self.first_sample, Tensor) else self.first_sample
            samples = {"first_sample": first_sample, "num_samples": shape[1]}
            rows = {"first_row": self.first_row, "num_rows": shape[0]}
            check_place(key=self.key, first_column=self.first_column, num_columns=shape[2], **samples, **rows)
            if self.first_column % LANES:
                raise ValueError(
                    f"first_column is {self.first_column}; expected a multiple of {LANES}, as one draw serves "
                    f"{LANES} columns; begin the part there"
                )
        check_drawn_from(x.device, key=self.key, first_sample=self.first_sample)
        shapes = [shape[:1], shape[:2]]
        for name, given, first in (("rows", self.rows, self.first_row), ("samples", self.samples, self.first_sample)):
            if given is None:
                continue
            if (given.dtype, given.device) != (torch.int64, x.device) or given.shape not in shapes:
                raise ValueError(
                    f"{name} is {given.dtype} of shape {list(given.shape)} on {given.device}; expected torch.int64 of "
                    f"shape {list(shapes[0])} or {list(shapes[1])} on {x.device}, one number for each token of x"
                )
            if isinstance(first, Tensor) or first != 0:
                raise ValueError(f"{name} and first_{name[:-1]} are given; expected one of them; leave the other out")

    def split(self) -> tuple[tuple[Any, ...], tuple[Tensor | None, ...]]:
        """Returns p, the low and the high half of the key, first sample, row and column; and key, first sample, rows
        and samples where they are tensors, which autograd keeps and checks for changes, else None. A number that is a
        tensor is 0. Together they are an operator's operands, in the order of the schema OPERANDS."""
        drawn, tensors = split_draw(self.key, self.first_sample)
        return (self.p, *drawn, self.first_row, self.first_column), (*tensors, self.rows, self.samples)

    @classmethod
    def from_operands(cls, *operands: Any) -> Draw:
        """Builds the draw from what `split` returned."""
        p, low, high, number, first_row, first_column, key, first_sample, rows, samples = operands
        draw = join_draw(low, high, number, key, first_sample)
        return cls(p, *draw, first_row, first_column, rows, samples)

    def place(self, num_rows: int, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the global rows and samples of the tokens, int64, each of which broadcasts to [num_rows, batch]."""
        rows, samples = self.rows, self.samples
        if rows is None:
            rows = self.first_row + torch.arange(num_rows, dtype=torch.int64, device=device)
        if samples is None:
            samples = (self.first_sample + torch.arange(batch, dtype=torch.int64, device=device)).unsqueeze(0)
        return tuple(t.unsqueeze(-1) if t.dim() == 1 else t for t in (rows, samples))  # type: ignore[return-value]

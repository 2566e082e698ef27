"""Holds the numbers or device data from which a dropout mask is drawn, and checks the tensors that it is applied to."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tempo_kernels.opaque import join_key, split_key
from tempo_kernels.philox import LANES, check_place, threshold

OPERANDS = (
    "float p, SymInt key_low, SymInt key_high, Tensor? key, SymInt sample, Tensor? first_sample, SymInt first_row, "
    "SymInt first_column, Tensor? rows, Tensor? samples"
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
            check_place(
                key=self.key,
                first_sample=first_sample,
                num_samples=shape[1],
                first_row=self.first_row,
                num_rows=shape[0],
                first_column=self.first_column,
                num_columns=shape[2],
            )
            if self.first_column % LANES:
                raise ValueError(
                    f"first_column is {self.first_column}; expected a multiple of {LANES}, as one draw serves "
                    f"{LANES} columns; begin the part there"
                )
        if self.has_tensors:
            self._check_tensors(x.device)
            self._check_positions(x)

    def _check_tensors(self, device: torch.device) -> None:
        for name, number in (("key", self.key), ("first_sample", self.first_sample)):
            if isinstance(number, Tensor) and (number.dtype, number.dim(), number.device) != (torch.int64, 0, device):
                raise ValueError(
                    f"{name} is {number.dtype} of shape {list(number.shape)} on {number.device}; expected an int, or a "
                    f"0-dim torch.int64 tensor on {device}, as x; move it there"
                )

    def _check_positions(self, x: Tensor) -> None:
        shapes = [x.shape[:1], x.shape[:2]]
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

    @classmethod
    def from_operands(
        cls,
        p: float,
        low: int,
        high: int,
        key: Tensor | None,
        number: int,
        first_sample: Tensor | None,
        first_row: int,
        first_column: int,
        *positions: Tensor | None,
    ) -> Draw:
        """Builds the draw from what `operands` returned."""
        return cls(p, join_key(low, high), number, first_row, first_column).join(key, first_sample, *positions)

    @property
    def operands(self) -> tuple[Any, ...]:
        """Returns the flat operands of an operator, in the order of the schema OPERANDS."""
        numbers, tensors = self.split()
        key, first_sample, *positions = tensors or [None] * 4
        place = (numbers.first_sample, first_sample, self.first_row, self.first_column)
        return self.p, *split_key(numbers.key), key, *place, *positions

    @property
    def has_tensors(self) -> bool:
        """Whether the draw holds a tensor; the usual one has numbers alone, for which nothing is taken apart."""
        is_tensor = isinstance(self.key, Tensor) or isinstance(self.first_sample, Tensor)
        return is_tensor or self.rows is not None or self.samples is not None

    def split(self) -> tuple[Draw, list[Tensor | None]]:
        """Returns the draw without its tensors, and the tensors, which autograd keeps and checks for changes: the key,
        the first sample, rows and samples, each a tensor or None. The list is empty if none is a tensor."""
        if not self.has_tensors:
            return self, []
        numbers = (self.key, self.first_sample)
        tensors = [number if isinstance(number, Tensor) else None for number in numbers]
        key, first_sample = (0 if isinstance(number, Tensor) else number for number in numbers)
        return Draw(self.p, key, first_sample, self.first_row, self.first_column), [*tensors, self.rows, self.samples]

    def join(self, *tensors: Tensor | None) -> Draw:
        """Puts the tensors that `split` took out back in."""
        if not tensors:
            return self
        key, first_sample, rows, samples = tensors
        return Draw(
            self.p,
            self.key if key is None else key,
            self.first_sample if first_sample is None else first_sample,
            self.first_row,
            self.first_column,
            rows,
            samples,
        )

    def place(self, num_rows: int, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the global rows and samples of the tokens, int64, each of which broadcasts to [num_rows, batch]."""
        row, sample = (torch.arange(n, dtype=torch.int64, device=device) for n in (num_rows, batch))
        rows, samples = (self.first_row + row).unsqueeze(-1), self.first_sample + sample
        if self.rows is not None:
            rows = self.rows.view(num_rows, -1)
        if self.samples is not None:
            samples = self.samples.view(num_rows, -1)
        return rows, samples

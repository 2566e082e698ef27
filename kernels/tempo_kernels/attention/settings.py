"""Holds attention's arguments: Inputs are its tensors, Settings its numbers, Kept what backward gets of forward, and
Gradients what it returns."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torch import Tensor

from tempo_kernels.opaque import join_key, split_key
from tempo_kernels.philox import effective_probability

MASKED_SCORE = -10000.0
"""What Megatron writes over masked scores; a row whose every key is masked attends to all of them equally."""
MASKED_SCORES = {"uniform": MASKED_SCORE, "added": MASKED_SCORE, "zero": float("-inf")}
"""What a mask writes over scores, by what rows get whose keys it hides all: `attention` says what the words mean."""
HIDING_BIAS = -1e30
"""A bias below this number hides its key: minus infinity does, and the lowest number of float32 and of bfloat16."""
OPERANDS = (
    "bool causal, float softmax_scale, float dropout_p, SymInt key_low, SymInt key_high, Tensor? key, SymInt sample, "
    "Tensor? first_sample, SymInt first_head, int[]? window_size, SymInt first_row, SymInt? first_column, "
    "float? softcap, str hidden_rows"
)


class Inputs(NamedTuple):
    """The tensors, with the shapes and dtypes that `attention` documents."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    key_lengths: Tensor | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None

    @property
    def changes_scores(self) -> bool:
        """Whether something is added to the scores, or to their softmax's sum."""
        return self.bias is not None or self.alibi_slopes is not None or self.sink is not None


class Kept(NamedTuple):
    """Forward's results that backward needs: the logsumexp, or in the softmax form the probabilities, and both where
    there is a sink."""

    out: Tensor | None
    logsumexp: Tensor | None
    probabilities: Tensor | None = None
    is_part: bool = False
    """Whether out and logsumexp are of more keys than are here. Gradients then have the dtype of the softmax."""


class Gradients(NamedTuple):
    """The gradients of Inputs' tensors of the same names."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    sink: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Settings:
    """The numbers. Two of them, dropout_key and first_sample, may be 0-dim tensors."""

    causal: bool
    softmax_scale: float
    dropout_p: float
    dropout_key: int | Tensor | None
    first_sample: int | Tensor | None
    first_head: int
    window_size: tuple[int, int] | None = None
    first_row: int = 0
    first_column: int | None = None
    softcap: float | None = None
    hidden_rows: str = "uniform"

    @property
    def masked_score(self) -> float:
        """What a mask writes over scores."""
        return MASKED_SCORES[self.hidden_rows]

    @property
    def operands(self) -> tuple[Any, ...]:
        """Returns the flat operands of an operator, in the order of the schema OPERANDS."""
        numbers, (key, first_sample) = self.split()
        window = None if self.window_size is None else list(self.window_size)
        draw = (*split_key(numbers.dropout_key), key, numbers.first_sample or 0, first_sample, self.first_head)
        rest = (self.first_row, self.first_column, self.softcap, self.hidden_rows)
        return self.causal, self.softmax_scale, self.dropout_p, *draw, window, *rest

    @classmethod
    def of(cls, *operands: Any) -> Settings:
        """Builds the settings from what `operands` returned."""
        causal, scale, p, low, high, key, number, first_sample, first_head, window, *rest = operands
        key = join_key(low, high) if key is None else key
        first_sample = number if first_sample is None else first_sample
        return cls(causal, scale, p, key, first_sample, first_head, None if window is None else tuple(window), *rest)

    def split(self) -> tuple[Settings, list[Tensor | None]]:
        """Returns the settings without their tensors, and the tensors, which autograd keeps and checks for changes."""
        numbers = (self.dropout_key, self.first_sample)
        if not (isinstance(numbers[0], Tensor) or isinstance(numbers[1], Tensor)):
            return self, [None, None]
        tensors = [number if isinstance(number, Tensor) else None for number in numbers]
        key, first_sample = (None if isinstance(number, Tensor) else number for number in numbers)
        return dataclasses.replace(self, dropout_key=key, first_sample=first_sample), tensors

    def join(self, key: Tensor | None, first_sample: Tensor | None) -> Settings:
        """Puts the tensors that `split` took out back in."""
        if key is None and first_sample is None:
            return self
        return dataclasses.replace(
            self,
            dropout_key=self.dropout_key if key is None else key,
            first_sample=self.first_sample if first_sample is None else first_sample,
        )

    @property
    def keep_scale(self) -> float:
        """1 / (1 - p): the factor of the probabilities that survive dropout."""
        return 1.0 / (1.0 - effective_probability(self.dropout_p))

    def find_diagonal(self, num_queries: int, num_keys: int) -> int:
        """The number that makes i + diagonal the key at query i's own position."""
        # With fewer queries than keys the last query sees the last key, unless positions are given.
        return num_keys - num_queries if self.first_column is None else self.first_row - self.first_column

    def find_window(self, num_queries: int, num_keys: int) -> tuple[int | None, int | None]:
        """(first, last) such that query i sees keys i + first to i + last; None where there is no limit."""
        diagonal = self.find_diagonal(num_queries, num_keys)
        left, right = self.window_size or (-1, -1)
        if self.causal:
            right = 0
        return (None if left < 0 else diagonal - left, None if right < 0 else diagonal + right)

"""The numbers of the loss head: Settings of the whole vocabulary, Shares of one shard's columns."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from torch import Tensor

from tempo_kernels.linear_cross_entropy.shards import Shards


class Shares(NamedTuple):
    """How the target distribution is spread over the columns of one shard; eager.py has the formulas."""

    target: float
    other: float
    """0 without label smoothing; the sum over the other columns is then not computed."""
    num_real: int
    """The first columns, which are real; those behind them pad the vocabulary."""


class Rows(NamedTuple):
    """What the gradient needs of each row of a chunk, [n] each."""

    columns: Tensor
    """The targets as columns of this shard; outside of it where the target is on another one."""
    top: Tensor
    """The maximum over all shards."""
    scale: Tensor
    """grad (1 + 2 z logsumexp) / total."""
    grad: Tensor
    """The gradient of the row's loss."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is not a tensor."""

    shards: Shards
    vocab_size: int
    """Real rows of the whole vocabulary."""
    vocab_start: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    chunk_rows: int

    @property
    def other_share(self) -> float:
        return self.label_smoothing / (self.vocab_size - 1) if self.label_smoothing else 0.0

    @property
    def target_share(self) -> float:
        return 1.0 - self.vocab_size * self.other_share

    def find_shares(self, num_columns: int) -> Shares:
        """The shares of this rank's shard, which has num_columns columns."""
        return Shares(self.target_share, self.other_share, self.count_real(self.shards.rank, num_columns))

    def count_real(self, rank: int, num_columns: int) -> int:
        """How many columns of a shard are real."""
        return min(max(self.vocab_size - rank * num_columns, 0), num_columns)

"""Holds the numbers of the loss head: Settings for the whole vocabulary, Shares for one shard's columns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tempo_kernels.linear_cross_entropy.shards import Shards


class Shares(NamedTuple):
    """How one shard's columns are scaled and excluded, and how the target distribution is spread over them."""

    target: float
    other: float
    """0 without label smoothing; the sum over the other columns is then not computed."""
    num_real: int
    """The first columns, which are real; those behind them pad the vocabulary."""
    excludes_padding: bool = False
    """Whether the columns that pad the vocabulary are outside of the softmax."""
    softcap: float = 0.0
    """0 for logits that are not capped."""
    temperature: float = 1.0
    has_entropy: bool = False

    @property
    def num_statistics(self) -> int:
        return 3 + (self.other != 0.0) + self.has_entropy

    @property
    def is_plain(self) -> bool:
        """Whether the softmax takes all logits unscaled."""
        return self[3:] == (False, 0.0, 1.0, False)


class Rows(NamedTuple):
    """The numbers [n] that the gradient needs of each row of a chunk."""

    columns: Tensor
    """The targets as columns of this shard; outside of it where the target is on another one."""
    top: Tensor
    """The maximum over all shards."""
    scale: Tensor
    """(grad (1 + 2 z logsumexp) + grad_entropy expected) / total."""
    grad: Tensor
    """The gradient of the row's loss by its scaled logits."""
    slope: Tensor | None = None
    """-grad_entropy / total; None where the entropy has no gradient."""


class Settings(NamedTuple):
    """The arguments of the head that are not tensors."""

    shards: Shards
    vocab_size: int
    """Real rows of the whole vocabulary."""
    vocab_start: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    excludes_padding: bool
    softcap: float
    temperature: float
    has_entropy: bool
    chunk_rows: int
    chunk_columns: int = 0
    """Columns per chunk of backward; 0 where its chunks are rows, as those of forward always are."""

    @property
    def other_share(self) -> float:
        return self.label_smoothing / (self.vocab_size - 1) if self.label_smoothing else 0.0

    @property
    def target_share(self) -> float:
        return 1.0 - self.vocab_size * self.other_share

    def takes_all(self, num_rows: int) -> bool:
        """Whether a single chunk of rows takes all num_rows of hidden, which are all tokens, and there are some."""
        return 0 < num_rows <= self.chunk_rows and not self.chunk_columns and self.shards.num_segments == 1

    def find_weight_dtype(self, dtype: torch.dtype, num_rows: int) -> torch.dtype:
        """Returns the dtype for the gradient of a weight of `dtype`: its own if each chunk holds all num_rows of
        hidden, so that there is nothing to sum, else at least float32."""
        has_all = num_rows <= self.chunk_rows or self.chunk_columns
        return dtype if has_all else torch.promote_types(dtype, torch.float32)

    def find_shares(self, num_columns: int) -> Shares:
        """Returns the shares of this rank's shard of num_columns columns."""
        return Shares(
            self.target_share,
            self.other_share,
            self.count_real(self.shards.rank, num_columns),
            self.excludes_padding,
            self.softcap,
            self.temperature,
            self.has_entropy,
        )

    def count_real(self, rank: int, num_columns: int) -> int:
        """Counts the columns of a shard that are not padding."""
        return min(max(self.vocab_size - rank * num_columns, 0), num_columns)

"""Holds the numbers of the loss head: Settings for the whole vocabulary, Shards for the ranks that hold it and their
collectives, Shares for one shard's columns, Rows for the tokens of a chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tempo_kernels.opaque import cut, skip_alike


class Shards(NamedTuple):
    """A tensor-parallel group, or one rank that holds the whole vocabulary.

    Tokens are [t, m]: m is how many hidden states this rank has, and t is the group's size under sequence parallelism,
    or 1 without it, where each rank has all hidden states. A chunk has k rows [k, h] of each rank, t * k tokens in all.
    """

    group: Any
    sequence_parallel: bool

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def num_segments(self) -> int:
        """Returns t."""
        return self.size if self.sequence_parallel else 1

    def gather(self, hidden: Tensor, chunk_rows: int) -> Iterator[tuple[slice, Tensor]]:
        """Yields per chunk of hidden [m, h] the slice of rows and their tokens [t * k, h] from every rank. The next
        chunk is gathered while the caller works on this one."""
        chunks = skip_alike(cut(hidden.size(0), chunk_rows), hidden)
        if self.num_segments == 1:
            yield from ((rows, hidden[rows]) for rows in chunks)
            return
        ahead = [self._start_gather(hidden[rows]) for rows in chunks[:1]]
        for index, rows in enumerate(chunks):
            tokens, work = ahead.pop()
            work.wait()
            ahead += [self._start_gather(hidden[following]) for following in chunks[index + 1 : index + 2]]
            yield rows, tokens

    def _start_gather(self, part: Tensor) -> tuple[Tensor, Any]:
        tokens = part.new_empty(self.size * part.size(0), part.size(1))
        return tokens, dist.all_gather_into_tensor(tokens, part, group=self.group, async_op=True)

    def start_reduction(self, part: Tensor, out: Tensor) -> Any:
        """Starts to sum all ranks' `part`: of [t * k, h] it writes this rank's rows into out [k, h], and where t is 1
        it sums out, which is part, in place. Returns what to wait for, or None for one rank."""
        if self.size == 1:
            return None
        if self.num_segments == 1:
            return dist.all_reduce(out, group=self.group, async_op=True)
        return dist.reduce_scatter_tensor(out, part, group=self.group, async_op=True)

    def exchange(self, statistics: Tensor) -> Tensor:
        """Gathers every rank's statistics as [p, ...], so that all ranks reduce them in the same order."""
        found = statistics.new_empty(self.size, *statistics.shape)
        dist.all_gather_into_tensor(found.view(-1), statistics.contiguous().view(-1), group=self.group)
        return found


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
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    excludes_padding: bool = False
    softcap: float = 0.0
    temperature: float = 1.0
    has_entropy: bool = False
    chunk_rows: int = 1

    @property
    def other_share(self) -> float:
        return self.label_smoothing / (self.vocab_size - 1) if self.label_smoothing else 0.0

    @property
    def target_share(self) -> float:
        return 1.0 - self.vocab_size * self.other_share

    def get_weight_dtype(self, dtype: torch.dtype, num_rows: int) -> torch.dtype:
        """Returns the dtype for the gradient of a weight of `dtype`: its own if each chunk holds all num_rows of
        hidden, so that there is nothing to sum, else at least float32."""
        return dtype if num_rows <= self.chunk_rows else torch.promote_types(dtype, torch.float32)

    def get_shares(self, num_columns: int) -> Shares:
        """Returns the shares of this rank's shard of num_columns columns."""
        num_real = self.count_real(self.shards.rank, num_columns)
        scaling = self.excludes_padding, self.softcap, self.temperature, self.has_entropy
        return Shares(self.target_share, self.other_share, num_real, *scaling)

    def count_real(self, rank: int, num_columns: int) -> int:
        """Counts the columns of a shard that are not padding."""
        return min(max(self.vocab_size - rank * num_columns, 0), num_columns)

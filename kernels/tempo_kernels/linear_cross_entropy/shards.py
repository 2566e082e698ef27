"""Describes the ranks that hold the vocabulary's shards, and runs their collectives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from tempo_kernels.opaque import skip_alike


def take(t: Tensor, block: slice, dim: int = 0) -> Tensor:
    """Returns t from block.start to block.stop along a dimension, or t itself if that is all of it: a view costs the
    host about as much as a launch."""
    size = t.shape[dim]
    if block.start == 0 and block.stop >= size:
        return t
    return t.narrow(dim, block.start, min(block.stop, size) - block.start)


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
        num_rows = hidden.shape[0]
        if self.num_segments == 1 and 0 < num_rows <= chunk_rows:
            yield slice(0, num_rows), hidden
            return
        starts = range(0, num_rows, chunk_rows)
        chunks = skip_alike([slice(start, min(start + chunk_rows, num_rows)) for start in starts], hidden)
        if self.num_segments == 1:
            yield from ((rows, take(hidden, rows)) for rows in chunks)
            return
        ahead = [self._start_gather(hidden[rows]) for rows in chunks[:1]]
        for index, rows in enumerate(chunks):
            tokens, work = ahead.pop()
            work.wait()
            if index + 1 < len(chunks):
                ahead.append(self._start_gather(hidden[chunks[index + 1]]))
            yield rows, tokens

    def _start_gather(self, part: Tensor) -> tuple[Tensor, Any]:
        tokens = part.new_empty(self.size * part.size(0), part.size(1))
        return tokens, dist.all_gather_into_tensor(tokens, part, group=self.group, async_op=True)

    def reduce_scatter(self, part: Tensor, out: Tensor) -> Any:
        """Starts a reduce-scatter: sums all ranks' `part` [t * k, h] and writes this rank's rows into out [k, h]."""
        return dist.reduce_scatter_tensor(out, part, group=self.group, async_op=True)

    def reduce(self, part: Tensor) -> Any:
        """Starts to sum part over the ranks, in place."""
        return dist.all_reduce(part, group=self.group, async_op=True)

    def exchange(self, found: Tensor) -> Tensor:
        """Gathers every rank's `found` as [p, ...], so that all ranks reduce it in the same order."""
        found_by_all = found.new_empty(self.size, *found.shape)
        dist.all_gather_into_tensor(found_by_all.view(-1), found.contiguous().view(-1), group=self.group)
        return found_by_all

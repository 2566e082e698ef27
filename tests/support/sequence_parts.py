"""Which tokens of a sequence a context-parallel rank holds, and a rank's part put back into the whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from megatron.core import parallel_state
from torch import Tensor


def list_tokens(rank: int, size: int, boundaries: Sequence[int]) -> Tensor:
    """int64 numbers of the tokens of a rank: of each document (a row that is not packed is one), the chunks `rank` and
    2 * size - 1 - rank of 2 * size equal ones, as Megatron and Transformer Engine cut them."""
    documents = (torch.arange(start, end) for start, end in pairwise(boundaries))
    return torch.cat([t if size == 1 else _take_two(t.chunk(2 * size), rank) for t in documents])


def _take_two(chunks: Sequence[Tensor], rank: int) -> Tensor:
    assert len({len(chunk) for chunk in chunks}) == 1, "a document is no multiple of twice the ranks"
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def take_part(*tensors: Tensor, boundaries: Sequence[int] = ()) -> list[Tensor]:
    """This rank's tokens of tensors [b, s]."""
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    if size == 1:
        return list(tensors)
    tokens = list_tokens(rank, size, boundaries or (0, tensors[0].size(1)))
    return [t[:, tokens] for t in tensors]


def join_parts(part: Tensor, boundaries: Sequence[int] = ()) -> Tensor:
    """[b, s] of every rank's part of it, on each rank of the context-parallel group."""
    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(size)]
    torch.distributed.all_gather(parts, part.contiguous(), group=parallel_state.get_context_parallel_group())
    whole = part.new_empty(part.size(0), size * part.size(1))
    for rank, found in enumerate(parts):
        whole[:, list_tokens(rank, size, boundaries or (0, whole.size(1)))] = found
    return whole

"""Attention of a context-parallel rank: its queries against the keys of the whole sequence.

A rank holds two chunks of the sequence (`dropout_rng.find_segments`). Megatron names four ways to bring queries and
keys together, and all are made of two steps here:

- heads: within a group, each rank gets all rows of the group for its share of the heads, and gives the output back
  (Ulysses, arXiv 2309.14509). What results is the layout of fewer context-parallel ranks with longer chunks.
- rows: keys and values of all ranks pass by, each part is attended to, and the parts are merged by their logsumexps.
  They go around (ring attention, arXiv 2310.01889), or are gathered for the time of the call.

"a2a" is the first step, "p2p" and "all_gather" are the second, and "a2a+p2p" is both.

The second step keeps the rank's own q, k, v, output and logsumexp. Its backward sends keys and values once more: around
with the gradients that each rank adds to, or gathered, with gradients summed over ranks. So both send, in all, the keys
and values twice and their gradients, in float32, once. Gathering needs memory for all keys and values of one layer and,
in backward, their gradients in float32, for the time of the call; the ring needs it for two ranks' share.
In float32 its gradients are within 8 eps of the largest (`differentiate_block`); in 16 bits they are as attention's.
Masks of dropout are functions of the position, so that every way draws those of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd.function import once_differentiable

from tempo_kernels.attention import (
    add_sink,
    attend_block,
    attention,
    differentiate_block,
    differentiate_sink,
    merge_blocks,
)
from tempo_megatron.slots.dropout_rng import find_segments

COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
# Columns are cut here only, where random words and the kernels' tiles begin.
_COLUMNS = 128


class Exchange(NamedTuple):
    """Which ranks exchange heads, and which exchange rows."""

    heads_group: Any
    """None where heads stay."""

    rows_group: Any
    """None where heads_group holds all ranks."""

    gathers: bool
    """Whether rows are gathered instead of going around."""


def choose_exchange(config: Any, layer_number: int, pg_collection: Any) -> Exchange | None:
    """How the layer's attention goes over context-parallel ranks; None where there is one rank.

    Args:
        config: a TransformerConfig; of a list in `cp_comm_type` layer l has the entry l - 1.
        layer_number: global, from 1 on.
        pg_collection: Megatron's groups of this layer, or None for the global ones.

    Raises ValueError where `cp_comm_type` is none of Megatron's.
    """
    if config.context_parallel_size == 1:
        return None
    comm_type = config.cp_comm_type
    if isinstance(comm_type, (list, tuple)):
        comm_type = comm_type[layer_number - 1]
    comm_type = comm_type or "p2p"
    group = getattr(pg_collection, "cp", None) or parallel_state.get_context_parallel_group()
    if comm_type in ("p2p", "all_gather"):
        return Exchange(None, group, comm_type == "all_gather")
    if comm_type == "a2a":
        return Exchange(group, None, False)
    if comm_type != "a2a+p2p":
        raise ValueError(f"cp_comm_type is {comm_type!r}; expected one of {', '.join(COMM_TYPES)}")
    groups = parallel_state.get_hierarchical_context_parallel_groups()
    if len(groups) != 2:
        raise ValueError(
            f"cp_comm_type is a2a+p2p and hierarchical_context_parallel_sizes has {len(groups)} sizes; expected two: "
            "how many ranks exchange heads, and how many of those groups exchange rows"
        )
    return Exchange(groups[0], groups[1], False)


def check_heads(exchange: Exchange, num_heads: int, num_groups: int) -> None:
    """Raises ValueError where the ranks that exchange heads cannot have equal shares of them.

    Args:
        num_heads, num_groups: the query heads and the key-value heads of this tensor-parallel rank.
    """
    size = 1 if exchange.heads_group is None else exchange.heads_group.size()
    if num_heads % size or (num_groups % size and size % num_groups):
        raise ValueError(
            f"{size} context-parallel ranks exchange heads, and a tensor-parallel rank has {num_heads} heads and "
            f"{num_groups} query groups; expected heads that {size} divides, and groups that {size} divides or that "
            f'divide {size}; set cp_comm_type to "p2p", or change the sizes'
        )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    exchange: Exchange,
    first_head: int = 0,
    sink: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """Attention of this rank's queries to all keys.

    Args:
        query: [s/cp, b, a, d], this rank's rows.
        key, value: [s/cp, b, g, d] and [s/cp, b, g, dv].
        first_head: global index of query[:, :, 0].
        sink: [a], as of `attention`. Each rank finds what its own rows, or heads, add to the gradient.
        settings: causal, softmax_scale, window_size, dropout_p, dropout_key and first_sample of `attention`.

    Returns [s/cp, b, a, dv].
    """
    heads_group, rows_group, gathers = exchange
    operands = [query, key, value]
    if heads_group is not None:
        size = heads_group.size()
        # With fewer groups than ranks each rank gets a copy of the group that its heads read.
        operands = [t if t.size(2) % size == 0 else t.repeat_interleave(size // t.size(2), dim=2) for t in operands]
        operands = [_ScatterHeads.apply(t, heads_group) for t in operands]
        first_head += heads_group.rank() * operands[0].size(2)
        sink = None if sink is None else sink.chunk(size)[heads_group.rank()]
    if rows_group is None:
        out = attention(*operands, first_head=first_head, sink=sink, **settings)
    else:
        settings["first_head"] = first_head
        out = _AttendRows.apply(*operands, sink, rows_group, gathers, settings)
    return out if heads_group is None else _GatherHeads.apply(out, heads_group)


def _scatter_heads(x: Tensor, group: Any) -> Tensor:
    """[size * s, b, n / size, d] of x [s, b, n, d]: all rows of the group for this rank's heads."""
    return _order_rows(_exchange(x.unflatten(2, (group.size(), -1)).permute(2, 0, 1, 3, 4).contiguous(), group))


def _gather_heads(x: Tensor, group: Any) -> Tensor:
    """The inverse of _scatter_heads: [s, b, n, d] of x [size * s, b, n / size, d]."""
    return _exchange(_split_rows(x, group.size()), group).permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous()


def _exchange(parts: Tensor, group: Any) -> Tensor:
    """What every rank has for this one, [size, ...], where parts[i] is what this one has for rank i."""
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _ScatterHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _scatter_heads(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather_heads(grad, ctx.group), None


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _gather_heads(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scatter_heads(grad, ctx.group), None


class _AttendRows(torch.autograd.Function):
    """Attention to the keys of all ranks of a group; keeps this rank's q, k, v, output and logsumexp."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        group: Any,
        gathers: bool,
        settings: dict[str, Any],
    ) -> Tensor:
        segments = find_segments(group.rank(), group.size(), q.size(0))
        results: list[tuple[Tensor, Tensor] | None] = [None] * len(segments)
        for keys, values, columns in _gather(k, v, group) if gathers else _send_around(k, v, group):
            for i, rows, part, place in _find_pairs(segments, columns, settings):
                found = attend_block(q[rows], keys[part], values[part], **place)
                before = results[i]
                results[i] = found if before is None else merge_blocks(before, found)
        outs, sums = zip(*(result for result in results if result is not None), strict=True)
        out, logsumexp = torch.cat(outs), torch.cat(sums, dim=-1)
        if sink is not None:
            out, logsumexp = add_sink(out, logsumexp, sink)
        out = out.to(q.dtype)
        ctx.group, ctx.gathers, ctx.settings = group, gathers, settings
        ctx.save_for_backward(q, k, v, sink, out, logsumexp)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, logsumexp = ctx.saved_tensors
        group, settings = ctx.group, ctx.settings
        segments = find_segments(group.rank(), group.size(), q.size(0))
        dtype = logsumexp.dtype
        grad_q = torch.zeros(q.shape, dtype=dtype, device=q.device)
        grads_on_their_way = None
        for keys, values, columns in _gather(k, v, group) if ctx.gathers else _send_around(k, v, group):
            grad_keys, grad_values = (torch.zeros(t.shape, dtype=dtype, device=q.device) for t in (keys, values))
            for _, rows, part, place in _find_pairs(segments, columns, settings):
                whole = grad_out[rows], out[rows], logsumexp[..., rows]
                grads = differentiate_block(*whole, q[rows], keys[part], values[part], **place)
                for total, grad in (
                    (grad_q[rows], grads[0]),
                    (grad_keys[part], grads[1]),
                    (grad_values[part], grads[2]),
                ):
                    total += grad
            if ctx.gathers:
                grad_k, grad_v = _sum_over_ranks(grad_keys, group), _sum_over_ranks(grad_values, group)
                continue
            # The gradients follow their keys around: what earlier ranks found arrives while this one computes.
            if grads_on_their_way is not None:
                for total, grad in zip((grad_keys, grad_values), grads_on_their_way.take(), strict=True):
                    total += grad
            grads_on_their_way = _Transfer((grad_keys, grad_values), group)
        if grads_on_their_way is not None:
            grad_k, grad_v = grads_on_their_way.take()
        grad_sink = None
        if ctx.needs_input_grad[3]:
            grad_sink = differentiate_sink(grad_out, out, logsumexp, sink)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sink, None, None, None


class _Transfer:
    """Tensors on their way to the next rank of a group, while those of the rank before arrive."""

    def __init__(self, tensors: tuple[Tensor, ...], group: Any) -> None:
        self._shapes = [t.shape for t in tensors]
        # One message, because messages between two ranks could overtake each other.
        self._sent = torch.cat([t.reshape(-1) for t in tensors])
        self._received = torch.empty_like(self._sent)
        ranks = dist.get_process_group_ranks(group)
        place = group.rank()
        to, source = ranks[(place + 1) % len(ranks)], ranks[place - 1]
        send = dist.P2POp(dist.isend, self._sent, to, group)
        receive = dist.P2POp(dist.irecv, self._received, source, group)
        self._works = dist.batch_isend_irecv([send, receive])

    def take(self) -> list[Tensor]:
        """What arrived, in the shapes of what was sent."""
        for work in self._works:
            work.wait()
        sizes = [shape.numel() for shape in self._shapes]
        return [t.view(shape) for t, shape in zip(self._received.split(sizes), self._shapes, strict=True)]


Part = tuple[Tensor, Tensor, list[tuple[int, int]]]


def _send_around(k: Tensor, v: Tensor, group: Any) -> Iterator[Part]:
    """Yields keys, values and segments of this rank, then of the one before, and so on around. The next are on their
    way while the caller computes."""
    rank, size = group.rank(), group.size()
    for step in range(size):
        transfer = _Transfer((k, v), group) if step < size - 1 else None
        yield k, v, find_segments((rank - step) % size, size, k.size(0))
        if transfer is not None:
            k, v = transfer.take()


def _gather(k: Tensor, v: Tensor, group: Any) -> Iterator[Part]:
    """Yields keys and values of all ranks in the order of the sequence."""
    keys, values = (_order_rows(_all_gather(t, group)) for t in (k, v))
    yield keys, values, [(0, keys.size(0))]


def _all_gather(x: Tensor, group: Any) -> Tensor:
    gathered = x.new_empty((group.size() * x.size(0), *x.shape[1:]), dtype=x.dtype)
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered.view(group.size(), *x.shape)


def _order_rows(parts: Tensor) -> Tensor:
    """[size * s, ...] in the order of the sequence, of every rank's [size, s, ...]: the ranks' first chunks, then their
    second chunks in the reverse order of ranks."""
    chunks = parts.unflatten(1, (2, -1))
    return torch.cat((chunks[:, 0].flatten(0, 1), chunks[:, 1].flip(0).flatten(0, 1)))


def _split_rows(x: Tensor, size: int) -> Tensor:
    """The inverse of _order_rows."""
    first, second = (half.unflatten(0, (size, -1)) for half in x.chunk(2))
    return torch.stack((first, second.flip(0)), dim=1).flatten(1, 2)


def _sum_over_ranks(grad: Tensor, group: Any) -> Tensor:
    """This rank's rows of the sum of all ranks' gradients of all rows, always in the order of ranks."""
    parts = _exchange(_split_rows(grad, group.size()), group)
    return parts.sum(0)


def _find_pairs(
    segments: list[tuple[int, int]], columns: list[tuple[int, int]], settings: dict[str, Any]
) -> Iterator[tuple[int, slice, slice, dict[str, Any]]]:
    """Yields the parts of rows and columns in which a query sees a key: the segment's number, its rows, the columns,
    and the settings with their global positions."""
    left, right = settings.get("window_size") or (-1, -1)
    if settings["causal"]:
        right = 0
    offset = 0
    for i, (row, num_rows) in enumerate(segments):
        rows = slice(offset, offset + num_rows)
        offset += num_rows
        start = 0
        for column, num_columns in columns:
            first, last = 0, num_columns
            if left >= 0:
                first = max(0, (row - left - column) // _COLUMNS * _COLUMNS)
            if right >= 0:
                last = min(num_columns, row + num_rows + right - column)
            if first < last:
                place = {"first_row": row, "first_column": column + first, **settings}
                yield i, rows, slice(start + first, start + last), place
            start += num_columns

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

Of a packed row each document is cut into chunks like a sequence. The first step puts the documents together, or makes
them those of fewer ranks; the second attends document by document, chunk by chunk. Both read on the CPU where documents
begin, for which a GPU is waited for once in a micro batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, MutableMapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from tempo_kernels.attention import (
    add_sink,
    attend_block,
    attention,
    differentiate_block,
    differentiate_sink,
    merge_blocks,
)
from tempo_megatron.slots.dropout_rng import Segment, compute_document_segments, find_segments

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


def count_ranks_of_rows(config: Any, hierarchical_sizes: Sequence[int] | None) -> int:
    """How many ranks exchange rows in some layer of a TransformerConfig; 1 where heads alone are exchanged.

    hierarchical_sizes: Megatron's hierarchical_context_parallel_sizes.
    """
    comm_types = config.cp_comm_type
    comm_types = comm_types if isinstance(comm_types, (list, tuple)) else (comm_types,)
    size = int(config.context_parallel_size)
    counts = {"a2a": 1, "a2a+p2p": hierarchical_sizes[-1] if hierarchical_sizes else size}
    return max(counts.get(each, size) for each in comm_types)


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
    cu_seqlens: Tensor | None = None,
    document_samples: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """Attention of this rank's queries to all keys.

    Args:
        query: [s/cp, b, a, d], this rank's rows.
        key, value: [s/cp, b, g, d] and [s/cp, b, g, dv].
        first_head: global index of query[:, :, 0].
        sink: [a], as of `attention`. Each rank finds what its own rows, or heads, add to the gradient.
        cu_seqlens, document_samples: as of `attention`, of the whole packed row, of which b is 1; this rank has two
            chunks of each document.
        settings: causal, softmax_scale, window_size, dropout_p, dropout_key and first_sample of `attention`.

    Returns [s/cp, b, a, dv].

    Raises ValueError where the ranks cannot share the sequence, or a document, equally.
    """
    heads_group, rows_group, gathers = exchange
    operands = [query, key, value]
    ends = None if cu_seqlens is None else _find_ends(cu_seqlens, exchange, query.size(0))
    if heads_group is not None:
        size = heads_group.size()
        # With fewer groups than ranks each rank gets a copy of the group that its heads read.
        operands = [t if t.size(2) % size == 0 else t.repeat_interleave(size // t.size(2), dim=2) for t in operands]
        operands = [_ScatterHeads.apply(t, heads_group, ends) for t in operands]
        first_head += heads_group.rank() * operands[0].size(2)
        sink = None if sink is None else sink.chunk(size)[heads_group.rank()]
    settings["first_head"] = first_head
    if rows_group is None:
        settings |= {"sink": sink, "cu_seqlens": cu_seqlens, "document_samples": document_samples}
        out = attention(*operands, **settings)
    else:
        rows = _Rows(rows_group, gathers)
        if cu_seqlens is not None:
            samples = None if document_samples is None else _read(document_samples)
            rows = rows._replace(boundaries=_read(cu_seqlens), samples=samples)
        out = _AttendRows.apply(*operands, sink, rows, settings)
    return out if heads_group is None else _GatherHeads.apply(out, heads_group, ends)


_NUMBERS: MutableMapping[Tensor, tuple[int, tuple[int, ...]]] = WeakTensorKeyDictionary()
"""(version, numbers) of the boundaries and samples that were read, which all layers of a micro batch share."""


def _read(tensor: Tensor) -> tuple[int, ...]:
    """The numbers of a tensor, which is read once."""
    version, numbers = _NUMBERS.get(tensor, (-1, ()))
    if version != tensor._version:
        numbers = tuple(map(int, tensor.tolist()))
        _NUMBERS[tensor] = tensor._version, numbers
    return numbers


def _find_ends(cu_seqlens: Tensor, exchange: Exchange, num_rows: int) -> tuple[int, ...]:
    """Where the documents begin and end in the rows of one rank.

    Raises ValueError where they are not the whole row, or cannot be shared.
    """
    size = 1
    for group in (exchange.heads_group, exchange.rows_group):
        size *= 1 if group is None else group.size()
    boundaries = _read(cu_seqlens)
    if not boundaries or list(boundaries) != sorted((0, *boundaries[1:-1], size * num_rows)):
        raise ValueError(
            f"cu_seqlens is {list(boundaries)}, and {size} context-parallel ranks hold {num_rows} tokens each; "
            f"expected numbers growing from 0 to {size * num_rows}; give those of the whole row, padding included"
        )
    compute_document_segments(boundaries, 0, size)
    return tuple(end // size for end in boundaries)


Ends = tuple[int, ...] | None
"""Where documents begin and end in a rank's rows, two chunks of each; None where the rows are not packed."""


def _scatter_heads(x: Tensor, group: Any, ends: Ends) -> Tensor:
    """[size * s, b, n / size, d] of x [s, b, n, d]: all rows of the group for this rank's heads."""
    parts = _exchange(x.unflatten(2, (group.size(), -1)).permute(2, 0, 1, 3, 4).contiguous(), group)
    return _order_rows(parts, ends)


def _gather_heads(x: Tensor, group: Any, ends: Ends) -> Tensor:
    """The inverse of _scatter_heads: [s, b, n, d] of x [size * s, b, n / size, d]."""
    return _exchange(_split_rows(x, group.size(), ends), group).permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous()


def _exchange(parts: Tensor, group: Any) -> Tensor:
    """What every rank has for this one, [size, ...], where parts[i] is what this one has for rank i."""
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _ScatterHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, ends: Ends) -> Tensor:
        ctx.group, ctx.ends = group, ends
        return _scatter_heads(x, group, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather_heads(grad, ctx.group, ctx.ends), None, None


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, ends: Ends) -> Tensor:
        ctx.group, ctx.ends = group, ends
        return _gather_heads(x, group, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _scatter_heads(grad, ctx.group, ctx.ends), None, None


class _Rows(NamedTuple):
    """How the rows of a sequence, or of each document of a packed row, lie over a group of ranks."""

    group: Any
    gathers: bool
    boundaries: tuple[int, ...] | None = None
    """Where documents begin and end in the packed row."""

    samples: tuple[int, ...] | None = None
    """Of each document."""

    def list_segments(self, rank: int, num_rows: int) -> list[Segment]:
        """What `rank` holds, in the order in which it holds it."""
        if self.boundaries is not None:
            return compute_document_segments(self.boundaries, rank, self.group.size())
        return [Segment(0, *part) for part in find_segments(rank, self.group.size(), num_rows)]

    def list_all(self, num_rows: int) -> list[Segment]:
        """The documents in the order of the row."""
        return compute_document_segments(self.boundaries or (0, num_rows), 0, 1)

    def compute_ends(self) -> Ends:
        """Where the documents of a packed row begin and end in each rank's rows."""
        return None if self.boundaries is None else tuple(end // self.group.size() for end in self.boundaries)

    def place(self, document: int, settings: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """(what is added to a document's rows in its masks, its settings): without samples its masks are those of its
        place in the packed row."""
        if self.samples is not None:
            return 0, {**settings, "first_sample": self.samples[document]}
        return 0 if self.boundaries is None else self.boundaries[document], settings


class _AttendRows(torch.autograd.Function):
    """Attention to the keys of all ranks of a group; keeps this rank's q, k, v, output and logsumexp."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        layout: _Rows,
        settings: dict[str, Any],
    ) -> Tensor:
        segments = layout.list_segments(layout.group.rank(), q.size(0))
        results: list[tuple[Tensor, Tensor] | None] = [None] * len(segments)
        for keys, values, columns in _gather(k, v, layout) if layout.gathers else _send_around(k, v, layout):
            for i, rows, part, place in _compute_pairs(segments, columns, layout, settings):
                found = attend_block(q[rows], keys[part], values[part], **place)
                before = results[i]
                results[i] = found if before is None else merge_blocks(before, found)
        outs, sums = zip(*(result for result in results if result is not None), strict=True)
        out, logsumexp = torch.cat(outs), torch.cat(sums, dim=-1)
        if sink is not None:
            out, logsumexp = add_sink(out, logsumexp, sink)
        out = out.to(q.dtype)
        ctx.layout, ctx.settings = layout, settings
        ctx.save_for_backward(q, k, v, sink, out, logsumexp)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, logsumexp = ctx.saved_tensors
        layout, settings = ctx.layout, ctx.settings
        group = layout.group
        segments = layout.list_segments(group.rank(), q.size(0))
        dtype = logsumexp.dtype
        grad_q = torch.zeros(q.shape, dtype=dtype, device=q.device)
        grads_on_their_way = None
        for keys, values, columns in _gather(k, v, layout) if layout.gathers else _send_around(k, v, layout):
            grad_keys, grad_values = (torch.zeros(t.shape, dtype=dtype, device=q.device) for t in (keys, values))
            for _, rows, part, place in _compute_pairs(segments, columns, layout, settings):
                whole = grad_out[rows], out[rows], logsumexp[..., rows]
                grads = differentiate_block(*whole, q[rows], keys[part], values[part], **place)
                for total, grad in (
                    (grad_q[rows], grads[0]),
                    (grad_keys[part], grads[1]),
                    (grad_values[part], grads[2]),
                ):
                    total += grad
            if layout.gathers:
                ends = layout.compute_ends()
                grad_k, grad_v = (_sum_over_ranks(grad, group, ends) for grad in (grad_keys, grad_values))
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
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sink, None, None


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


Part = tuple[Tensor, Tensor, list[Segment]]


def _send_around(k: Tensor, v: Tensor, layout: _Rows) -> Iterator[Part]:
    """Yields keys, values and segments of this rank, then of the one before, and so on around. The next are on their
    way while the caller computes."""
    group = layout.group
    rank, size = group.rank(), group.size()
    for step in range(size):
        transfer = _Transfer((k, v), group) if step < size - 1 else None
        yield k, v, layout.list_segments((rank - step) % size, k.size(0))
        if transfer is not None:
            k, v = transfer.take()


def _gather(k: Tensor, v: Tensor, layout: _Rows) -> Iterator[Part]:
    """Yields keys and values of all ranks in the order of the sequence."""
    keys, values = (_order_rows(_all_gather(t, layout.group), layout.compute_ends()) for t in (k, v))
    yield keys, values, layout.list_all(keys.size(0))


def _all_gather(x: Tensor, group: Any) -> Tensor:
    gathered = x.new_empty((group.size() * x.size(0), *x.shape[1:]), dtype=x.dtype)
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered.view(group.size(), *x.shape)


def _order_rows(parts: Tensor, ends: Ends) -> Tensor:
    """[size * s, ...] in the order of the sequence, of every rank's [size, s, ...]: the ranks' first chunks, then their
    second chunks in the reverse order of ranks; of a packed row for each document."""
    if ends is not None:
        return parts.flatten(0, 1).index_select(0, _compute_order(ends, parts.size(0), parts.device)[0])
    chunks = parts.unflatten(1, (2, -1))
    return torch.cat((chunks[:, 0].flatten(0, 1), chunks[:, 1].flip(0).flatten(0, 1)))


def _split_rows(x: Tensor, size: int, ends: Ends) -> Tensor:
    """The inverse of _order_rows."""
    if ends is not None:
        return x.index_select(0, _compute_order(ends, size, x.device)[1]).view(size, -1, *x.shape[1:])
    first, second = (half.unflatten(0, (size, -1)) for half in x.chunk(2))
    return torch.stack((first, second.flip(0)), dim=1).flatten(1, 2)


@functools.lru_cache(maxsize=16)
def _compute_order(ends: tuple[int, ...], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each row of a packed row is in the ranks' rows, one rank behind the other; and the inverse."""
    places = torch.arange(size * ends[-1], dtype=torch.int64).view(size, -1)
    chunks = (places[:, start:end].chunk(2, dim=1) for start, end in pairwise(ends) if start < end)
    order = torch.cat([part.flatten() for first, second in chunks for part in (first, second.flip(0))])
    return order.to(device), order.argsort().to(device)


def _sum_over_ranks(grad: Tensor, group: Any, ends: Ends) -> Tensor:
    """This rank's rows of the sum of all ranks' gradients of all rows, always in the order of ranks."""
    parts = _exchange(_split_rows(grad, group.size(), ends), group)
    return parts.sum(0)


def _compute_pairs(
    segments: list[Segment], columns: list[Segment], layout: _Rows, settings: dict[str, Any]
) -> Iterator[tuple[int, slice, slice, dict[str, Any]]]:
    """Yields the parts of rows and columns in which a query sees a key: the segment's number, its rows, the columns,
    and the settings with their positions in the masks."""
    left, right = settings.get("window_size") or (-1, -1)
    if settings["causal"]:
        right = 0
    of_document: dict[int, list[tuple[int, Segment]]] = {}
    start = 0
    for segment in columns:
        of_document.setdefault(segment.document, []).append((start, segment))
        start += segment.num_rows
    offset = 0
    for i, (document, row, num_rows) in enumerate(segments):
        rows = slice(offset, offset + num_rows)
        offset += num_rows
        added, own = layout.place(document, settings)
        for start, (_, column, num_columns) in of_document[document]:
            first, last = 0, num_columns
            if left >= 0:
                first = max(0, (row - left - column) // _COLUMNS * _COLUMNS)
            if right >= 0:
                last = min(num_columns, row + num_rows + right - column)
            if first < last:
                place = {"first_row": added + row, "first_column": added + column + first, **own}
                yield i, rows, slice(start + first, start + last), place

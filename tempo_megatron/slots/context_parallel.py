"""Attention of a context-parallel rank: its queries against the keys of the whole sequence.

A rank holds two chunks of the sequence (`compute_document_segments`). Megatron names four ways to bring queries and
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
import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
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
from tempo_megatron.slots.dropout_rng import Segment, compute_document_segments

COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
# Columns are cut here only, where random words and the kernels' tiles begin.
_COLUMNS = 128


class Exchange(NamedTuple):
    """Which ranks exchange heads, and which exchange rows: None where heads stay, and where the first are all ranks.
    Rows are gathered, or go around."""

    heads_group: Any
    rows_group: Any
    gathers: bool


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
    if comm_type not in COMM_TYPES:
        raise ValueError(f"cp_comm_type is {comm_type!r}; expected one of {', '.join(COMM_TYPES)}")
    if comm_type != "a2a+p2p":
        group = getattr(pg_collection, "cp", None) or parallel_state.get_context_parallel_group()
        return Exchange(group, None, False) if comm_type == "a2a" else Exchange(None, group, comm_type == "all_gather")
    groups = parallel_state.get_hierarchical_context_parallel_groups()
    if len(groups) != 2:
        raise ValueError(
            f"cp_comm_type is a2a+p2p and hierarchical_context_parallel_sizes has {len(groups)} sizes; expected two: "
            "how many ranks exchange heads, and how many of those groups exchange rows"
        )
    return Exchange(groups[0], groups[1], False)


def count_ranks_of_rows(config: Any, hierarchical_sizes: Sequence[int] | None) -> int:
    """How many ranks exchange rows in some layer of a TransformerConfig, of which Megatron's
    hierarchical_context_parallel_sizes are given; 1 where heads alone are exchanged."""
    comm_types = config.cp_comm_type
    comm_types = comm_types if isinstance(comm_types, (list, tuple)) else (comm_types,)
    size = int(config.context_parallel_size)
    counts = {"a2a": 1, "a2a+p2p": hierarchical_sizes[-1] if hierarchical_sizes else size}
    return max(counts.get(each, size) for each in comm_types)


def check_heads(exchange: Exchange, num_heads: int, num_groups: int) -> None:
    """Raises ValueError where the ranks that exchange heads cannot have equal shares of a tensor-parallel rank's."""
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
    size = math.prod(group.size() for group in (heads_group, rows_group) if group is not None)
    boundaries = (0, size * query.size(0)) if cu_seqlens is None else _read_boundaries(cu_seqlens, size, query.size(0))
    compute_document_segments(boundaries, 0, size)  # raises
    ends = _get_ends(boundaries, size)
    if heads_group is not None:
        num_shares = heads_group.size()
        # With fewer groups than ranks each rank gets a copy of the group that its heads read.
        repeats = [1 if t.size(2) % num_shares == 0 else num_shares // t.size(2) for t in operands]
        operands = [t if n == 1 else t.repeat_interleave(n, dim=2) for t, n in zip(operands, repeats, strict=True)]
        operands = [_ExchangeHeads.apply(t, heads_group, ends, True) for t in operands]
        first_head += heads_group.rank() * operands[0].size(2)
        sink = None if sink is None else sink.chunk(num_shares)[heads_group.rank()]
    settings["first_head"] = first_head
    if rows_group is None:
        settings |= {"sink": sink, "cu_seqlens": cu_seqlens, "document_samples": document_samples}
        out = attention(*operands, **settings)
    else:
        samples = None if cu_seqlens is None or document_samples is None else _read(document_samples)
        out = _AttendRows.apply(*operands, sink, _Rows(rows_group, gathers, boundaries, samples), settings)
    return out if heads_group is None else _ExchangeHeads.apply(out, heads_group, ends, False)


# (version, numbers) of the boundaries and samples that were read, which all layers of a micro batch share.
_NUMBERS: MutableMapping[Tensor, tuple[int, tuple[int, ...]]] = WeakTensorKeyDictionary()


def _read(tensor: Tensor) -> tuple[int, ...]:
    """The numbers of a tensor, which is read once."""
    version, numbers = _NUMBERS.get(tensor, (-1, ()))
    if version != tensor._version:
        numbers = tuple(map(int, tensor.tolist()))
        _NUMBERS[tensor] = tensor._version, numbers
    return numbers


def _read_boundaries(cu_seqlens: Tensor, size: int, num_rows: int) -> tuple[int, ...]:
    """Where documents begin and end in the packed row; ValueError where they are not the whole row."""
    boundaries = _read(cu_seqlens)
    if not boundaries or list(boundaries) != sorted((0, *boundaries[1:-1], size * num_rows)):
        raise ValueError(
            f"cu_seqlens is {list(boundaries)}, and {size} context-parallel ranks hold {num_rows} tokens each; "
            f"expected numbers growing from 0 to {size * num_rows}; give those of the whole row, padding included"
        )
    return boundaries


Ends = tuple[int, ...] | None
"""Where documents begin and end in a rank's rows, two chunks of each; None where there is one document."""


def _get_ends(boundaries: tuple[int, ...], size: int) -> Ends:
    return None if len(boundaries) == 2 else tuple(end // size for end in boundaries)


class _ExchangeHeads(torch.autograd.Function):
    """[size * s, b, n / size, d] of x [s, b, n, d] where it scatters heads: all rows of the group for this rank's
    heads; else the inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, ends: Ends, scatters: bool) -> Tensor:
        ctx.form = group, ends, not scatters
        return _exchange_heads(x, group, ends, scatters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange_heads(grad, *ctx.form), None, None, None


def _exchange_heads(x: Tensor, group: Any, ends: Ends, scatters: bool) -> Tensor:
    if scatters:
        heads = x.unflatten(2, (group.size(), -1)).permute(2, 0, 1, 3, 4).contiguous()
        return _order_rows(_exchange(heads, group), ends)
    rows = _split_rows(x, group.size(), ends)
    return _exchange(rows, group).permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous()


def _exchange(parts: Tensor, group: Any) -> Tensor:
    """What every rank has for this one, [size, ...], where parts[i] is what this one has for rank i."""
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _Rows(NamedTuple):
    """How the documents of a row, which is one where it is not packed, lie over a group of ranks; and their samples."""

    group: Any
    gathers: bool
    boundaries: tuple[int, ...]
    samples: tuple[int, ...] | None

    def list_segments(self, rank: int) -> list[Segment]:
        return compute_document_segments(self.boundaries, rank, self.group.size())

    def bring_keys(self, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, list[Segment]]]:
        """Yields keys, values and segments: those of all ranks in the order of the row, where they are gathered; else
        those of this rank, of the one before, and so on around. The next are on their way while the caller computes."""
        rank, size = self.group.rank(), self.group.size()
        if self.gathers:
            ends = _get_ends(self.boundaries, size)
            keys, values = (_order_rows(_all_gather(t, self.group), ends) for t in (k, v))
            yield keys, values, compute_document_segments(self.boundaries, 0, 1)
            return
        for step in range(size):
            take = _send((k, v), self.group) if step < size - 1 else None
            yield k, v, self.list_segments((rank - step) % size)
            if take is not None:
                k, v = take()


class _AttendRows(torch.autograd.Function):
    """Attention to the keys of all ranks of a group; keeps this rank's q, k, v, output and logsumexp."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, layout: _Rows, settings: dict[str, Any]
    ) -> Tensor:
        segments = layout.list_segments(layout.group.rank())
        results: dict[int, tuple[Tensor, Tensor]] = {}
        for keys, values, columns in layout.bring_keys(k, v):
            for i, rows, part, place in _compute_pairs(segments, columns, layout, settings):
                found = attend_block(q[rows], keys[part], values[part], **place)
                results[i] = merge_blocks(results[i], found) if i in results else found
        outs, sums = zip(*(results[i] for i in sorted(results)), strict=True)
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
        segments = layout.list_segments(layout.group.rank())
        dtype = logsumexp.dtype
        grad_q = torch.zeros(q.shape, dtype=dtype, device=q.device)
        take: Callable[[], list[Tensor]] | None = None
        for keys, values, columns in layout.bring_keys(k, v):
            grads_kv = [torch.zeros(t.shape, dtype=dtype, device=q.device) for t in (keys, values)]
            for _, rows, part, place in _compute_pairs(segments, columns, layout, settings):
                whole = grad_out[rows], out[rows], logsumexp[..., rows]
                grads = differentiate_block(*whole, q[rows], keys[part], values[part], **place)
                for total, grad in zip((grad_q[rows], *(each[part] for each in grads_kv)), grads, strict=True):
                    total += grad
            if layout.gathers:
                # This rank's rows of the sum of all ranks' gradients, always in the order of ranks.
                size = layout.group.size()
                parts = (_split_rows(grad, size, _get_ends(layout.boundaries, size)) for grad in grads_kv)
                grads_kv = [_exchange(part, layout.group).sum(0) for part in parts]
                continue
            # The gradients follow their keys around: what earlier ranks found arrives while this one computes.
            if take is not None:
                for total, grad in zip(grads_kv, take(), strict=True):
                    total += grad
            take = _send(tuple(grads_kv), layout.group)
        grad_k, grad_v = grads_kv if take is None else take()
        grad_sink = differentiate_sink(grad_out, out, logsumexp, sink) if ctx.needs_input_grad[3] else None
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sink, None, None


def _send(tensors: tuple[Tensor, ...], group: Any) -> Callable[[], list[Tensor]]:
    """Sends tensors to the next rank of a group; returns what waits for those that the rank before sent."""
    ranks, place = dist.get_process_group_ranks(group), group.rank()
    # One message, because messages between two ranks could overtake each other.
    sent = torch.cat([t.reshape(-1) for t in tensors])
    both = sent, torch.empty_like(sent)  # held until they have passed
    send = dist.P2POp(dist.isend, both[0], ranks[(place + 1) % len(ranks)], group)
    works = dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, both[1], ranks[place - 1], group)])
    shapes = [t.shape for t in tensors]

    def take() -> list[Tensor]:
        for work in works:
            work.wait()
        parts = both[1].split([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    return take


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


def _compute_pairs(
    segments: list[Segment], columns: list[Segment], layout: _Rows, settings: dict[str, Any]
) -> Iterator[tuple[int, slice, slice, dict[str, Any]]]:
    """Yields the parts of rows and columns in which a query sees a key: the segment's number, its rows, the columns,
    and the settings with their positions in the masks."""
    left, right = settings.get("window_size") or (-1, -1)
    right = 0 if settings["causal"] else right
    of_document: dict[int, list[tuple[int, Segment]]] = {}
    start = 0
    for segment in columns:
        of_document.setdefault(segment.document, []).append((start, segment))
        start += segment.num_rows
    offset = 0
    for i, (document, row, num_rows) in enumerate(segments):
        rows = slice(offset, offset + num_rows)
        offset += num_rows
        # Without samples a document's masks are those of its place in the packed row.
        added = layout.boundaries[document] if layout.samples is None else 0
        own = {} if layout.samples is None else {"first_sample": layout.samples[document]}
        for start, (_, column, num_columns) in of_document[document]:
            first = max(0, (row - left - column) // _COLUMNS * _COLUMNS) if left >= 0 else 0
            last = min(num_columns, row + num_rows + right - column) if right >= 0 else num_columns
            if first < last:
                place = {"first_row": added + row, "first_column": added + column + first}
                yield i, rows, slice(start + first, start + last), {**place, **settings, **own}

"""Says which part of a call a program of attention's kernels owns, and loads and stores rows: device functions.

A program of forward and of the gradient of q owns a block of queries of one head; a program of the gradients of k and v
owns a block of keys of one key-value head. Of a packed row, a block belongs to one document.

How many blocks documents have in all is known on the device only, as the host reads no boundary. A grid of places, some
of which stay empty, holds them: document i, which begins at row boundaries[i], has the places from boundaries[i] //
BLOCK + i on. They suffice, because ceil(n / BLOCK) is at most (start + n) // BLOCK - start // BLOCK + 1; and num_rows
// BLOCK + num_documents places hold all documents. They suffice as well where a document's keys begin up to LANES - 1
keys earlier (HIDES_FIRST), as BLOCK is a multiple of LANES.

Numbers of the launch that are 1 are constants of the compiler, which have no methods: `widen` is for both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tempo_kernels.philox.kernel import LANES, load_draw

VARYING = ("key_low", "key_high", "first_sample")
"""Numbers that change with every step: listed in do_not_specialize, no value of them compiles a kernel again."""


class Program(NamedTuple):
    """What a program owns; in a packed row all numbers are those of its block's document."""

    start: Any
    """The block's first query or key."""
    sample: Any
    head: Any
    """The query head, or of a block of keys the key-value head, int64 as the sample."""
    first_query: Any
    """Where the document begins in the packed row; 0 in others."""
    num_queries: Any
    first_key: Any
    num_keys: Any
    num_hidden: Any
    """The keys at the beginning that are another document's; see `_enter_document`."""
    first_offset: Any
    """As in settings.Places; 0 where there is no limit."""
    last_offset: Any
    diagonal: Any
    first_row: Any
    first_column: Any
    key_low: Any
    """The key of dropout, and the sample of the row of a document or of the first row of a call."""
    key_high: Any
    first_sample: Any


@triton.jit
def enter_program(extras, key_low, key_high, first_sample, call, OWNS_KEYS: tl.constexpr):
    """Returns the Program of this program's number. The grid counts the blocks of one head after the other. The last
    block of queries and the first of keys go first: under a causal limit they take longest."""
    BLOCK: tl.constexpr = call.BLOCK_KEYS if OWNS_KEYS else call.BLOCK_QUERIES
    num_rows, num_heads = call.sizes.num_queries, call.sizes.num_heads
    if OWNS_KEYS:
        num_rows, num_heads = call.sizes.num_keys, num_heads // call.sizes.group_size
    num_blocks = tl.cdiv(num_rows, BLOCK)
    if extras.boundaries is not None:
        num_blocks = num_rows // BLOCK + call.sizes.num_documents
    block, index = tl.program_id(0) % num_blocks, tl.program_id(0) // num_blocks
    if not OWNS_KEYS:
        block = num_blocks - 1 - block
    sample, head = (index // num_heads).to(tl.int64), (index % num_heads).to(tl.int64)
    program = enter_row(block * BLOCK, sample, head, extras, key_low, key_high, first_sample, call)
    if extras.boundaries is not None:
        program = _enter_document(block, program, extras, call, OWNS_KEYS)
    return program


@triton.jit
def enter_row(start, sample, head, extras, key_low, key_high, first_sample, call):
    """Returns the Program of a block of a row that is not packed."""
    key_low, key_high, first_sample = load_draw(extras.key, extras.first_sample, key_low, key_high, first_sample)
    first_offset, last_offset, first_row, first_column = 0, 0, 0, 0
    if call.places.first_offset is not None:
        first_offset = call.places.first_offset
    if call.places.last_offset is not None:
        last_offset = call.places.last_offset
    if call.places.first_row is not None:
        first_row, first_column = call.places.first_row, call.places.first_column
    return Program(
        start, sample, head, 0, call.sizes.num_queries, 0, call.sizes.num_keys, 0,
        first_offset, last_offset, call.places.diagonal, first_row, first_column, key_low, key_high, first_sample,
    )  # fmt: skip


@triton.jit
def _enter_document(block, program, extras, call, OWNS_KEYS: tl.constexpr):
    """Returns the Program of a block's document, from that of the whole row.

    With call.HIDES_FIRST dropout draws by positions in the packed row, where one call of Philox serves a group of LANES
    keys. The keys then begin where a group does, and the first num_hidden of them, which are another document's, are to
    be hidden.
    """
    if OWNS_KEYS:
        document, start, first_key, num_keys, first_query, num_queries = _find_document(
            block, extras.key_boundaries, extras.boundaries, call.sizes.num_keys, call.sizes.num_queries, call,
            call.BLOCK_KEYS, call.HIDES_FIRST,
        )  # fmt: skip
    else:
        document, start, first_query, num_queries, first_key, num_keys = _find_document(
            block, extras.boundaries, extras.key_boundaries, call.sizes.num_queries, call.sizes.num_keys, call,
            call.BLOCK_QUERIES, False,
        )  # fmt: skip
    num_hidden, first_row, first_column, first_sample = 0, 0, 0, program.first_sample
    if call.HIDES_FIRST:
        num_hidden = first_key % LANES
        first_key -= num_hidden
        num_keys += num_hidden
        first_row, first_column = first_query, first_key
    if extras.samples is not None:
        first_sample = tl.load(extras.samples + document)
    diagonal = num_keys - num_queries
    return Program(
        start, program.sample, program.head, first_query, num_queries, first_key, num_keys, num_hidden,
        program.first_offset + diagonal, program.last_offset + diagonal, diagonal, first_row, first_column,
        program.key_low, program.key_high, first_sample,
    )  # fmt: skip


@triton.jit
def _find_document(place, own_ptr, other_ptr, num_own, num_other, call, BLOCK: tl.constexpr, HIDES_FIRST: tl.constexpr):
    """Returns the document of a place of the grid, and in it the block's first row, and (first row, number of rows) of
    its own side, be it queries or keys, and of the other. In a place without a block one of the numbers is 0, so that
    nothing is computed or stored. With HIDES_FIRST the own side are keys, whose blocks begin where a group does."""
    document, end = place * 0, place * 0 + call.sizes.num_documents
    while end - document > 1:
        middle = (document + end) // 2
        is_before = _load_boundary(own_ptr, middle, num_own) // BLOCK + middle <= place
        document, end = tl.where(is_before, middle, document), tl.where(is_before, end, middle)
    first_own, num_own = _load_extent(own_ptr, document, num_own)
    first_other, num_other = _load_extent(other_ptr, document, num_other)
    start = (place - first_own // BLOCK - document) * BLOCK
    # Before the first document there is none.
    num_own = tl.where(start < 0, 0, num_own)
    start = tl.maximum(start, 0)
    num_in_blocks = num_own
    if HIDES_FIRST:
        num_in_blocks = tl.where(num_own > 0, num_own + first_own % LANES, 0)
    num_other = tl.where(start < num_in_blocks, num_other, 0)
    return document, start, first_own, num_own, first_other, num_other


@triton.jit
def _load_extent(boundaries_ptr, document, num_rows):
    """Returns the document's first row and its number of rows."""
    start = _load_boundary(boundaries_ptr, document, num_rows)
    stop = _load_boundary(boundaries_ptr, document + 1, num_rows)
    return start, tl.maximum(stop - start, 0)


@triton.jit
def _load_boundary(boundaries_ptr, number, num_rows):
    """Loads a boundary; one outside of the row counts as nearest."""
    return tl.minimum(tl.maximum(tl.load(boundaries_ptr + number), 0), num_rows)


@triton.jit
def get_keys(program, call):
    """Returns (first, full_start, full_stop, stop) of the keys that a block of queries sees.

    In [full_start, full_stop) every query sees every key. first is a multiple of BLOCK_KEYS.
    """
    last_row = tl.minimum(program.start + call.BLOCK_QUERIES, program.num_queries) - 1
    first, full_start = 0, 0
    stop, full_stop = program.num_keys, program.num_keys
    if call.places.first_offset is not None:
        first = tl.maximum(program.start + program.first_offset, 0) // call.BLOCK_KEYS * call.BLOCK_KEYS
        full_start = last_row + program.first_offset
    if call.HIDES_FIRST:
        full_start = tl.maximum(full_start, program.num_hidden)
    if call.places.last_offset is not None:
        stop = tl.minimum(stop, last_row + program.last_offset + 1)
        full_stop = tl.minimum(full_stop, program.start + program.last_offset + 1)
    return first, full_start, full_stop, stop


@triton.jit
def get_queries(program, call):
    """Returns (first, full_start, full_stop, stop) of the queries that see a block of keys.

    In [full_start, full_stop) every query sees every key. first is a multiple of BLOCK_QUERIES.
    """
    last_key = tl.minimum(program.start + call.BLOCK_KEYS, program.num_keys) - 1
    first, full_start = 0, 0
    # A partial last block needs no mask: rows behind the last query have an infinite logsumexp, so p is 0.
    stop, full_stop = program.num_queries, program.num_queries + call.BLOCK_QUERIES
    if call.places.last_offset is not None:
        first = tl.maximum(program.start - program.last_offset, 0) // call.BLOCK_QUERIES * call.BLOCK_QUERIES
        full_start = last_key - program.last_offset
    if call.places.first_offset is not None:
        stop = tl.minimum(stop, last_key - program.first_offset + 1)
        full_stop = program.start - program.first_offset + 1
    if program.start + call.BLOCK_KEYS > program.num_keys:
        full_stop = 0
    if call.HIDES_FIRST:
        full_stop = tl.where(program.start < program.num_hidden, 0, full_stop)
    if program.start >= program.num_keys:
        stop = 0
    return first, full_start, full_stop, stop


@triton.jit
def widen(number):
    """Returns a whole number, be it a constant of the compiler, as int64."""
    return tl.full((), 0, tl.int64) + number


@triton.jit
def _load_rows(
    ptr, start, row, step, num_rows, DIM: tl.constexpr, BLOCK: tl.constexpr,
    num_hidden=0, HIDES_FIRST: tl.constexpr = False,
):  # fmt: skip
    """Loads rows start + row [m] of a matrix [num_rows, DIM] as [m, BLOCK], with zeros outside of the matrix, and with
    HIDES_FIRST in its first num_hidden rows.
    Only the offset of `start` needs 64 bits; kernel.MAX_ROW_ELEMENTS keeps those within a block in 32."""
    dim = tl.arange(0, BLOCK)
    inside = (start + row < num_rows)[:, None]
    if HIDES_FIRST:
        inside = inside & (start + row >= num_hidden)[:, None]
    if DIM < BLOCK:
        inside = inside & (dim < DIM)[None, :]
    pointers = ptr + widen(start) * step + (row[:, None] * step + dim[None, :])
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def load_queries(ptr, step, start, head, program, call, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Loads a block of a query head's rows of q or grad_out from `start` on, zeros behind the last."""
    ptr += (widen(program.first_query) * step.row + program.sample * step.sample + head * step.head) * call.UNIT
    row = tl.arange(0, call.BLOCK_QUERIES)
    return _load_rows(ptr, start, row, step.row * call.UNIT, program.num_queries, DIM, BLOCK)


@triton.jit
def load_keys(ptr, step, start, order, kv_head, program, call, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Loads rows start + order [n] of a key-value head of k or v, zeros for keys that nobody sees."""
    ptr += (widen(program.first_key) * step.row + program.sample * step.sample + kv_head * step.head) * call.UNIT
    return _load_rows(
        ptr, start, order, step.row * call.UNIT, program.num_keys, DIM, BLOCK, program.num_hidden, call.HIDES_FIRST
    )


@triton.jit
def load_block(q_ptr, grad_out_ptr, logsumexp_ptr, start, head, program, call):
    """Loads what backward needs of such rows: their places in [b, a, sq], q, grad_out and the logsumexp."""
    row = start + tl.arange(0, call.BLOCK_QUERIES)
    rows = (program.sample * call.sizes.num_heads + head) * call.sizes.num_queries + program.first_query + row
    q = load_queries(q_ptr, call.steps.q, start, head, program, call, call.HEAD_DIM, call.BLOCK_DIM)
    grad_out = load_queries(
        grad_out_ptr, call.steps.grad_out, start, head, program, call, call.VALUE_DIM, call.VALUE_BLOCK
    )
    logsumexp = tl.load(logsumexp_ptr + rows, mask=row < program.num_queries, other=float("inf"))
    return rows, q, grad_out, logsumexp


@triton.jit
def load_out(ptr, start, head, program, call):
    """Loads such rows of out [sq, b, a, dv], which is contiguous."""
    step = call.sizes.batch * call.sizes.num_heads * call.VALUE_DIM
    ptr += widen(program.first_query) * step + (program.sample * call.sizes.num_heads + head) * call.VALUE_DIM
    row = tl.arange(0, call.BLOCK_QUERIES)
    return _load_rows(ptr, start, row, step, program.num_queries, call.VALUE_DIM, call.VALUE_BLOCK)


@triton.jit
def store_rows(
    ptr, start, row, step, num_rows, value, DIM: tl.constexpr, BLOCK: tl.constexpr,
    num_hidden=0, HIDES_FIRST: tl.constexpr = False,
):  # fmt: skip
    """Stores value [m, BLOCK] where _load_rows reads."""
    dim = tl.arange(0, BLOCK)
    pointers = ptr + widen(start) * step + (row.to(tl.int64)[:, None] * step + dim[None, :])
    inside = (start + row < num_rows)[:, None] & (dim < DIM)[None, :]
    if HIDES_FIRST:
        inside = inside & (start + row >= num_hidden)[:, None]
    tl.store(pointers, value.to(ptr.dtype.element_ty), mask=inside)

"""Finds, on the GPU, the document of a packed row to which a program's block belongs; the host reads no boundary.

Blocks do not cross documents, so that a document has as many as its own length takes, and how many there are in all is
known on the device only. A grid of places, some of which stay empty, holds them: document i, which begins at row
boundaries[i], has the places from boundaries[i] // BLOCK + i on. They suffice, because ceil(n / BLOCK) is at most
(start + n) // BLOCK - start // BLOCK + 1; and num_rows // BLOCK + num_documents places hold all documents. They suffice
as well where a document's keys begin up to LANES - 1 keys earlier (`enter_document`), as BLOCK is a multiple of LANES.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tempo_kernels.philox.kernel import LANES


@triton.jit
def _load_boundary(boundaries_ptr, number, num_rows):
    """Loads a boundary; one outside of the row counts as nearest."""
    return tl.minimum(tl.maximum(tl.load(boundaries_ptr + number), 0), num_rows)


@triton.jit
def _load_extent(boundaries_ptr, document, num_rows):
    """Returns the document's first row and its number of rows."""
    start = _load_boundary(boundaries_ptr, document, num_rows)
    stop = _load_boundary(boundaries_ptr, document + 1, num_rows)
    return start, tl.maximum(stop - start, 0)


@triton.jit
def find_document(
    place, own_ptr, other_ptr, num_own, num_other, num_documents, BLOCK: tl.constexpr, HIDES_FIRST: tl.constexpr = False
):
    """Returns the document of a place of the grid, and in it the block's first row, and (first row, number of rows) of
    its own side, be it queries or keys, and of the other. In a place without a block one of the numbers is 0, so that
    nothing is computed or stored. With HIDES_FIRST the own side are keys, whose blocks begin where a group does."""
    document, end = place * 0, place * 0 + num_documents
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
def enter_document(num_queries, first_key, num_keys, first_offset, last_offset, HIDES_FIRST: tl.constexpr):
    """Returns (first_key, num_keys, first_offset, last_offset, diagonal, num_hidden) for a document's own queries and
    keys; the offsets given are those of a square.

    With HIDES_FIRST dropout draws by positions in the packed row, where one call of Philox serves a group of LANES
    keys. The keys then begin where a group does, and the first num_hidden of them, which are another document's, are to
    be hidden.
    """
    num_hidden = 0
    if HIDES_FIRST:
        num_hidden = first_key % LANES
        first_key -= num_hidden
        num_keys += num_hidden
    diagonal = num_keys - num_queries
    return first_key, num_keys, first_offset + diagonal, last_offset + diagonal, diagonal, num_hidden

"""Says what torch's CUDA caching allocator takes from a device for a sequence of allocations, by its rules.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings, on one stream. Sizes are rounded
up to 512 bytes. Blocks of up to 1 MiB lie in segments of 2 MiB; larger ones in segments of 20 MiB or, from 10 MiB on,
of their own size rounded up to 2 MiB. An allocation takes the smallest free block that is large enough and splits off
what is left, where that is at least 512 bytes of a small segment or more than 1 MiB of a large one. A freed block
joins its free neighbours; a segment is kept. With expandable segments every block is split like one of a small
segment; what those reserve is not simulated, nor that free memory is given back where the device is full.
"""

from __future__ import annotations

import bisect
import dataclasses

ROUNDING_BYTES = 512
SMALL_BYTES = 1 << 20
SMALL_SEGMENT_BYTES = 2 << 20
LARGE_SEGMENT_BYTES = 20 << 20
OWN_SEGMENT_BYTES = 10 << 20
SEGMENT_ROUNDING_BYTES = 2 << 20


@dataclasses.dataclass(eq=False, slots=True)
class Block:
    """A part of a segment, in use or free; of one that lies nowhere only the size counts."""

    size: int
    address: int | None = None
    is_small: bool = True
    is_free: bool = False
    requested: int = 0
    """Bytes of the tensor in it."""
    previous: Block | None = None
    """Its neighbour in the segment."""
    next: Block | None = None


class CachingAllocator:
    """Counts bytes that are asked for and, rounded, in use, now and at most, and bytes of all segments; of one stream.

    Args:
        is_expandable: with expandable segments, for which `reserved` is not counted.
        counts_reserved: whether `reserved` is asked for. What is in use does not depend on where blocks lie that are
            split to the byte, which are the small ones, or with expandable segments all: without it, those lie nowhere.
    """

    def __init__(self, *, is_expandable: bool = False, counts_reserved: bool = True) -> None:
        self.requested = self.allocated = self.peak_allocated = self.reserved = 0
        self._is_expandable, self._counts_reserved = is_expandable, counts_reserved
        # Free blocks of the large and of the small pool, by size and address, which is the order of choice.
        self._free: tuple[list[tuple[int, int, Block]], list[tuple[int, int, Block]]] = ([], [])

    def allocate(self, num_bytes: int) -> Block:
        """A block for a tensor; one of no bytes lies nowhere."""
        size = round_up(num_bytes, ROUNDING_BYTES)
        is_small = size <= SMALL_BYTES
        if num_bytes == 0 or self._is_expandable or (is_small and not self._counts_reserved):
            block = Block(size)
        else:
            block = self._take(size, is_small) or self._add_segment(size)
            rest = block.size - size
            if rest >= ROUNDING_BYTES if is_small else rest > SMALL_BYTES:
                assert block.address is not None
                behind = Block(rest, block.address + size, is_small, previous=block, next=block.next)
                if block.next is not None:
                    block.next.previous = behind
                block.size, block.next = size, behind
                self._put(behind)
        block.requested = num_bytes
        self.requested += num_bytes
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def free(self, block: Block) -> None:
        """Give a block of `allocate` back."""
        self.requested -= block.requested
        self.allocated -= block.size
        if block.address is None:
            return
        for neighbour in (block.previous, block.next):
            if neighbour is None or not neighbour.is_free:
                continue
            neighbour.is_free = False
            free = self._free[neighbour.is_small]
            del free[bisect.bisect_left(free, (neighbour.size, neighbour.address))]
            first, second = (neighbour, block) if neighbour is block.previous else (block, neighbour)
            first.size, first.next = first.size + second.size, second.next
            if second.next is not None:
                second.next.previous = first
            block = first
        self._put(block)

    def _take(self, size: int, is_small: bool) -> Block | None:
        free = self._free[is_small]
        place = bisect.bisect_left(free, (size,))
        if place == len(free):
            return None
        block = free.pop(place)[2]
        block.is_free = False
        return block

    def _add_segment(self, size: int) -> Block:
        length = SMALL_SEGMENT_BYTES
        if size > SMALL_BYTES:
            own = round_up(size, SEGMENT_ROUNDING_BYTES)
            length = own if size >= OWN_SEGMENT_BYTES else LARGE_SEGMENT_BYTES
        # Segments lie one behind the other; blocks of two have no links, and never join.
        block = Block(length, self.reserved, size <= SMALL_BYTES)
        self.reserved += length
        return block

    def _put(self, block: Block) -> None:
        assert block.address is not None
        block.is_free = True
        bisect.insort(self._free[block.is_small], (block.size, block.address, block))


def round_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple

"""Chooses which of many layers alike run, the first, one of the middle, and the last, and writes out the allocations of
all from theirs."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence

from tempo_megatron.memory.simulated.chunk_memory import Block, Key
from tempo_megatron.memory.tape.tape import FREED, Event

_Storage = tuple[int, int]
"""(the block that made it, its rank among those that the block made)."""


def compress(kinds: Iterable[object], longest: int = 3) -> list[tuple[int, int]]:
    """(index, count) of representative layers. A run of more than `longest` equal layers is represented by its first,
    one middle and its last layer.

    The first and the last of a row have other neighbours; those of the middle are alike in all they do.
    """
    found = []
    for _, row in itertools.groupby(enumerate(kinds), key=lambda each: each[1]):
        first, *others = (index for index, _ in row)
        if len(others) < longest:
            found += [(index, 1) for index in (first, *others)]
        else:
            found += [(first, 1), (others[0], len(others) - 1), (others[-1], 1)]
    return found


def repeat_layers(
    segments: Iterable[Block], times: Mapping[int | None, int]
) -> tuple[list[Block], dict[int, int]] | None:
    """The blocks of a micro batch in which every layer runs, and the storage of `segments` that each of their storages
    is a copy of; None where the layers are not alike.

    A layer of the middle frees what it made itself, or what its neighbours did, in forward and in backward. Another
    one like it frees the same of its own neighbours, if the first and the last of the three made the same.

    Args:
        segments: of a micro batch, in order; those next to one another with one key are one block.
        times: place of each layer that stands for several, whose neighbours are like it -> how many.
    """
    blocks: list[tuple[Key, list[Event]]] = [
        (key, [event for _, events in of_key for event in events])
        for key, of_key in itertools.groupby(segments, key=lambda segment: segment[0])
    ]
    places = [place for place in times if place is not None]
    layers = {(place, is_backward): i for i, ((_, place, is_backward), _) in enumerate(blocks) if place is not None}
    if places and len(layers) != sum(key[1] is not None for key, _ in blocks):
        return None
    makers = _find_makers(blocks, layers, places)
    if makers is None or not _free_alike(blocks, layers, places, makers):
        return None
    # Every storage of the copies has a number of its own.
    numbers: collections.defaultdict[tuple[_Storage, int], int] = collections.defaultdict(itertools.count().__next__)
    found: list[Block] = []
    originals: dict[int, int] = {}

    def copy(index: int, number: int) -> list[Event]:
        """The events of a block, of the copy with this number from 1, or of a layer that stands for itself."""
        (_, place, _), events = blocks[index]
        of, copied = times.get(place, 1), []
        for name, size in events:
            if size < FREED:
                copied.append((name, size))
                continue
            block, rank = makers[name]
            maker, direction = blocks[block][0][1], blocks[block][0][2]
            storages = [((block, rank), 1)]
            if of > 1 and maker != place:
                assert place is not None and maker is not None
                # A neighbour's; between two copies the neighbour is a copy, too.
                neighbour = number + maker - place
                if 1 <= neighbour <= of:
                    storages = [((layers[place, direction], rank), neighbour)]
            elif of > 1:
                storages = [((block, rank), number)]
            elif maker is not None and (last := times.get(maker, 1)) > 1:
                # Of the nearest copy; what is no neighbour frees that of all.
                nearest: dict[int | None, Sequence[int]] = {maker - 1: [1], maker + 1: [last]}
                storages = [((block, rank), each) for each in nearest.get(place, range(1, last + 1))]
            copied += [(numbers[each], size) for each in storages]
            if size != FREED:
                originals[copied[-1][0]] = name
        return copied

    for index, (key, _) in enumerate(blocks):
        _, place, is_backward = key
        copies = range(1, times.get(place, 1) + 1)
        for number in reversed(copies) if is_backward else copies:
            found.append((key, copy(index, number)))
    return found, originals


def _list_made(events: Iterable[Event]) -> list[Event]:
    return [(name, size) for name, size in events if size != FREED]


def _find_makers(
    blocks: Sequence[tuple[Key, Sequence[Event]]], layers: Mapping[tuple[int, bool], int], places: Iterable[int]
) -> dict[int, _Storage] | None:
    """Who made each storage; None where a layer that stands for several made what a neighbour did not.

    A neighbour may make more: the chunk's input, a norm behind all layers, what the first of all makes once. Its other
    storages then have the ranks of those that the layer makes.
    """
    ranks: dict[int, list[int]] = {}
    for place, side, is_backward in itertools.product(places, (-1, 1), (False, True)):
        wanted, has = (
            [size for _, size in _list_made(blocks[layers[each, is_backward]][1])] for each in (place, place + side)
        )
        found = _align(wanted, has)
        if found is None:
            return None
        ranks[layers[place + side, is_backward]] = found
    made = ((block, _list_made(events)) for block, (_, events) in enumerate(blocks))
    return {
        name: (block, ranks[block][place] if block in ranks else place)
        for block, names in made
        for place, (name, _) in enumerate(names)
    }


def _align(wanted: Sequence[int], has: Sequence[int]) -> list[int] | None:
    """For each of `has` its place in `wanted`, or a negative number of its own; None where it has not all, in order.

    Where sizes alone leave the choice, what is made first has a number of its own.
    """
    if list(wanted) == has[: len(wanted)] != has[len(has) - len(wanted) :]:
        return [*range(len(has))]
    ranks, left = [-1 - place for place in range(len(has))], len(wanted)
    for place in reversed(range(len(has))):
        if left and has[place] == wanted[left - 1]:
            left -= 1
            ranks[place] = left
    return None if left else ranks


def _free_alike(
    blocks: Sequence[tuple[Key, Sequence[Event]]],
    layers: Mapping[tuple[int, bool], int],
    places: Iterable[int],
    makers: Mapping[int, _Storage],
) -> bool:
    """Whether a layer that stands for several and its neighbours free the same of one another, and it of no other."""

    def list_freed(place: int, of: int | None) -> list[tuple[bool, bool, int]]:
        """What a layer frees of another's: (in backward, made in backward, its rank), in order."""
        return sorted(
            (is_backward, blocks[block][0][2], rank)
            for is_backward in (False, True)
            for name, size in blocks[layers[place, is_backward]][1]
            for block, rank in [makers[name]]
            if size == FREED and blocks[block][0][1] == of
        )

    others = {None, *(place for place, _ in layers)}
    return all(
        all(list_freed(place + side, place) == list_freed(place, place - side) for side in (-1, 1))
        and not any(list_freed(place, of) for of in others - {place - 1, place, place + 1})
        for place in places
    )

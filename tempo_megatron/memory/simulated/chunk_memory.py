"""What one micro batch does to the memory of one pipeline chunk: every storage that is made and freed, in order.

Of many layers alike three run, the first, one of the middle, and the last; the events of all are written out from
theirs.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from tempo_megatron.memory.tape.tape import FREED, GRADIENT, Event

EMBEDDING, LAYERS, HEAD = "embedding", "layers", "loss head"
PARTS = (EMBEDDING, LAYERS, HEAD)

Key = tuple[str, int | None, bool]
"""Whose operations run: the part, the layer's place, and whether it is backward."""
Block = tuple[Key, Sequence[Event]]
Elements = collections.Counter[tuple[bool, bool]]
"""(whether they are an expert's, whether they multiply in float8) -> how many elements parameters have."""
_Storage = tuple[int, int]
"""(the block that made it, its rank among those that the block made)."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """A stretch of the forward or the backward: the operations of one layer, of the embedding, or of the loss head."""

    part: str
    """EMBEDDING, LAYERS or HEAD: whose operations run."""

    is_backward: bool
    events: tuple[Event, ...]
    """Without GRADIENT."""

    rise: int
    """Bytes that are alive at most, beyond what was at its beginning."""

    growth: int
    """Bytes that are alive at its end, beyond what was at its beginning; negative where more is freed than made."""

    gradient_growth: int
    """The part of `growth` that is gradients of parameters which had none before."""

    num_gradients: int
    """Elements of the parameters whose gradient is complete when it ends."""

    num_before: int
    """Segments of the same part before it, in the same direction."""

    workspaces: int
    """The part of `rise` that attention's workspaces are."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    shape: tuple[int, ...]
    is_matrix: bool
    """Whether it has two dimensions and is no word embedding or output layer."""

    is_expert: bool = False
    """Whether it is a routed expert's."""

    owner: int | str | None = None
    """The layer that it is of, counted from 0, EMBEDDING, or HEAD for the output layer."""

    is_factor: bool = False
    """Whether its chunk multiplies with it, as a linear's or the loss head's weight."""

    in_float8: bool = False
    """Whether it does so in float8."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class ChunkMemory:
    """A chunk of the model: what it is made of, and what one micro batch adds to that."""

    batch_bytes: tuple[int, ...]
    """Of each of the micro batch's own tensors: tokens, labels, positions, masks that layers keep."""

    mask_bytes: int
    """Of its masks that nobody keeps: they go when its forward is over."""

    global_buffer_bytes: int
    """Megatron's global memory buffer, of which a process has one for all its chunks and micro batches."""

    input_bytes: int
    """The hidden states that it gets from another chunk; 0 where it has the embedding. They are its first storage, and
    stay behind the backward, with their gradient."""

    output_bytes: int
    """Those that it gives to another chunk; 0 where it has the loss head."""

    parameters: tuple[Parameter, ...]
    """In the order of the modules."""

    forward: tuple[Segment, ...]
    backward: tuple[Segment, ...]

    @functools.cached_property
    def elements(self) -> dict[int | str | None, Elements]:
        """Of the parameters of each owner."""
        found: dict[int | str | None, Elements] = {}
        for each in self.parameters:
            found.setdefault(each.owner, Elements())[each.is_expert, each.in_float8] += each.size
        return found

    @property
    def num_parameters(self) -> int:
        return sum(of.total() for of in self.elements.values())

    @property
    def float8_weights(self) -> int:
        """Elements of the weights with which it multiplies in float8."""
        return sum(of[False, True] + of[True, True] for of in self.elements.values())

    @functools.cached_property
    def layers(self) -> list[Elements]:
        """Of the parameters of each layer."""
        return [of for owner, of in self.elements.items() if isinstance(owner, int)]

    @property
    def kept_bytes(self) -> int:
        """What a micro batch whose forward is over and whose backward is yet to come keeps alive."""
        return sum(segment.growth for segment in self.forward)


def divide_blocks(
    blocks: Iterable[Block], gradients: Mapping[int, tuple[int, int]], workspaces: Mapping[int, int]
) -> list[Segment]:
    """The segments of a micro batch; a block in which the first of all gradients is complete is two.

    Args:
        blocks: in order.
        gradients: number of each GRADIENT -> the parameter's elements, and the bytes that are new.
        workspaces: number of a storage -> bytes of attention's workspaces that are alive when it is made.
    """
    found: list[Segment] = []
    sizes: dict[int, int] = {}
    before: collections.Counter[tuple[str, bool]] = collections.Counter()
    num_gradients = 0
    for (part, _, is_backward), events in blocks:
        first = 0
        if num_gradients == 0:
            first = next((place for place, (_, size) in enumerate(events) if size == GRADIENT), 0)
        for own in [events[:first], events[first:]] if first else [events]:
            rise = growth = gradient_growth = of_attention = 0
            for number, size in own:
                if size >= 0:
                    sizes[number] = size
                    growth += size
                    if growth > rise:
                        rise, of_attention = growth, workspaces.get(number, 0)
                elif size == FREED:
                    growth -= sizes.pop(number)
                elif size == GRADIENT:
                    num_gradients += gradients[number][0]
                    gradient_growth += gradients[number][1]
            found.append(
                Segment(
                    part=part,
                    is_backward=is_backward,
                    events=tuple((max(0, number), size) for number, size in own if size != GRADIENT),
                    rise=rise,
                    growth=growth,
                    gradient_growth=gradient_growth,
                    num_gradients=num_gradients,
                    num_before=before[part, is_backward],
                    workspaces=of_attention,
                )
            )
            before[part, is_backward] += 1
    return found


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
    blocks: list[Block] = [
        (key, [event for _, events in of_key for event in events])
        for key, of_key in itertools.groupby(segments, key=lambda segment: segment[0])
    ]
    repeated = [place for place in times if place is not None]
    layers = {(place, is_backward): i for i, ((_, place, is_backward), _) in enumerate(blocks) if place is not None}
    if repeated and len(layers) != sum(key[1] is not None for key, _ in blocks):
        return None
    makers = _find_makers(blocks, layers, repeated)
    if makers is None:
        return None
    # Of every layer the place of the one that stands for it, and where the copies of each begin.
    places = [place for place in sorted({place for place, _ in layers}) for _ in range(times.get(place, 1))]
    begins: dict[int | None, int] = {place: places.index(place) for place in places}
    # Every storage of the copies has a number of its own.
    numbers: collections.defaultdict[tuple[_Storage, int], int] = collections.defaultdict(itertools.count().__next__)

    def list_copies(name: int, place: int | None, layer: int) -> list[int]:
        """The storages that `layer` means by a name of the one at `place`: its own or its neighbour's copy, and of what
        is no neighbour all copies."""
        block, rank = makers[name]
        _, maker, is_backward = blocks[block][0]
        meant: Iterable[int] = [0]
        if maker is not None and (place is None or abs(maker - place) > 1):
            meant = range(begins[maker], begins[maker] + times.get(maker, 1))
        elif maker is not None and place is not None:
            meant = [layer + maker - place]
            if places[meant[0]] != maker:
                block = layers[places[meant[0]], is_backward]
        return [numbers[(block, rank), each] for each in meant]

    found: list[Block] = []
    originals: dict[int, int] = {}
    freed: list[tuple[int, bool]] = []
    expected: dict[int, bool] = {}
    for key, events in blocks:
        _, place, is_backward = key
        copies = range(times.get(place, 1))
        for copy in reversed(copies) if is_backward else copies:
            copied: list[Event] = []
            for name, size in events:
                own = list_copies(name, place, begins.get(place, 0) + copy) if size >= FREED else [name]
                copied += [(number, size) for number in own]
                if size == FREED:
                    expected[name] = is_backward
                    freed += [(number, is_backward) for number in own]
                elif size > FREED:
                    originals[own[0]] = name
            found.append((key, copied))
    # A copy is freed once, in the direction in which its original is.
    wanted = {number: expected[name] for number, name in originals.items() if name in expected}
    return (found, originals) if len(freed) == len(wanted) and dict(freed) == wanted else None


def _find_makers(
    blocks: Sequence[tuple[Key, Sequence[Event]]], layers: Mapping[tuple[int, bool], int], places: Iterable[int]
) -> dict[int, _Storage] | None:
    """Who made each storage; None where a layer that stands for several made what a neighbour did not.

    A neighbour may make more: the chunk's input, a norm behind all layers, what the first of all makes once. Its other
    storages then have the ranks of those that the layer makes.
    """
    made = [[event for event in events if event[1] != FREED] for _, events in blocks]
    ranks: dict[int, list[int]] = {}
    for place, side, is_backward in itertools.product(places, (-1, 1), (False, True)):
        wanted, has = ([size for _, size in made[layers[each, is_backward]]] for each in (place, place + side))
        found = _align(wanted, has)
        if found is None:
            return None
        ranks[layers[place + side, is_backward]] = found
    return {
        name: (block, ranks[block][place] if block in ranks else place)
        for block, names in enumerate(made)
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

"""What one micro batch does to the memory of one pipeline chunk: every storage that is made and freed, in order."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from tempo_megatron.memory.tape.tape import FREED, GRADIENT, Event

EMBEDDING, LAYERS, HEAD = "embedding", "layers", "loss head"
PARTS = (EMBEDDING, LAYERS, HEAD)

Key = tuple[str, int | None, bool]
"""Whose operations run: the part, the layer's place, and whether it is backward."""
Block = tuple[Key, Sequence[Event]]


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

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class LayerParameters:
    """Elements of a layer's parameters."""

    others: int
    """That are no expert's."""

    experts: int
    float8_others: int
    """Of the first, the weights that multiply in float8."""

    float8_experts: int

    @property
    def total(self) -> int:
        return self.others + self.experts


@dataclasses.dataclass(frozen=True)
class ChunkMemory:
    """A chunk of the model: what it is made of, and what one micro batch adds to that."""

    num_parameters: int
    num_expert_parameters: int
    """Of its parameters, those of routed experts."""

    batch_bytes: tuple[int, ...]
    """Of each of the micro batch's own tensors: tokens, labels, positions, masks that layers keep."""

    mask_bytes: int
    """Of its masks that nobody keeps: they go when its forward is over."""

    largest_layer_parameters: int
    """Parameters of its largest layer, embedding or output layer: what ZeRO-3 gathers at once at least."""

    global_buffer_bytes: int
    """Megatron's global memory buffer, of which a process has one for all its chunks and micro batches."""

    input_bytes: int
    """The hidden states that it gets from another chunk; 0 where it has the embedding. They are its first storage, and
    stay behind the backward, with their gradient."""

    output_bytes: int
    """Those that it gives to another chunk; 0 where it has the loss head."""

    parameters: tuple[Parameter, ...]
    """In the order of the modules."""

    layer_parameters: tuple[LayerParameters, ...]
    """Of each layer."""

    float8_weights: int
    """Elements of the weights with which it multiplies in float8."""

    linear_shapes: frozenset[tuple[int, ...]]
    """Of the weights with which it multiplies, the loss head's among them."""

    forward: tuple[Segment, ...]
    backward: tuple[Segment, ...]

    @property
    def micro_batch_bytes(self) -> int:
        return sum(self.batch_bytes)

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

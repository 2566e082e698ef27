"""Follows what one micro batch does to the memory of one pipeline chunk, phase by phase."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

EMBEDDING, LAYERS, HEAD = "embedding", "layers", "loss head"
PARTS = (EMBEDDING, LAYERS, HEAD)


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of the forward or the backward, in bytes relative to its beginning."""

    part: str
    """EMBEDDING, LAYERS or HEAD: whose operations run."""

    rise: int
    """What is alive at most, beyond what was at the beginning."""

    growth: int
    """What is alive at the end, beyond what was at the beginning; negative where more is freed than made."""

    gradient_growth: int = 0
    """The part of `growth` that is gradients of parameters which had none before."""

    num_gradients: int = 0
    """Elements of the parameters whose gradient becomes complete in it."""

    workspaces: int = 0
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
    parameter_bytes: int
    num_expert_parameters: int
    """Of its parameters, those of routed experts."""

    micro_batch_bytes: int
    """The micro batch's own tensors: tokens, labels, positions, masks that layers keep."""

    mask_bytes: int
    """Of its masks that nobody keeps: they go when its forward is over."""

    largest_layer_parameters: int
    """Parameters of its largest layer, embedding or output layer: what ZeRO-3 gathers at once at least."""

    global_buffer_bytes: int
    """Megatron's global memory buffer, of which a process has one for all its chunks and micro batches."""

    input_bytes: int
    """The hidden states that it gets from another chunk; 0 where it has the embedding."""

    output_bytes: int
    """Those that it gives to another chunk; 0 where it has the loss head."""

    parameters: tuple[Parameter, ...]
    """In the order of the modules."""

    layer_parameters: tuple[LayerParameters, ...]
    """Of each layer."""

    float8_weights: int
    """Elements of the weights with which it multiplies in float8."""

    linear_shapes: frozenset[tuple[int, int]]
    """Of the weights with which it multiplies, the loss head's among them."""

    forward: tuple[Phase, ...]
    backward: tuple[Phase, ...]

    @property
    def kept_bytes(self) -> int:
        """What a micro batch whose forward is over and whose backward is yet to come keeps alive."""
        return sum(phase.growth for phase in self.forward)

    @property
    def bytes_in_flight(self) -> int:
        """What a micro batch between forward and backward takes, its own tensors included."""
        return self.kept_bytes + self.micro_batch_bytes

    def count_micro_batch(self, *, in_forward: bool) -> int:
        """The micro batch's own tensors in its forward or backward."""
        return self.micro_batch_bytes + (self.mask_bytes if in_forward else 0)

    def list_moments(self, *, in_backward: bool, is_combined: bool = False) -> Iterator[Moment]:
        """The highest moment of each phase of the forward, or of the backward.

        is_combined: whether the next micro batch's forward runs beside the backward, one phase of each at a time, which
            begins with what the embedding makes (megatron-core 0.16.1, core/models/common/model_chunk_schedule_plan.py:
            TransformerModelChunkSchedulePlan.run). Its tensors count as transients.
        """
        ahead = [
            self.micro_batch_bytes + self.mask_bytes + sum(phase.growth for phase in self.forward[: place + 1])
            for place in range(len(self.backward))
        ]
        standing = dict.fromkeys(PARTS, 0)
        gradients = num_gradients = 0
        for phases, is_asked in ((self.forward, not in_backward), (self.backward, in_backward)):
            before = dict.fromkeys(PARTS, 0)
            for place, phase in enumerate(phases):
                num_gradients += phase.num_gradients
                if is_asked:
                    name = f"{'backward' if in_backward else 'forward'} of the {phase.part}"
                    rise = phase.rise + (ahead[place] if is_combined and in_backward else 0)
                    yield Moment(
                        name=name,
                        part=phase.part,
                        rise=rise,
                        workspaces=phase.workspaces,
                        growth=phase.growth,
                        gradient_bytes=gradients,
                        num_gradients=num_gradients,
                        num_before=before[phase.part],
                        standing=dict(standing),
                    )
                before[phase.part] += 1
                standing[phase.part] += phase.growth - phase.gradient_growth
                gradients += phase.gradient_growth


@dataclasses.dataclass(frozen=True)
class Moment:
    """What one micro batch has alive at the highest point of one phase."""

    name: str
    part: str
    rise: int
    """Beyond what stood when the phase began."""

    workspaces: int
    """The part of `rise` that attention's workspaces are."""

    growth: int
    """What stands when the phase ends, beyond that."""

    gradient_bytes: int
    num_gradients: int
    """Elements of the parameters whose gradient is complete when the phase ends."""

    num_before: int
    """Phases of the same part before it, in the same direction."""

    standing: dict[str, int]
    """Part -> what of it stood when the phase began."""

    @property
    def num_bytes(self) -> int:
        return self.rise + self.gradient_bytes + sum(self.standing.values())


def compress(kinds: Iterable[object], longest: int = 3) -> list[tuple[int, int]]:
    """(index, count) of representative layers. A run of more than `longest` equal layers is represented by its first,
    one middle and its last layer.

    The first and the last of a row have other neighbours; those of the middle are alike in all they do.
    """
    rows: list[list[int]] = []
    previous: object = None
    for index, kind in enumerate(kinds):
        if rows and kind == previous:
            rows[-1].append(index)
        else:
            rows.append([index])
        previous = kind
    found = []
    for row in rows:
        if len(row) > longest:
            found += [(row[0], 1), (row[1], len(row) - 2), (row[-1], 1)]
        else:
            found += [(index, 1) for index in row]
    return found

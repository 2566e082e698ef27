"""Counts what Megatron-FSDP holds where it shards weights, gradients and optimizer states (optim_grads_params).

References are to Megatron-LM 0.19.2, from megatron/core/distributed/fsdp/src/megatron_fsdp/. A layer is a unit. A
rank's part of a unit's weights, of their main copies and of their gradients are buffers (param_and_grad_buffer.py:
ParamAndGradBuffer._init_each_parameter_group_buffers). The weights of a unit are gathered before its forward, with
those of the units behind it up to a limit, and freed after it; in backward with those of the units before it. Weights
outside the units stay gathered, since 378d81fbd3 between steps too (AllGatherPipeline.all_gather_params and reset;
before, synchronize_param_gather freed them). A gradient is copied
into a buffer of its whole unit, which is freed when more elements wait to be reduced than a limit, and at the latest
when backward ends (megatron_fsdp.py: _grad_acc; GradReducePipeline.wait_for_previous_grad_reduce).

The buffers are made on a stream of their own (training/training.py:2523 of Megatron-LM at d98e8a64dd), unit by unit: a
rank's part of the weights, the whole unit, from which it is filled, and the part of the main copies; then one buffer of
all gradients. What torch's allocator adds to these and in a step is counted; what it adds to Adam's moments is not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch

from tempo_megatron.memory.rank.standing import FLOAT32, Born, Buckets, Standing, Tensor
from tempo_megatron.memory.run import MegatronFsdp
from tempo_megatron.memory.simulated.chunk_memory import EMBEDDING, HEAD, LAYERS, ChunkMemory, Elements, Segment


@dataclasses.dataclass(frozen=True)
class ShardedChunk(Buckets):
    """The chunk of a stage whose ranks share its weights. What it reduces is counted among what waits."""

    fsdp: MegatronFsdp
    memory: ChunkMemory
    dtype: torch.dtype
    """Of the weights."""
    has_float8: bool
    """Whether those that multiply in float8 are in it (--fp8-param-gather)."""
    ranks: int
    expert_ranks: int
    """That share what is no expert, and that share an expert."""

    def stand(self) -> Standing:
        """All of the rank's tensors: its part of every unit's weights, gradients and states, and what passes."""
        return Standing(tensors=tuple(self._list_tensors()), buckets=self)

    def _list_tensors(self) -> Iterator[Tensor]:
        of_main, gradients, converted = self.fsdp.main_bytes or 0, 0, 0
        groups = [(math.ceil(size / ranks), size, ranks, is_float8) for size, ranks, is_float8 in self._list_groups()]
        for own, size, ranks, is_float8 in groups:
            of_weight, of_gradient = 1 if is_float8 else self.dtype.itemsize, self._get_gradient_bytes(is_float8)
            yield Tensor("weights", own * of_weight, is_in_buffers=True)
            yield Tensor("weights", size * of_weight if ranks > 1 else 0, Born.PASSING, is_in_buffers=True)
            yield Tensor("optimizer states", own * of_main, is_in_buffers=True)
            gradients += own * of_gradient
            # The optimizer's copies of gradients of another dtype than what they change.
            of_state = of_main or self.dtype.itemsize
            converted += own * of_state if of_gradient != of_state else 0
        yield Tensor("gradients", gradients, is_in_buffers=True)
        yield Tensor("communication buffers", self._count_outside() if self.fsdp.keeps_outer_weights else 0)
        yield Tensor("gradients", converted, Born.EACH_STEP)
        for own, *_ in groups:
            yield from [Tensor("optimizer states", own * FLOAT32, Born.FIRST_STEP)] * 2

    def list_held(self, segment: Segment) -> dict[tuple[str, int | None], int]:
        """Bytes of the weights of each unit that is gathered, and of its gradients that are not reduced yet.

        A unit is its layer's place; None is what is outside the units.
        """
        layers, place = self.memory.layers, segment.num_before
        units = range(len(layers))
        ahead: Sequence[int] = ()
        if segment.part == LAYERS:
            ahead = units[: len(layers) - place][::-1] if segment.is_backward else units[place:]
        elif segment.part == EMBEDDING and not segment.is_backward:
            ahead = units
        found: dict[tuple[str, int | None], int] = {("weights", unit): size for unit, size in self._gather(ahead)}
        if not self.fsdp.keeps_outer_weights:
            found["weights", None] = self._count_outside()
        if not segment.is_backward:
            return found
        done = units[len(layers) - {HEAD: 0, LAYERS: place + 1, EMBEDDING: len(layers)}[segment.part] :]
        waiting = max(0, segment.num_gradients - sum(layers[unit].total() for unit in done)) * (self.ranks > 1)
        of_weight, of_float8 = (
            self.fsdp.communicated_bytes or self._get_gradient_bytes(is_float8) for is_float8 in (False, True)
        )
        found["gradients", None] = waiting * of_weight
        elements = 0
        for unit in done:
            # Those of the unit whose backward runs; before them, the latest first, as many as may wait.
            if elements > self.fsdp.unit_elements:
                break
            shared, float8 = self._count_shared(layers[unit])
            elements += shared
            found["gradients", unit] = (shared - float8) * of_weight + float8 * of_float8
        return found

    def _list_groups(self) -> Iterator[tuple[int, int, bool]]:
        """Elements of the weights that are one buffer, ranks that share them, and whether they are in float8."""
        layers = self.memory.layers
        yield self.memory.num_parameters - sum(each.total() for each in layers), self.ranks, False
        for each in layers:
            for is_expert, ranks in ((False, self.ranks), (True, self.expert_ranks)):
                float8 = each[is_expert, True] * self.has_float8
                yield each[is_expert, False] + each[is_expert, True] - float8, ranks, False
                yield float8, ranks, True

    def _count_outside(self) -> int:
        """Bytes of the weights outside the units where they are gathered."""
        outside, *_ = next(self._list_groups())
        return self.dtype.itemsize * outside * (self.ranks > 1)

    def _gather(self, units: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The first of these units, and those that follow it up to the limit, each with the bytes of its weights."""
        elements = 0
        for place, unit in enumerate(units):
            if elements >= self.fsdp.unit_elements // 2:
                break
            size, float8 = self._count_shared(self.memory.layers[unit])
            elements += size if place else 0
            yield unit, size * self.dtype.itemsize - float8 * (self.dtype.itemsize - 1)

    def _count_shared(self, layer: Elements) -> tuple[int, int]:
        """Elements that other ranks share, so that they are gathered, and those of them that are in float8."""
        shares, shares_experts = self.ranks > 1, self.expert_ranks > 1
        others, float8 = (layer[False, each] * shares + layer[True, each] * shares_experts for each in (False, True))
        return others + float8, float8 * self.has_float8

    def _get_gradient_bytes(self, is_float8: bool) -> int:
        return self.fsdp.gradient_bytes or (2 if is_float8 else self.dtype.itemsize)

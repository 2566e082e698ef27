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
all gradients. What torch's allocator adds to these is counted; what it adds to Adam's moments and in a step is not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from tempo_megatron.memory.estimate.allocator import CachingAllocator
from tempo_megatron.memory.estimate.model_states import ModelStates
from tempo_megatron.memory.run import MegatronFsdp
from tempo_megatron.memory.simulated.chunk_memory import EMBEDDING, HEAD, LAYERS, ChunkMemory, LayerParameters, Segment

_MOMENTS = 8
"""Bytes of Adam's two, in float32."""


@dataclasses.dataclass(frozen=True)
class ShardedChunk:
    """The chunk of a stage whose ranks share its weights.

    Args:
        fsdp: of the run.
        memory: of the chunk.
        dtype: of the weights.
        has_float8: whether those that multiply in float8 are in it (--fp8-param-gather).
        ranks: that share what is no expert.
        expert_ranks: that share an expert.
    """

    fsdp: MegatronFsdp
    memory: ChunkMemory
    dtype: torch.dtype
    has_float8: bool
    ranks: int
    expert_ranks: int

    def count_states(self) -> ModelStates:
        """Of the rank, between its micro batches."""
        layers, of_experts = self.memory.layer_parameters, self.memory.num_expert_parameters
        float8, float8_experts = (
            sum(getattr(each, name) for each in layers) if self.has_float8 else 0
            for name in ("float8_others", "float8_experts")
        )
        others = self.memory.num_parameters - of_experts
        sizes = {
            False: self._share(others - float8, of_experts - float8_experts),
            True: self._share(float8, float8_experts),
        }
        own = sum(sizes.values())
        gradients = sum(self._find_gradient_bytes(is_float8) * size for is_float8, size in sizes.items())
        of_state = self.fsdp.main_bytes or self.dtype.itemsize
        # The optimizer's copies of gradients of another dtype than what they change, until the next step.
        converted = sum(
            of_state * size for is_float8, size in sizes.items() if self._find_gradient_bytes(is_float8) != of_state
        )
        return ModelStates(
            weights=self.dtype.itemsize * sizes[False] + sizes[True],
            optimizer_states=((self.fsdp.main_bytes or 0) + _MOMENTS) * own,
            communication_buffers=self._count_outside() if self.fsdp.keeps_outer_weights else 0,
            standing_gradients=gradients,
            gradients=gradients + converted,
            gradients_at_rest=gradients + converted,
        )

    def count_rounding(self, allocator: CachingAllocator) -> int:
        """Bytes that an empty allocator counts beyond those of the buffers."""
        total = num_gradient_bytes = 0
        for size, ranks, is_float8 in self._list_groups():
            own, of_weight = math.ceil(size / ranks), 1 if is_float8 else self.dtype.itemsize
            of_main = self.fsdp.main_bytes or 0
            num_gradient_bytes += own * self._find_gradient_bytes(is_float8)
            total += own * (of_weight + of_main)
            allocator.allocate(own * of_weight)
            whole = allocator.allocate(size * of_weight if ranks > 1 else 0)
            allocator.allocate(own * of_main)
            allocator.free(whole)
        allocator.allocate(num_gradient_bytes)
        return allocator.allocated - total - num_gradient_bytes

    def count_held(self, segment: Segment) -> int:
        """Bytes of the weights of units that are gathered, and of gradients that are not reduced yet."""
        layers, place = self.memory.layer_parameters, segment.num_before
        ahead: tuple[LayerParameters, ...] = ()
        if segment.part == LAYERS:
            ahead = layers[: len(layers) - place][::-1] if segment.is_backward else layers[place:]
        elif segment.part == EMBEDDING and not segment.is_backward:
            ahead = layers
        gathered = self._gather(ahead) + (0 if self.fsdp.keeps_outer_weights else self._count_outside())
        if not segment.is_backward:
            return gathered
        done = layers[::-1][: {HEAD: 0, LAYERS: place + 1, EMBEDDING: len(layers)}[segment.part]]
        waiting = max(0, segment.num_gradients - sum(each.total for each in done)) * (self.ranks > 1)
        found, elements = waiting * self._find_communicated_bytes(False), 0
        for each in reversed(done):
            # Those of the unit whose backward runs; before them, the latest first, as many as may wait.
            if elements > self.fsdp.unit_elements:
                break
            elements += self._count_shared(each)
            found += self._count_gradients(each)
        return gathered + found

    def count_flush(self, segment: Segment) -> int:
        """None: what is reduced is counted among what waits."""
        return 0

    def _list_groups(self) -> Iterator[tuple[int, int, bool]]:
        """Elements of the weights that are one buffer, ranks that share them, and whether they are in float8."""
        layers = self.memory.layer_parameters
        yield self.memory.num_parameters - sum(each.total for each in layers), self.ranks, False
        for each in layers:
            for size, float8, ranks in (
                (each.others, each.float8_others, self.ranks),
                (each.experts, each.float8_experts, self.expert_ranks),
            ):
                yield size - float8 * self.has_float8, ranks, False
                yield float8 * self.has_float8, ranks, True

    def _count_outside(self) -> int:
        """Bytes of the weights outside the units where they are gathered."""
        outside = self.memory.num_parameters - sum(each.total for each in self.memory.layer_parameters)
        return self.dtype.itemsize * outside * (self.ranks > 1)

    def _gather(self, layers: tuple[LayerParameters, ...]) -> int:
        """Bytes of the first of these units, and of those that follow it up to the limit."""
        found = elements = 0
        for place, layer in enumerate(layers):
            if elements >= self.fsdp.unit_elements // 2:
                break
            size = self._count_shared(layer)
            elements += size if place else 0
            found += size * self.dtype.itemsize - self._count_float8(layer) * (self.dtype.itemsize - 1)
        return found

    def _count_gradients(self, layer: LayerParameters) -> int:
        float8 = self._count_float8(layer)
        others = self._count_shared(layer) - float8
        return others * self._find_communicated_bytes(False) + float8 * self._find_communicated_bytes(True)

    def _count_shared(self, layer: LayerParameters) -> int:
        """Elements that other ranks share, so that they are gathered."""
        return layer.others * (self.ranks > 1) + layer.experts * (self.expert_ranks > 1)

    def _count_float8(self, layer: LayerParameters) -> int:
        """Of those elements the ones that are in float8."""
        shared = layer.float8_others * (self.ranks > 1) + layer.float8_experts * (self.expert_ranks > 1)
        return shared * self.has_float8

    def _share(self, others: int, experts: int) -> int:
        return math.ceil(others / self.ranks) + math.ceil(experts / self.expert_ranks)

    def _find_gradient_bytes(self, is_float8: bool) -> int:
        return self.fsdp.gradient_bytes or (2 if is_float8 else self.dtype.itemsize)

    def _find_communicated_bytes(self, is_float8: bool) -> int:
        return self.fsdp.communicated_bytes or self._find_gradient_bytes(is_float8)

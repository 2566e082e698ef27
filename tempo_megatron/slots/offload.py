"""Moves what layers keep to the host, as the `offload` of a TempoConfig says.

The stacks of a model (a GPT's decoder, a BERT's encoder, both of a T5, a hybrid stack) are the modules that call
layers. All models of a rank share one engine: the chunks of an interleaved pipeline take turns on the same link.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state

from tempo_kernels.offload import MIN_BYTES, Device, Engine, Moves, Offload, move_all, move_nothing
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.operations import LAYER, OFFLOAD_ROWS, STACKS
from tempo_megatron.words.argument_types import format_bytes

_GRAPHS = "in which a layer's tensors have fixed places"
_REFUSED = {
    "cpu_offloading": "which moves the same tensors",
    "fine_grained_activation_offloading": "which moves the same tensors",
    "distribute_saved_activations": "which cuts up the inputs of layers after they were kept",
    "overlap_moe_expert_parallel_comm": "which runs layers in pieces",
    **dict.fromkeys(("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"), _GRAPHS),
}


class Offloading:
    """The offloading of one rank.

    Args:
        device, min_bytes: as of Engine and of Offload.
        num_in_flight: how many forwards of one chunk wait for their backward at once.
    """

    def __init__(self, device: Device | None = None, *, num_in_flight: int = 1, min_bytes: int = MIN_BYTES) -> None:
        self.engine = Engine(device)
        self._num_in_flight, self._min_bytes = num_in_flight, min_bytes
        self._offloads: list[Offload] = []
        self.num_layers = 0
        """Layers of this rank that move something."""

    def add(self, model: Any, tempo_config: TempoConfig) -> None:
        """Lets the layers of a GPTModel, BertModel, T5Model or HybridModel move what `tempo_config` says.

        Raises ValueError for a TransformerConfig with which they cannot.
        """
        if not tempo_config.offloads:
            return
        _refuse(model.config)
        for stack in STACKS:
            block: Any = getattr(model, stack, None)
            layers = {layer: _read_moves(tempo_config, layer, stack) for layer in getattr(block, "layers", ())}
            moving = [layer for layer, moves in layers.items() if moves is not move_nothing]
            if not moving:
                continue
            self.num_layers += len(moving)
            self.engine.num_groups = self.num_layers * self._num_in_flight
            self._offloads.append(Offload(block, layers, self.engine, min_bytes=self._min_bytes))

    def describe(self) -> str:
        """One sentence on what is moved, once a step was trained; before, what is going to be."""
        moves = f"{self.num_layers} layer{'s' if self.num_layers != 1 else ''} of this rank"
        if not self.engine.moved_bytes:
            return f"{moves} move what they keep to host memory, which the first step takes"
        stalls = self.engine.num_stalls
        waited = f"; backward waited for {stalls} tensors that nobody had asked for earlier" if stalls else ""
        return (
            f"{moves} move what they keep to {format_bytes(self.engine.pool.num_bytes)} of host memory, and no more "
            f"than {format_bytes(self.engine.peak_device_bytes)} of it were on the device at once{waited}"
        )

    def remove(self) -> None:
        """Lets the layers keep everything on the device again."""
        for offload in self._offloads:
            offload.remove()
        self._offloads.clear()


def offload_layers(
    models: Sequence[Any], tempo_config: TempoConfig, *, num_in_flight: int = 1, device: Device | None = None
) -> Offloading:
    """Lets the layers of this rank's models, one or the chunks of its pipeline stage, move what `tempo_config` says.

    Args:
        models: GPTModel, BertModel, T5Model or HybridModel of Megatron's, on their device.
        tempo_config: its `offload`, and that of its `layers`, say what moves; "off" adds nothing.
        num_in_flight, device: as of Offloading.

    Raises ValueError for a TransformerConfig with which layers cannot move anything.
    """
    offloading = Offloading(device, num_in_flight=num_in_flight)
    for model in models:
        offloading.add(model, tempo_config)
    return offloading


def count_in_flight(num_micro_batches: int, num_chunks: int = 1) -> int:
    """Returns how many forwards of one chunk wait for their backward at once on this rank's pipeline stage, at most."""
    stages: int = parallel_state.get_pipeline_model_parallel_world_size()
    # Interleaved, a stage runs twice as far ahead, and all its chunks share that.
    ahead = stages - parallel_state.get_pipeline_model_parallel_rank() if num_chunks == 1 else 2 * stages
    return min(num_micro_batches, ahead)


def _read_moves(tempo_config: TempoConfig, layer: Any, stack: str) -> Moves:
    value = tempo_config.for_layer(layer.layer_number - 1, stack).offload
    if value == "off":
        return move_nothing
    if value == "all":
        return move_all
    rows = set(value.split("+"))

    def moves(name: str) -> bool:
        while name and name not in OFFLOAD_ROWS:
            name = name.rpartition(".")[0]
        return (name or LAYER) in rows

    return moves


def _refuse(config: Any) -> None:
    """Raises ValueError for a TransformerConfig beside which offload would be wrong."""
    for name, why in _REFUSED.items():
        if getattr(config, name, None) not in (None, False, "none"):
            raise ValueError(
                f"tempo.offload is given and {name} is on, {why}; expected one of them; set tempo.offload to "
                f'"off", or leave {name} out'
            )

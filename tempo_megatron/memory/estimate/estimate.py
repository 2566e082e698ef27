"""Estimates the memory of a training run on every kind of rank, for any number of devices, without hardware.

A step is followed phase by phase: embedding, every layer, loss head, forward and backward, in the order of the
pipeline's schedule, and then the optimizer's step. The estimate is the highest moment of all. What a phase adds comes
from the real modules on fake tensors (`tempo_megatron.memory.simulated.chunk`); nothing in the sum is fitted.

Not in it: memory that an operation takes and gives back inside itself (but for Tempo's on a CPU), what an allocator
rounds up or keeps, contexts and workspaces of CUDA, cuBLAS and NCCL, and on a CPU the 512 KiB of tables that the
in-place GELU of 16 bits makes once in a process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import torch

from tempo_megatron.memory.estimate.allocation_trace import simulate_allocator
from tempo_megatron.memory.estimate.model_states import (
    ModelStates,
    OptimizerSettings,
    count_model_states,
    makes_gradients,
)
from tempo_megatron.memory.estimate.schedule import Event, list_events
from tempo_megatron.memory.simulated.chunk import STACKS_OF_FAMILIES, ChunkSettings, simulate_chunk, trace_chunk
from tempo_megatron.memory.simulated.phases import ChunkMemory, Moment
from tempo_megatron.models.shape import ModelShape, check_layout, pad_vocab_size
from tempo_megatron.settings.config import TempoConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankLayout:
    """How a model lies over devices, and what runs on it."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    sequence_parallel: bool = False
    layers_per_virtual_stage: int | None = None
    """Megatron's --num-layers-per-virtual-pipeline-stage; None is 1F1B without interleaving."""

    first_stage_layers: int | None = None
    """Megatron's --decoder-first-pipeline-num-layers; None gives the first stage as many as those in the middle."""

    last_stage_layers: int | None = None
    """Megatron's --decoder-last-pipeline-num-layers."""

    micro_batch_size: int = 1
    num_micro_batches: int | None = None
    """Of a step, per data-parallel rank; None is enough to fill the pipeline twice."""

    dtype: torch.dtype = torch.bfloat16
    recompute: tuple[str, ...] = ()
    """Nothing, ("full",), or any of "core_attn" and "mlp"."""

    stock: str = "local"
    """Whose modules stock ones are: "local" (Megatron's, on a GPU), "transformer_engine", or "cpu"."""

    stock_attention: str = "fused"
    """Transformer Engine's: "fused" (cuDNN), "flash" (FlashAttention 2) or "unfused"."""

    masked_softmax_fusion: bool = True
    """Whether unfused attention on a GPU has Megatron's softmax kernel, for the 16-bit scores that the kernel takes."""

    @property
    def world_size(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


@dataclasses.dataclass(frozen=True)
class RankEstimate:
    """The ranks of one pipeline stage, or of several alike, at the highest moment of a step."""

    name: str
    """`all ranks`, or `first stage`, `stage 1`, `last stage`."""

    num_parameters: int
    """On one rank."""

    moment: str
    """When the peak is: `forward of the loss head`, `optimizer step`."""

    parts: dict[str, int]
    """What stands at the peak -> bytes; see PART_NAMES."""

    rounded_bytes: int | None = None
    """With torch's caching allocator simulated: what it counts as allocated at most."""

    reserved_bytes: int | None = None
    """And what it takes from the device, fragments that nothing fits among it."""

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())


PART_NAMES = (
    "weights",
    "gradients",
    "optimizer states",
    "communication buffers",
    "global memory buffer",
    "micro batches",
    "other micro batches' activations",
    "embedding",
    "layers",
    "loss head",
    "transients",
)


# Where a part's name alone does not say what it is.
_DESCRIPTIONS = {
    "communication buffers": "buckets of gradients",
    "global memory buffer": "Megatron's global memory buffer",
    "micro batches": "tokens, labels and masks",
    "embedding": "activations of the embedding",
    "layers": "activations of the layers",
    "loss head": "activations of the loss head",
    "transients": "made and freed at the peak",
}


def describe_part(name: str) -> str:
    """What one of PART_NAMES is, for a table."""
    return _DESCRIPTIONS.get(name, name)


def estimate_ranks(
    shape: ModelShape,
    layout: RankLayout,
    tempo_config: TempoConfig,
    *,
    optimizer: OptimizerSettings | None = None,
    simulates_allocator: bool = False,
) -> tuple[RankEstimate, ...]:
    """The peak of the ranks of every pipeline stage, from the first to the last; those of one stage are alike.

    Args:
        shape: the model, with a vocab_size.
        layout: sizes of the parallel groups, and what a micro batch is.
        tempo_config: perhaps with "auto" and `layers`; `TempoConfig.off()` is stock.
        optimizer: who holds gradients and states (default: Megatron's distributed optimizer).
        simulates_allocator: whether `rounded_bytes` and `reserved_bytes` are found too, which takes time for each
            layer; one pipeline stage and a GPU's modules only.

    Raises ValueError where the model cannot lie so, and for a T5 in several pipeline stages.
    """
    optimizer = optimizer or OptimizerSettings()
    if simulates_allocator and (layout.pipeline_parallel > 1 or layout.stock == "cpu"):
        raise ValueError(
            f"--allocator is given with --pp {layout.pipeline_parallel} and --stock {layout.stock}, but it simulates "
            "the allocator of a GPU in one stage; expected --pp 1 and --stock local or transformer_engine; leave it out"
        )
    num_chunks, layers = count_chunks(shape, layout), list_stage_layers(shape, layout)
    num_micro_batches = layout.num_micro_batches or (
        1 if layout.pipeline_parallel == 1 and optimizer.kind == "none" else 2 * layout.pipeline_parallel
    )
    found: list[RankEstimate] = []
    for stage in range(layout.pipeline_parallel):
        has_gradients = not makes_gradients(optimizer, layout.dtype, num_micro_batches > 1)
        chunks = [
            simulate_chunk(settings)
            for settings in _list_chunks(shape, layout, tempo_config, stage, num_chunks, layers, has_gradients)
        ]
        states = count_model_states(
            sum(chunk.num_parameters for chunk in chunks),
            layout.dtype,
            optimizer,
            data_parallel=layout.data_parallel,
            largest_layer_parameters=max(chunk.largest_layer_parameters for chunk in chunks),
            accumulates=num_micro_batches > 1,
        )
        events = list_events(stage, layout.pipeline_parallel, num_chunks, num_micro_batches)
        found.append(_estimate_rank(_name(stage, layout.pipeline_parallel), chunks, states, events))
        if simulates_allocator:
            (settings,) = _list_chunks(shape, layout, tempo_config, stage, num_chunks, layers, has_gradients)
            allocator = simulate_allocator(
                trace_chunk(settings),
                states,
                has_flat_gradients=optimizer.kind == "megatron",
                num_micro_batches=num_micro_batches,
            )
            found[-1] = dataclasses.replace(
                found[-1], rounded_bytes=allocator.peak_allocated, reserved_bytes=allocator.reserved
            )
    return tuple(found)


def count_chunks(shape: ModelShape, layout: RankLayout) -> int:
    """Chunks of layers per stage.

    Raises ValueError where the model cannot be cut so.
    """
    check_layout(shape, layout.tensor_parallel, layout.sequence_parallel, option="--tp")
    if shape.vocab_size is None:
        raise ValueError("the model has no vocab_size; give --vocab-size")
    stages = layout.pipeline_parallel
    if shape.family == "t5" and stages > 1:
        raise ValueError(
            f"--pp is {stages}, but the model is a T5, whose encoder and decoder have stages of their own, which the "
            "estimate does not know; expected --pp 1"
        )
    layers, per_chunk = list_stage_layers(shape, layout), layout.layers_per_virtual_stage
    if per_chunk is None:
        return 1
    if len(set(layers)) > 1:
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage is {per_chunk} and stages have {min(layers)} to {max(layers)} "
            "layers; expected stages of equally many; leave one out"
        )
    per_stage = layers[0]
    if stages == 1 or per_stage % per_chunk:
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage is {per_chunk}; expected a divisor of the {per_stage} layers of "
            "one of at least 2 stages; change it or leave it out"
        )
    if (layout.num_micro_batches or 0) % stages:
        raise ValueError(
            f"{layout.num_micro_batches} micro batches are not a multiple of --pp {stages}, as interleaving needs"
        )
    return per_stage // per_chunk


def list_stage_layers(shape: ModelShape, layout: RankLayout) -> list[int]:
    """How many layers each stage has, as Megatron deals them out.

    Raises ValueError where it could not.
    """
    stages = layout.pipeline_parallel
    given = {"first": layout.first_stage_layers, "last": layout.last_stage_layers}
    options = " and ".join(f"--decoder-{name}-pipeline-num-layers {n}" for name, n in given.items() if n is not None)
    if not options:
        if shape.num_layers % stages:
            raise ValueError(f"{shape.num_layers} layers are not a multiple of --pp {stages}; change one of them")
        return [shape.num_layers // stages] * stages
    if stages == 1:
        raise ValueError(f"{options} needs stages; expected --pp of at least 2; leave it out or raise that")
    rest = shape.num_layers - sum(n or 0 for n in given.values())
    others = stages - sum(n is not None for n in given.values())
    if rest < others or (rest % others if others else rest):
        raise ValueError(
            f"{options} leaves {rest} of {shape.num_layers} layers for {others} other stages; expected "
            f"{'a positive multiple of them' if others else 'none'}; change one of them"
        )
    per_stage = rest // others if others else 0
    found = [per_stage] * stages
    found[0] = per_stage if given["first"] is None else given["first"]
    found[-1] = per_stage if given["last"] is None else given["last"]
    return found


def _list_chunks(
    shape: ModelShape,
    layout: RankLayout,
    tempo_config: TempoConfig,
    stage: int,
    num_chunks: int,
    layers: Sequence[int],
    has_gradients: bool,
) -> Iterator[ChunkSettings]:
    assert shape.vocab_size is not None
    stages = layout.pipeline_parallel
    num_layers = layers[stage] // num_chunks
    for chunk in range(num_chunks):
        first = chunk * stages * num_layers + sum(layers[:stage]) // num_chunks
        yield ChunkSettings(
            shape=shape,
            # Layers count from 0 in each chunk, so that chunks alike are simulated once.
            layers=tuple(range(num_layers)),
            tempo_config=tempo_config.for_layers(range(first, first + num_layers), STACKS_OF_FAMILIES[shape.family]),
            padded_vocab_size=pad_vocab_size(
                shape.vocab_size, shape.make_vocab_size_divisible_by, layout.tensor_parallel
            ),
            micro_batch_size=layout.micro_batch_size,
            tensor_parallel=layout.tensor_parallel,
            sequence_parallel=layout.sequence_parallel,
            dtype=layout.dtype,
            recompute=layout.recompute,
            stock=layout.stock,
            has_fused_attention=layout.stock_attention != "unfused",
            masked_softmax_fusion=layout.masked_softmax_fusion,
            pre_process=stage == chunk == 0,
            post_process=stage == stages - 1 and chunk == num_chunks - 1,
            has_gradients=has_gradients,
        )


def _name(stage: int, num_stages: int) -> str:
    if num_stages == 1:
        return "all ranks"
    return {0: "first stage", num_stages - 1: "last stage"}.get(stage, f"stage {stage}")


def _estimate_rank(
    name: str, chunks: Sequence[ChunkMemory], states: ModelStates, events: Iterable[Event]
) -> RankEstimate:
    """Follow a step's events; `waiting` counts, chunk by chunk, the micro batches between forward and backward."""
    highest: dict[tuple[int, bool], tuple[Moment, int]] = {}
    for chunk, memory in enumerate(chunks):
        for is_forward in (True, False):
            moments = memory.list_moments(in_backward=not is_forward)
            with_buckets = ((moment, states.count_buckets(moment)) for moment in moments)
            highest[chunk, is_forward] = max(with_buckets, key=lambda each: each[0].num_bytes + each[1])
    waiting = [0] * len(chunks)
    candidates: dict[tuple[tuple[int, ...], int, bool], int] = {}
    for event in events:
        waiting[event.chunk] -= 0 if event.is_forward else 1
        key = (tuple(waiting), event.chunk, event.is_forward)
        if key not in candidates:
            in_flight = sum(n * memory.bytes_in_flight for n, memory in zip(waiting, chunks, strict=True))
            moment, buckets = highest[key[1:]]
            candidates[key] = in_flight + chunks[event.chunk].micro_batch_bytes + moment.num_bytes + buckets
        waiting[event.chunk] += 1 if event.is_forward else 0
    others, chunk, is_forward = max(candidates, key=lambda key: candidates[key])
    moment, buckets = highest[chunk, is_forward]
    # Its chunks share one, which stays from the first micro batch on.
    lasting = _list_parts(states) | {"global memory buffer": max(each.global_buffer_bytes for each in chunks)}
    parts = lasting | {
        "gradients": states.standing_gradients + moment.gradient_bytes,
        "communication buffers": lasting["communication buffers"] + buckets,
        "micro batches": sum(n * each.micro_batch_bytes for n, each in zip(others, chunks, strict=True))
        + chunks[chunk].micro_batch_bytes,
        "other micro batches' activations": sum(n * each.kept_bytes for n, each in zip(others, chunks, strict=True)),
        **moment.standing,
        "transients": moment.rise,
    }
    num_parameters = sum(memory.num_parameters for memory in chunks)
    ends = {
        moment.name: parts,
        "reduction of the gradients": lasting
        | {"gradients": states.reduction, "micro batches": chunks[chunk].micro_batch_bytes},
        "optimizer step": lasting | {"gradients": states.gradients, "transients": states.step_transient},
    }
    name_of_moment = max(ends, key=lambda each: sum(ends[each].values()))
    return RankEstimate(name, num_parameters, name_of_moment, ends[name_of_moment])


def _list_parts(states: ModelStates) -> dict[str, int]:
    return {
        **dict.fromkeys(PART_NAMES, 0),
        "weights": states.weights,
        "optimizer states": states.optimizer_states,
        "communication buffers": states.communication_buffers,
    }

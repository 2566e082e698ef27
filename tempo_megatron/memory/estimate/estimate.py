"""Estimates the memory of a training run on every kind of rank, for any number of devices, without hardware.

What a micro batch makes and frees in embedding, layers and loss head, forward and backward, is listed by running the
real modules on fake tensors (`tempo_megatron.memory.simulated.chunk`), and played in the order of the pipeline's
schedule (`play.py`); then comes the optimizer's step. The estimate is the highest moment; nothing in it is fitted.

Not in it: memory that an operation takes and gives back inside itself (but for Tempo's on a CPU), what an allocator
keeps free, CUDA's context, NCCL's buffers, what an allocator rounds up and cuBLAS's workspaces where no GPU is named,
and on a CPU the 512 KiB of tables that the in-place GELU of 16 bits makes once in a process.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from tempo_megatron.memory.estimate.allocator import CachingAllocator, Library
from tempo_megatron.memory.estimate.lasting_tensors import count_lasting_tensors
from tempo_megatron.memory.estimate.megatron_fsdp import ShardedChunk
from tempo_megatron.memory.estimate.model_states import (
    ModelStates,
    count_model_states,
    makes_gradients,
)
from tempo_megatron.memory.estimate.muon import Piece, count_muon_states
from tempo_megatron.memory.estimate.offload import drop_offload, list_moved_of_layers
from tempo_megatron.memory.estimate.play import Peak, Step, Sums
from tempo_megatron.memory.estimate.reserved import list_lasting, make_allocator, play_steps
from tempo_megatron.memory.estimate.rounding import count_rounding
from tempo_megatron.memory.estimate.schedule import Event, list_events
from tempo_megatron.memory.estimate.workspaces import list_workspaces
from tempo_megatron.memory.routing import assume_routing
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.simulated.chunk import simulate_chunk
from tempo_megatron.memory.simulated.chunk_memory import ChunkMemory
from tempo_megatron.memory.simulated.float8 import count_float8_bytes

_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_OF_RANK = 40_000_000, 1_000_000


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

    at_rest: dict[str, int] = dataclasses.field(default_factory=dict)
    """What stands between two steps -> bytes, as in `parts`."""

    rounded_bytes: int | None = None
    """With torch's caching allocator simulated: what it counts as allocated at most."""

    reserved_bytes: int | None = None
    """And what it takes from the device, fragments that nothing fits among it."""

    host_bytes: int = 0
    """What layers have sent to the host at most, of all micro batches in flight."""

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def at_rest_bytes(self) -> int:
        return sum(self.at_rest.values())


PART_NAMES = (
    "weights",
    "gradients",
    "optimizer states",
    "communication buffers",
    "global memory buffer",
    "workspaces",
    "rounding",
    "placeholder gradients",
    "float8 weights",
    "lasting tensors",
    "stage inputs",
    "deferred gradients",
    "micro batches",
    "other micro batches' activations",
    "embedding",
    "layers",
    "loss head",
    "attention's workspaces",
    "transients",
)


# Where a part's name alone does not say what it is.
_DESCRIPTIONS = {
    "communication buffers": "gathered weights and gradients",
    "global memory buffer": "Megatron's global memory buffer",
    "workspaces": "cuBLAS's workspaces",
    "rounding": "rest of the allocator's blocks",
    "deferred gradients": "what the output layer's gradients wait with",
    "lasting tensors": "rotary tables and experts' routing",
    "stage inputs": "earlier inputs of a stage or layer, and their gradients",
    "micro batches": "tokens, labels and masks",
    "embedding": "activations of the embedding",
    "layers": "activations of the layers",
    "loss head": "activations of the loss head",
    "transients": "made and freed at the peak",
}


def describe_part(name: str) -> str:
    """What one of PART_NAMES is, for a table."""
    return _DESCRIPTIONS.get(name, name)


def estimate_ranks(run: Run, *, simulates_allocator: bool = False, only: int | None = None) -> tuple[RankEstimate, ...]:
    """The peak of the ranks of every pipeline stage, from the first to the last; those of one stage are alike.

    Args:
        run: its model has a vocab_size.
        simulates_allocator: whether `rounded_bytes` and `reserved_bytes` are found too, which takes time for each
            layer; a GPU's modules only.
        only: the stage that is estimated; None is all.

    Raises ValueError where the model cannot lie so, and for a T5 in several pipeline stages.
    """
    stages, optimizer = run.layout.pp, run.optimizer
    if simulates_allocator and run.stock == "cpu":
        raise ValueError(
            "--allocator is given with --stock cpu, but it simulates the allocator of a GPU; expected --stock local or "
            "transformer_engine; leave one of them out"
        )
    run.check()
    num_micro_batches = run.num_micro_batches or (1 if stages == 1 and optimizer.kind == "none" else 2 * stages)
    has_gradients = not makes_gradients(optimizer, run.dtype, num_micro_batches > 1)
    found: list[RankEstimate] = []
    for stage in range(stages) if only is None else [only]:
        layers = run.list_chunks(stage)
        of_stage = assume_routing(run, stage)
        moved = [list_moved_of_layers(of_stage, each) for each in layers]
        here = dataclasses.replace(of_stage, tempo=drop_offload(run.tempo)) if run.tempo.offloads else of_stage
        ends = run.list_ends(stage)
        chunks = [
            simulate_chunk(here, each, **beside, has_gradients=has_gradients)
            for each, beside in zip(layers, ends, strict=True)
        ]
        muon = None if optimizer.muon is None else _count_muon(run, chunks, optimizer.muon)
        sharded = None
        if optimizer.fsdp is not None:
            sharded = ShardedChunk(optimizer.fsdp, chunks[0], run.dtype, run.float8_weights, *_count_sharing(run))
            states = sharded.count_states()
        else:
            states = _count_states(run, chunks, accumulates=num_micro_batches > 1) if muon is None else muon[0]
        is_combined = run.layout.overlaps and num_micro_batches > 1
        group = run.micro_batch_group or stages
        # Later groups of micro batches repeat what earlier ones did.
        number = min(num_micro_batches, 4 * group + num_micro_batches % group)
        events = [*list_events(stage, stages, len(chunks), number, group, is_combined=is_combined)]
        workspaces = list_workspaces(run, has_head=stage == stages - 1)
        make_step = functools.partial(
            Step,
            chunks=chunks,
            buckets=states if sharded is None else sharded,
            moved=moved,
            # Between interleaved chunks that of the next backward is received ahead
            # (core/pipeline_parallel/schedules.py:2195-2269 and 1740-1960 of megatron-core 0.16.1).
            received_bytes=max(each.output_bytes for each in chunks),
            is_combined=is_combined,
        )
        sums = make_step(Sums(), events=events, workspaces={})
        sums.play()
        if sums.count_left():
            # The next step has what the first one left.
            sums.play()
        allocator = CachingAllocator(is_expandable=run.expandable_segments, counts_reserved=False)
        step = None
        if run.gpu is not None and optimizer.kind == "megatron":
            step = make_step(allocator, events=_list_until_full(events), workspaces=workspaces)
        place_states = functools.partial(_place_states, run, chunks, muon and muon[1], sharded)
        on_gpu = _count_on_gpu(run, chunks, workspaces)
        if run.gpu is not None:
            on_gpu["lasting tensors"] = count_lasting_tensors(run, stage)
        if step is not None:
            on_gpu["rounding"] = place_states(allocator, step)
        found.append(
            _estimate_rank(
                _name(stage, stages),
                chunks,
                states,
                on_gpu,
                sums.peak,
                rounding=0 if step is None else step.count_rounding(),
                deferred=_count_deferred(run, num_micro_batches) if stage == stages - 1 else 0,
                inputs_of_experts=_count_inputs_of_experts(run, chunks, layers),
                host_bytes=_count_on_host(events, [sum(map(sum, each)) for each in moved]),
            )
        )
        if simulates_allocator:
            whole = make_allocator(is_expandable=run.expandable_segments)
            step = make_step(whole, events=_list_until_full(events), workspaces=workspaces)
            others = [on_gpu[name] for name in ("float8 weights", "lasting tensors") if name in on_gpu]
            place = functools.partial(_place, run, chunks, states, place_states, whole, step, others)
            rounded, reserved = play_steps(whole, step, states, place)
            found[-1] = dataclasses.replace(found[-1], rounded_bytes=rounded, reserved_bytes=reserved)
    return tuple(found)


def _place(
    run: Run,
    chunks: Sequence[ChunkMemory],
    states: ModelStates,
    place_states: Callable[..., int],
    allocator: CachingAllocator,
    step: Step,
    others: Sequence[int],
) -> None:
    """Allocates what stays from step to step; `others` are bytes that neither `states` nor `chunks` have."""
    if run.optimizer.kind == "megatron":
        place_states(allocator, step, others)
        return
    for size in [*list_lasting(chunks, run.dtype, states), *others]:
        allocator.allocate(size)


def _list_until_full(events: Sequence[Event]) -> Sequence[Event]:
    """The events until a step has twice had as many micro batches in flight as it ever has.

    Later ones repeat them, with the same blocks.
    """
    levels = list(itertools.accumulate(1 if event.is_forward else -1 for event in events))
    full = [place for place, level in enumerate(levels) if level == max(levels)]
    return events[: full[:2][-1] + 2]


def _count_states(run: Run, chunks: Sequence[ChunkMemory], *, accumulates: bool) -> ModelStates:
    """The states of a stage's ranks. Ranks that share those of experts are others than share the rest."""
    num_parameters = sum(chunk.num_parameters for chunk in chunks)
    num_expert_parameters = sum(chunk.num_expert_parameters for chunk in chunks)
    sharing, sharing_experts = _count_sharing(run)
    found = count_model_states(
        num_parameters - num_expert_parameters,
        run.dtype,
        run.optimizer,
        data_parallel=sharing,
        largest_layer_parameters=max(chunk.largest_layer_parameters for chunk in chunks),
        accumulates=accumulates,
    )
    if run.float8_weights:
        # One byte for each in place of the run's dtype.
        found = dataclasses.replace(
            found, weights=found.weights - _count_float8_weights(chunks) * (run.dtype.itemsize - 1)
        )
    if run.model.num_experts is None:
        return found
    of_experts = count_model_states(num_expert_parameters, run.dtype, run.optimizer, data_parallel=sharing_experts)
    # Of Megatron's optimizer, the only one, all fields are sums over parameters.
    both = {
        field.name: getattr(found, field.name) + getattr(of_experts, field.name)
        for field in dataclasses.fields(ModelStates)
        if not isinstance(getattr(found, field.name), bool)
    }
    return dataclasses.replace(found, **both)


def _count_sharing(run: Run) -> tuple[int, int]:
    """Ranks that share the optimizer's states of what is no expert, and those of an expert.

    Context-parallel ranks share them like data-parallel ones.
    """
    ranks = run.layout.dp * run.layout.cp // run.optimizer.instances
    return ranks, ranks * run.layout.tp // (run.layout.ep * run.layout.etp)


def _find_bucket_elements(run: Run, chunks: Sequence[ChunkMemory]) -> int | None:
    """After how many elements a bucket of the first chunk's buffers ends; None where all are one.

    Only the first stage reduces in several (training/training.py:2179-2194 and 2491-2502 of Megatron-LM at d98e8a64dd).
    """
    optimizer = run.optimizer
    if not optimizer.overlaps_reduction or chunks[0].input_bytes:
        return None
    if optimizer.num_buckets is not None:
        return sum(chunk.num_parameters for chunk in chunks) // optimizer.num_buckets
    return optimizer.bucket_elements or max(_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_OF_RANK * run.layout.dp * run.layout.cp)


def _count_muon(run: Run, chunks: Sequence[ChunkMemory], muon: str) -> tuple[ModelStates, list[Piece]]:
    ranks, expert_ranks = _count_sharing(run)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters]
    return count_muon_states(parameters, run.dtype, muon, ranks=ranks, expert_ranks=expert_ranks)


def _count_float8_weights(chunks: Sequence[ChunkMemory]) -> int:
    return sum(chunk.float8_weights for chunk in chunks)


def _name(stage: int, num_stages: int) -> str:
    if num_stages == 1:
        return "all ranks"
    return {0: "first stage", num_stages - 1: "last stage"}.get(stage, f"stage {stage}")


def _count_on_gpu(
    run: Run, chunks: Sequence[ChunkMemory], workspaces: Mapping[Library, Sequence[int]]
) -> dict[str, int]:
    """The parts of a rank at rest that depend on the GPU and its libraries; none where nothing says which GPU it is."""
    if run.gpu is None:
        return {}
    float8, num_float8 = 0, _count_float8_weights(chunks)
    # A transposed copy is made for a unit's backward (megatron_fsdp.py: release_params_fp8_transpose_cache).
    is_transposed_anew = run.float8_weights and run.optimizer.fsdp is not None
    if run.float8 is not None and not is_transposed_anew:
        float8 = count_float8_bytes(num_float8, run.float8, run.gpu) - (num_float8 if run.float8_weights else 0)
    return {
        "workspaces": sum(itertools.chain(*workspaces.values())),
        "placeholder gradients": sum(_list_placeholder_gradients(run, chunks)),
        "float8 weights": float8,
    }


def _place_states(
    run: Run,
    chunks: Sequence[ChunkMemory],
    pieces: Sequence[Piece] | None,
    sharded: ShardedChunk | None,
    allocator: CachingAllocator,
    step: Step | None,
    others: Sequence[int] = (),
) -> int:
    """Allocates what stays from step to step where the optimizer is Megatron's, and says what the allocator adds to it.

    Args:
        run: of the rank.
        chunks: of the rank.
        pieces: of Muon's states.
        sharded: the chunk, where its weights are gathered.
        allocator: an empty one.
        step: of the chunks, on it.
        others: bytes of each tensor that neither the states nor the chunks have.
    """
    others = [*others, max(each.global_buffer_bytes for each in chunks)]
    if run.gpu is not None:
        others += _list_placeholder_gradients(run, chunks)
    if sharded is not None:
        return sharded.place(allocator, others, step)
    return count_rounding(
        allocator,
        [chunk.parameters for chunk in chunks],
        run.dtype,
        others,
        run.optimizer,
        parts=_count_sharing(run) if run.optimizer.distributed else (1, 1),
        pieces=pieces,
        shares_embedding=run.layout.pp > 1 and not run.model.untie_embeddings_and_output_weights,
        bucket_elements=_find_bucket_elements(run, chunks),
        step=step,
    )


def _list_placeholder_gradients(run: Run, chunks: Sequence[ChunkMemory]) -> list[int]:
    """The bytes of each gradient that autograd is given where the product itself adds to the float32 buffer.

    Transformer Engine keeps one for each shape and dtype (transformer_engine/pytorch/module/base.py:134-148 of 2.20),
    which Megatron's linears take too (core/tensor_parallel/layers.py: get_dummy_wgrad).
    """
    if not run.fuses_gradient_accumulation:
        return []
    shapes = sorted(frozenset().union(*(chunk.linear_shapes for chunk in chunks)))
    return [math.prod(shape) * run.dtype.itemsize for shape in shapes]


def _count_deferred(run: Run, num_micro_batches: int) -> int:
    """Inputs of the output layer and gradients of the logits, of earlier micro batches, at a step's last forward.

    The buffers take those of the first micro batches up to the limit (core/tensor_parallel/layers.py:
    LinearWithGradAccumulationAndAsyncCommunication of megatron-core 0.16.1), until the pipeline is empty.
    """
    if run.deferred_head_gradients is None:
        return 0
    limit = run.deferred_head_gradients or num_micro_batches
    tokens = run.micro_batch_size * run.model.seq_length // run.layout.cp
    logits = tokens * run.padded_vocab_size // run.layout.tp
    return min(limit, num_micro_batches - 1) * (logits * run.dtype.itemsize + _count_hidden_bytes(run))


def _count_hidden_bytes(run: Run) -> int:
    tokens = run.micro_batch_size * run.model.seq_length // run.layout.cp
    parts = run.layout.tp if run.layout.sp else 1
    return tokens * run.model.hidden_size // parts * run.dtype.itemsize


def _count_inputs_of_experts(run: Run, chunks: Sequence[ChunkMemory], layers: Sequence[Sequence[int]]) -> int:
    """The latest input of each layer with experts, and its gradient, where forwards run beside backwards.

    Such a layer's graph begins at an input of its own (core/pipeline_parallel/utils.py:249 of Megatron-LM at
    d98e8a64dd), and its dispatcher has the router's probabilities with that graph until the next micro batch comes
    (core/transformer/moe/token_dispatcher.py:642). A stage's own input counts for the first layer already. What layers
    of multi-token prediction keep is not counted.
    """
    if not run.layout.overlaps or run.layout.dispatcher != "alltoall":
        return 0
    has_experts = run.model.layers_with_experts
    number = sum(
        has_experts[layer]
        for chunk, of_chunk in zip(chunks, layers, strict=True)
        for layer in of_chunk[1 if chunk.input_bytes else 0 :]
    )
    return 2 * number * _count_hidden_bytes(run)


def _estimate_rank(
    name: str,
    chunks: Sequence[ChunkMemory],
    states: ModelStates,
    on_gpu: dict[str, int],
    peak: Peak,
    *,
    rounding: int,
    deferred: int,
    inputs_of_experts: int,
    host_bytes: int,
) -> RankEstimate:
    """The highest moment of a step: of its micro batches, of the reduction of the gradients, or the optimizer's step.

    rounding: what the allocator adds to the tensors of micro batches.
    deferred: of `_count_deferred`.
    inputs_of_experts: what layers with experts keep of the latest micro batch between steps.
    """
    # Its chunks share one, which stays from the first micro batch on.
    buffer = max(each.global_buffer_bytes for each in chunks)
    lasting = _list_parts(states) | {"global memory buffer": buffer} | on_gpu
    parts = lasting | {"deferred gradients": deferred, **peak.parts}
    for part, beside in (
        ("gradients", states.standing_gradients),
        ("communication buffers", lasting["communication buffers"]),
        ("rounding", rounding),
    ):
        parts[part] += beside
    at_rest = lasting | {
        "gradients": states.gradients_at_rest,
        "stage inputs": sum(_count_own_input(each) for each in chunks) + inputs_of_experts,
    }
    ends = {
        peak.name: parts,
        "reduction of the gradients": lasting
        | {"gradients": states.reduction, "micro batches": chunks[-1].micro_batch_bytes},
        "optimizer step": at_rest | {"gradients": states.gradients, "transients": states.step_transient},
    }
    moment = max(ends, key=lambda each: sum(ends[each].values()))
    num_parameters = sum(memory.num_parameters for memory in chunks)
    return RankEstimate(name, num_parameters, moment, ends[moment], at_rest, host_bytes=host_bytes)


def _count_on_host(events: Iterable[Event], moved: Sequence[int]) -> int:
    """Bytes on the host at most, of what a micro batch sends there, chunk by chunk."""
    highest = level = 0
    for event in events:
        level += moved[event.chunk] if event.is_forward else -moved[event.chunk]
        highest = max(highest, level)
    return highest


def _count_own_input(chunk: ChunkMemory) -> int:
    """The input of a chunk's latest micro batch, and its gradient.

    The chunk's block has the input in an attribute until the next one comes (core/transformer/transformer_block.py:578
    of megatron-core 0.16.1), and the schedule lets it keep its gradient (core/pipeline_parallel/schedules.py:469).
    """
    return 2 * chunk.input_bytes


def _list_parts(states: ModelStates) -> dict[str, int]:
    return {
        **dict.fromkeys(PART_NAMES, 0),
        "weights": states.weights,
        "optimizer states": states.optimizer_states,
        "communication buffers": states.communication_buffers,
    }

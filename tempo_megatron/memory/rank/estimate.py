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
import itertools
from collections.abc import Sequence

from tempo_megatron.memory.rank.allocator import CachingAllocator
from tempo_megatron.memory.rank.libraries import list_library_tensors, list_workspaces
from tempo_megatron.memory.rank.megatron_fsdp import ShardedChunk
from tempo_megatron.memory.rank.offload import drop_offload, list_moved_of_layers
from tempo_megatron.memory.rank.play import Step, list_events, play_rank
from tempo_megatron.memory.rank.standing import Born, Standing, Tensor, list_megatrons
from tempo_megatron.memory.rank.zero import leaves_gradients, list_zeros
from tempo_megatron.memory.routing import assume_routing
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.simulated.chunk import simulate_chunk
from tempo_megatron.memory.simulated.chunk_memory import ChunkMemory


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
    """What stands at the peak -> bytes; see PARTS."""
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


PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer states": "optimizer states",
    "communication buffers": "gathered weights and gradients",
    "global memory buffer": "Megatron's global memory buffer",
    "workspaces": "cuBLAS's workspaces",
    "rounding": "rest of the allocator's blocks",
    "placeholder gradients": "placeholder gradients",
    "float8 weights": "float8 weights",
    "lasting tensors": "rotary tables and experts' routing",
    "stage inputs": "earlier inputs of a stage or layer, and their gradients",
    "deferred gradients": "what the output layer's gradients wait with",
    "micro batches": "tokens, labels and masks",
    "other micro batches' activations": "other micro batches' activations",
    "embedding": "activations of the embedding",
    "layers": "activations of the layers",
    "loss head": "activations of the loss head",
    "attention's workspaces": "attention's workspaces",
    "transients": "made and freed at the peak",
}
"""Part -> what it is, for a table."""


def estimate_ranks(run: Run, *, simulates_allocator: bool = False, only: int | None = None) -> tuple[RankEstimate, ...]:
    """The peak of the ranks of every pipeline stage, from the first to the last; those of one stage are alike.

    Args:
        run: its model has a vocab_size.
        simulates_allocator: whether `rounded_bytes` and `reserved_bytes` are found too, which takes time for each
            layer; a GPU's modules only.
        only: the stage that is estimated; None is all.

    Raises ValueError where the model cannot lie so, and for a T5 in several pipeline stages.
    """
    if simulates_allocator and run.stock == "cpu":
        raise ValueError(
            "--allocator is given with --stock cpu, but it simulates the allocator of a GPU; expected --stock local or "
            "transformer_engine; leave one of them out"
        )
    if simulates_allocator and run.expandable_segments:
        raise ValueError(
            "--allocator is given, and PYTORCH_ALLOC_CONF has expandable_segments:True, whose segments it does not "
            "simulate; leave one of them out"
        )
    run.check()
    stages = range(run.layout.pp) if only is None else [only]
    return tuple(_estimate_stage(run, stage, simulates_allocator=simulates_allocator) for stage in stages)


def _estimate_stage(run: Run, stage: int, *, simulates_allocator: bool) -> RankEstimate:
    """The highest moment of a step: of its micro batches, the reduction of the gradients, or the optimizer's step."""
    stages, optimizer, layers = run.layout.pp, run.optimizer, run.list_chunks(stage)
    num_micro_batches = run.num_micro_batches or (1 if stages == 1 and optimizer.kind == "none" else 2 * stages)
    accumulates = num_micro_batches > 1
    is_combined = run.layout.overlaps and accumulates
    of_stage = assume_routing(run, stage)
    moved = [list_moved_of_layers(of_stage, each) if run.tempo.offloads else () for each in layers]
    here = dataclasses.replace(of_stage, tempo=drop_offload(run.tempo)) if run.tempo.offloads else of_stage
    leaves = leaves_gradients(optimizer, run.dtype) if optimizer.kind == "deepspeed" else optimizer.kind == "none"
    chunks = [
        simulate_chunk(here, each, **ends, has_gradients=accumulates or not leaves)
        for each, ends in zip(layers, run.list_ends(stage), strict=True)
    ]
    standing = _list_standing(run, chunks, accumulates=accumulates)
    standing = dataclasses.replace(standing, tensors=(*standing.tensors, *list_library_tensors(run, stage, chunks)))
    group = run.micro_batch_group or stages
    # Later groups of micro batches repeat what earlier ones did.
    number = min(num_micro_batches, 4 * group + num_micro_batches % group)
    events = [*list_events(stage, stages, len(chunks), number, group, is_combined=is_combined)]
    workspaces = list_workspaces(run, has_head=stage == stages - 1)
    # What DeepSpeed's blocks add is not known.
    has_rounding = run.gpu is not None and optimizer.kind == "megatron"
    # Where nothing asks for rounding, expandable segments are the plainest: nothing lies anywhere in them.
    is_expandable = run.expandable_segments or not (has_rounding or simulates_allocator)
    allocator = CachingAllocator(is_expandable=is_expandable, counts_reserved=simulates_allocator)
    step = Step(allocator, chunks, events, workspaces, buckets=standing.buckets, moved=moved, is_combined=is_combined)
    found = play_rank(step, standing, num_steps=2 if simulates_allocator else 1)

    none = dict.fromkeys(PARTS, 0) | {"workspaces": sum(map(sum, workspaces.values()))}
    stays = none | standing.sum_parts(Born.SETUP, Born.FIRST_STEP)
    stays["rounding"] = found.rounding_at_rest if has_rounding else 0
    running = none | standing.sum_parts(Born.SETUP, Born.FIRST_STEP, Born.MICRO_BATCHES)
    for part, num_bytes in found.parts.items():
        running[part] += num_bytes
    running["rounding"] = found.rounding if has_rounding else 0
    running["deferred gradients"] = _count_deferred(run, num_micro_batches) if stage == stages - 1 else 0
    # A chunk's block has the latest micro batch's input in an attribute until the next one comes
    # (core/transformer/transformer_block.py:578 of megatron-core 0.16.1), and the schedule lets it keep its gradient
    # (core/pipeline_parallel/schedules.py:469).
    inputs = sum(2 * chunk.input_bytes for chunk in chunks) + _count_inputs_of_experts(run, chunks, layers)
    at_rest = stays | standing.sum_parts(Born.SETUP, Born.FIRST_STEP, Born.EACH_STEP) | {"stage inputs": inputs}
    gradients = at_rest["gradients"] + standing.step_gradients
    ends = {
        found.moment: running,
        "reduction of the gradients": stays
        | {"gradients": standing.reduction, "micro batches": sum(chunks[-1].batch_bytes)},
        "optimizer step": at_rest | {"gradients": gradients, "transients": standing.step_transient},
    }
    moment = max(ends, key=lambda each: sum(ends[each].values()))
    on_host = [sum(map(sum, each)) for each in moved]
    return RankEstimate(
        "all ranks" if stages == 1 else {0: "first stage", stages - 1: "last stage"}.get(stage, f"stage {stage}"),
        sum(chunk.num_parameters for chunk in chunks),
        moment,
        ends[moment],
        at_rest,
        rounded_bytes=found.rounded if simulates_allocator else None,
        reserved_bytes=found.reserved if simulates_allocator else None,
        host_bytes=max(itertools.accumulate(on_host[e.chunk] * (1 if e.is_forward else -1) for e in events)),
    )


def _list_standing(run: Run, chunks: Sequence[ChunkMemory], *, accumulates: bool) -> Standing:
    """What stands on a stage's ranks. Ranks that share states of experts are others than share the rest."""
    optimizer = run.optimizer
    # Context-parallel ranks share them like data-parallel ones.
    ranks = run.layout.dp * run.layout.cp // optimizer.instances
    sharing = ranks, ranks * run.layout.tp // (run.layout.ep * run.layout.etp)
    if optimizer.fsdp is not None:
        return ShardedChunk(optimizer.fsdp, chunks[0], run.dtype, run.float8_weights, *sharing).stand()
    if optimizer.kind == "megatron":
        return list_megatrons(run, chunks, sharing)
    sizes = [each.size for chunk in chunks for each in chunk.parameters]
    if optimizer.kind == "deepspeed":
        # Of a layer, the embedding or the output layer: what ZeRO-3 gathers at once at least.
        owned = (of.total() for chunk in chunks for owner, of in chunk.elements.items() if owner is not None)
        largest = max(owned, default=0)
        return list_zeros(sizes, run.dtype, optimizer, ranks=ranks, largest=largest, accumulates=accumulates)
    # Without an optimizer gradients stay where micro batches add to them.
    parts = ["weights", "gradients"] if accumulates else ["weights"]
    return Standing(tensors=tuple(Tensor(part, size * run.dtype.itemsize) for part in parts for size in sizes))


def _count_deferred(run: Run, num_micro_batches: int) -> int:
    """Inputs of the output layer and gradients of the logits, of earlier micro batches, at a step's last forward.

    The buffers take those of the first micro batches up to the limit (core/tensor_parallel/layers.py:
    LinearWithGradAccumulationAndAsyncCommunication of megatron-core 0.16.1), until the pipeline is empty.
    """
    if run.deferred_head_gradients is None:
        return 0
    limit = run.deferred_head_gradients or num_micro_batches
    logits = run.num_tokens * run.padded_vocab_size // run.layout.tp
    return min(limit, num_micro_batches - 1) * (logits * run.dtype.itemsize + _count_hidden_bytes(run))


def _count_hidden_bytes(run: Run) -> int:
    parts = run.layout.tp if run.layout.sp else 1
    return run.num_tokens * run.model.hidden_size // parts * run.dtype.itemsize


def _count_inputs_of_experts(run: Run, chunks: Sequence[ChunkMemory], layers: Sequence[Sequence[int]]) -> int:
    """The latest input of each layer with experts, and its gradient, where forwards run beside backwards.

    Such a layer's graph begins at an input of its own (core/pipeline_parallel/utils.py:249 of Megatron-LM at
    d98e8a64dd), and its dispatcher has the router's probabilities with that graph until the next micro batch comes
    (core/transformer/moe/token_dispatcher.py:642). A stage's own input counts for the first layer already. What layers
    of multi-token prediction keep is not counted.
    """
    if not run.layout.overlaps or run.layout.dispatcher != "alltoall":
        return 0
    has_experts, pairs = run.model.layers_with_experts, zip(chunks, layers, strict=True)
    number = sum(has_experts[layer] for chunk, own in pairs for layer in own[1 if chunk.input_bytes else 0 :])
    return 2 * number * _count_hidden_bytes(run)

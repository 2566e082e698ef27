"""Lists what a rank holds beyond its micro batches: weights, gradients and optimizer states, each tensor once.

From this one list come the bytes of each part, what torch's allocator adds to them, and what it reserves (`play.py`).
DeepSpeed's tensors are in `zero.py`, those of Megatron-FSDP in `megatron_fsdp.py`. References are to megatron-core
0.16.1.

Megatron's DistributedDataParallel holds gradients in float32 buffers (of float16 in float16), one for each chunk, and
with the distributed optimizer weights too (core/distributed/param_and_grad_buffer.py). Experts have buffers of their
own, and an optimizer of their own behind that of all else (core/optimizer/__init__.py:604-689). Buffers are made on a
stream of their own, whose free blocks no other tensor takes (training/training.py:2523 of Megatron-LM at d98e8a64dd).
Adam's moments are float32, and of 16-bit weights there is a float32 copy, cloned before it is converted; they are a
tensor for each parameter, or of the distributed optimizer for each part of one that is this rank's
(core/optimizer/distrib_optimizer.py:391-399 and optimizer.py:674). Moments are made in the first step, in what the
first forwards and backwards have freed. The step converts 16-bit gradients to float32, of the rank's part, and the next
step's `zero_grad` frees the copies (optimizer.py:759, distrib_optimizer.py:2419). The precision-aware optimizer
converts none, and its states have dtypes of their own.

Muon takes every weight of two dimensions that is no word embedding or output layer, with one float32 momentum; Adam
takes the rest. With --use-distributed-optimizer a rank has copy and momentum of whole parameters only. They lie over
the data-parallel ranks in one of two ways: dealt out by size to and fro, with weights and gradients as without it; or
with a layout, in which Muon's weights and gradients are a buffer of equal shards that no parameter crosses, padded to
the largest, and Adam's states are divided evenly (Megatron-LM at d98e8a64dd, megatron/core/optimizer: __init__.py:735-
990, emerging_optimizers.py, layer_wise_optimizer.py). What Newton-Schulz makes and frees is not counted.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tempo_megatron.memory.rank.allocator import round_up
from tempo_megatron.memory.run import OptimizerSettings, Run
from tempo_megatron.memory.simulated.chunk_memory import ChunkMemory, Parameter, Segment

FLOAT32 = 4
_ALIGNMENT, _BUCKET_ALIGNMENT = 64, 128
"""Elements to which a distributed optimizer rounds up a parameter's begin and a bucket's end
(core/optimizer/param_layout.py)."""
_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_OF_RANK = 40_000_000, 1_000_000
_LARGEST_SHARD = 1.3
"""Of the mean of Muon's shards: a weight that would make a shard larger goes to the smallest."""


class Born(enum.Enum):
    """When a tensor is made, and how long it stays."""

    SETUP = "before the first step, for good"
    PASSING = "before the first step, until the next tensor is made that stays"
    FIRST_STEP = "by the first optimizer step, for good"
    EACH_STEP = "by each optimizer step, until the next step begins"
    MICRO_BATCHES = "by a step's first micro batch, until its optimizer step is over"


class Tensor(NamedTuple):
    """A tensor that stands beside micro batches."""

    part: str
    """One of `estimate.PARTS`."""
    num_bytes: int
    born: Born = Born.SETUP
    is_in_buffers: bool = False
    """Whether it is made on the stream of Megatron's buffers."""


class Buckets:
    """What a step has of weights and gradients while a segment runs, beside those that stand; here nothing."""

    def list_held(self, segment: Segment) -> Mapping[Any, int]:
        """What -> the bytes of a tensor that is there as long as it runs."""
        return {}

    def count_flush(self, segment: Segment) -> int:
        """Bytes more at its end."""
        return 0


@dataclasses.dataclass(frozen=True)
class Standing:
    """All tensors of a rank beside its micro batches."""

    tensors: tuple[Tensor, ...] = ()
    """In the order in which they are made."""
    buckets: Buckets = dataclasses.field(default_factory=Buckets)
    reduction: int = 0
    """Bytes of gradients, buckets and their copies at the end of the last backward, when the rest of them is reduced;
    0 where that needs no more than stands."""
    step_gradients: int = 0
    """Bytes of gradients in the optimizer's step beyond those that stay."""
    step_transient: int = 0
    """What the optimizer's step makes and frees beside all this; there is no activation then."""

    def sum_parts(self, *born: Born) -> dict[str, int]:
        """Part -> the bytes of its tensors that are made then."""
        found: collections.Counter[str] = collections.Counter()
        for tensor in self.tensors:
            if tensor.born in born:
                found[tensor.part] += tensor.num_bytes
        return dict(found)


def divide_like(total: int, sizes: Sequence[int]) -> Iterator[int]:
    """`total` bytes, divided like parameters of these sizes."""
    end, of_all, before = 0, max(1, sum(sizes)), 0
    for size in sizes:
        end += size
        share = total * end // of_all
        yield share - before
        before = share


def list_megatrons(run: Run, chunks: Sequence[ChunkMemory], sharing: tuple[int, int]) -> Standing:
    """What stands where the optimizer is Megatron's, of the last of the ranks that share its states.

    sharing: ranks that share the states of what is no expert, and those of experts.
    """
    optimizer, of_weight = run.optimizer, run.dtype.itemsize
    is_distributed = optimizer.distributed or optimizer.muon == "laid out"
    of_gradient = optimizer.gradient_bytes or (2 if run.dtype == torch.float16 else FLOAT32)
    parameters = [each for chunk in chunks for each in chunk.parameters]
    of_weights = of_weight * sum(each.size for each in parameters)
    if run.float8_weights:
        of_weights -= (of_weight - 1) * sum(chunk.float8_weights for chunk in chunks)
    pieces, padding, transient = [(size, 2) for size in _list_pieces(run, chunks, sharing)], 0, 0
    if optimizer.muon is not None:
        pieces, padding, transient = list_muons(parameters, optimizer.muon, sharing, of_weight)
    weights = divide_like(of_weights, [each.size for each in parameters])
    tensors = [Tensor("weights", size, Born.PASSING if is_distributed else Born.SETUP) for size in weights]
    # Each chunk has a buffer of what is no expert, and one of experts.
    buffers = [sum(p.size for p in chunk.parameters if p.is_expert == of) for chunk in chunks for of in (False, True)]
    buffers[0] += padding
    shares = divide_like(of_weights + padding * of_weight, buffers)
    for size, share in zip(buffers, shares, strict=True):
        tensors += [Tensor("weights", share, is_in_buffers=True)] if is_distributed else []
        tensors.append(Tensor("gradients", size * of_gradient, is_in_buffers=True))
    copy = FLOAT32 if of_weight < FLOAT32 else 0
    of_copy, *of_moments = optimizer.state_bytes or (copy, FLOAT32, FLOAT32)
    for size, _ in pieces if of_copy else ():
        tensors.append(Tensor("weights", size * of_weight, Born.PASSING))
        tensors.append(Tensor("optimizer states", size * of_copy))
    if of_gradient < FLOAT32 and optimizer.state_bytes is None:
        tensors += [Tensor("gradients", size * FLOAT32, Born.EACH_STEP) for size, _ in pieces]
    moments = [size * each for size, number in pieces for each in of_moments[:number]]
    tensors += [Tensor("optimizer states", size, Born.FIRST_STEP) for size in moments]
    return Standing(tensors=tuple(tensors), step_transient=transient)


def _list_pieces(run: Run, chunks: Sequence[ChunkMemory], sharing: tuple[int, int]) -> Iterator[int]:
    """Elements of each piece of a parameter whose states the rank has: of experts, which have an optimizer of their
    own, behind all else."""
    optimizer, bucket_elements = run.optimizer, None
    if optimizer.overlaps_reduction and not chunks[0].input_bytes:
        # Only buffers of the first stage's first chunk are reduced in several buckets (training/training.py:2179-2194
        # and 2491-2502 of Megatron-LM at d98e8a64dd).
        of_ranks = _BUCKET_ELEMENTS_OF_RANK * run.layout.dp * run.layout.cp
        bucket_elements = optimizer.bucket_elements or max(_BUCKET_ELEMENTS, of_ranks)
        if optimizer.num_buckets is not None:
            bucket_elements = sum(chunk.num_parameters for chunk in chunks) // optimizer.num_buckets
    shares_embedding = run.layout.pp > 1 and not run.model.untie_embeddings_and_output_weights
    for is_expert, ranks in zip((False, True), sharing, strict=True):
        for place, chunk in enumerate(chunks):
            own = [each for each in chunk.parameters if each.is_expert == is_expert]
            yield from list_own_pieces(own, ranks, optimizer, shares_embedding, None if place else bucket_elements)


def list_own_pieces(
    parameters: Sequence[Parameter],
    ranks: int,
    optimizer: OptimizerSettings,
    shares_embedding: bool,
    bucket_elements: int | None = None,
) -> Iterator[int]:
    """Elements of each piece of a buffer's parameters whose states a rank has: of the distributed optimizer the last of
    equal parts of each bucket, else all.

    A buffer has its parameters in reverse order, and a word embedding that another stage has too in a bucket of its own
    (core/optimizer/distrib_optimizer.py: _compute_per_buffer_param_layout).
    """
    if not optimizer.distributed:
        yield from (each.size for each in parameters)
        return
    bucket: list[tuple[int, int]] = []

    def take_own() -> Iterator[int]:
        size = round_up(bucket[-1][1], math.lcm(ranks, _BUCKET_ALIGNMENT)) if bucket else 0
        own = size - size // ranks
        yield from (last - max(first, own) for first, last in bucket if last > own)
        bucket.clear()

    for each in reversed(parameters):
        is_alone = shares_embedding and len(each.shape) == 2 and not each.is_matrix and not each.is_expert
        if is_alone:
            yield from take_own()
        first = round_up(bucket[-1][1] if bucket else 0, _ALIGNMENT)
        bucket.append((first, first + each.size))
        if is_alone or (bucket_elements is not None and bucket[-1][1] >= bucket_elements):
            yield from take_own()
    yield from take_own()


def list_muons(
    parameters: Sequence[Parameter], muon: str, sharing: tuple[int, int], of_weight: int
) -> tuple[list[tuple[int, int]], int, int]:
    """Elements and moments of each piece of a parameter whose states the last rank has; elements of padding in its
    buffers; and what the step makes and frees. `muon` is that of OptimizerSettings, `of_weight` the bytes of one."""
    pieces: list[tuple[int, int]] = []
    padding = transient = 0
    for is_expert, ranks in zip((False, True), sharing, strict=True):
        own = given = [each for each in parameters if each.is_expert == is_expert]
        # With one rank for all Megatron divides nothing.
        is_divided = sharing[0] > 1 and ranks > 1
        if is_divided and muon == "dealt":
            # From the smallest on, to the first rank, ..., the last, the last, ..., the first: what the last one gets.
            by_size = enumerate(sorted(given, key=lambda each: each.size))
            own = [each for place, each in by_size if place % (2 * ranks) in (ranks - 1, ranks)]
            # The updated weights are flattened, and those of all ranks gathered beside the model's.
            transient = max(transient, of_weight * sum(each.size for each in [*given, *own]))
        elif is_divided and muon == "laid out":
            own, more = _lay_out([each for each in given if each.is_matrix], ranks)
            padding += more
        pieces += [(each.size, 1 if each.is_matrix else 2) for each in own]
        if is_divided and muon == "laid out":
            pieces += [(-(-each.size // ranks), 2) for each in given if not each.is_matrix]
    return pieces, padding, transient


def _lay_out(matrices: Sequence[Parameter], ranks: int) -> tuple[list[Parameter], int]:
    """The last shard's, and the elements of padding in all shards.

    The weights that cost Newton-Schulz most come first, each to the shard that costs least so far.
    """
    shards: list[list[Parameter]] = [[] for _ in range(ranks)]
    ends, costs = [0] * ranks, [0] * ranks
    total = sum(each.size for each in matrices)
    largest = total / ranks * _LARGEST_SHARD

    def compute_cost(parameter: Parameter) -> int:
        return parameter.size * min(parameter.shape)

    # Among those that cost as much, the last of the model comes first.
    for parameter in sorted(matrices, key=compute_cost)[::-1]:
        fitting = [place for place in range(ranks) if round_up(ends[place], _ALIGNMENT) + parameter.size <= largest]
        place = min(fitting, key=costs.__getitem__) if fitting else min(range(ranks), key=ends.__getitem__)
        shards[place].append(parameter)
        ends[place] = round_up(ends[place], _ALIGNMENT) + parameter.size
        costs[place] += compute_cost(parameter)
    size = round_up(max(ends), math.lcm(_ALIGNMENT, math.lcm(ranks, _BUCKET_ALIGNMENT) // ranks))
    return shards[-1], size * ranks - total

"""Counts what a rank of Megatron-LM holds from step to step where its optimizer is Muon.

Muon takes every weight of two dimensions that is no word embedding or output layer, with one float32 momentum; Adam
takes the rest with its two. Of 16-bit weights there is a float32 copy besides. With --use-distributed-optimizer a rank
has copy and momentum of whole parameters only (layer-wise). They lie over the data-parallel ranks in one of two ways:
dealt out by size to and fro, with weights and gradients as without it; or with a layout, in which Muon's weights and
gradients are a buffer of equal shards that no parameter crosses, padded to the largest, and Adam's states are divided
evenly. References are to Megatron-LM at d98e8a64dd, megatron/core/optimizer: __init__.py:735-990,
emerging_optimizers.py (_is_muon_excluded), layer_wise_optimizer.py (_shard_params_ping_pong,
_compute_per_buffer_param_layout).

Not in it: what the Newton-Schulz iterations of one weight make and free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from tempo_megatron.memory.rank.model_states import ModelStates
from tempo_megatron.memory.simulated.chunk_memory import Parameter

_FLOAT32 = 4
_MUON, _ADAM = 1, 2
_ALIGNMENT = 64
_LARGEST_SHARD = 1.3
"""Of the mean: a weight that would make a shard larger goes to the smallest."""

Piece = tuple[int, int]
"""Elements of a parameter whose states a rank has, and how many moments they have."""


def count_muon_states(
    parameters: Sequence[Parameter], dtype: torch.dtype, muon: str, *, ranks: int, expert_ranks: int
) -> tuple[ModelStates, list[Piece]]:
    """The states of the last of the ranks that share them, and of which pieces they are made.

    Args:
        parameters: of the rank, all chunks.
        dtype: of the weights.
        muon: as OptimizerSettings has it.
        ranks: that share the states of what is no expert.
        expert_ranks: that share those of the experts.
    """
    num_elements, transient, pieces = sum(each.size for each in parameters), 0, []
    # With one rank Megatron divides nothing.
    divides = ranks > 1 and muon != "whole"
    for is_expert, parts in ((False, ranks), (True, expert_ranks)):
        given = [each for each in parameters if each.is_expert == is_expert]
        if not divides or parts == 1:
            pieces += [(each.size, _count_moments(each)) for each in given]
        elif muon == "dealt":
            own = list(_deal_out(given, parts))
            pieces += [(each.size, _count_moments(each)) for each in own]
            # The updated weights are flattened, and those of all ranks gathered beside the model's.
            transient = max(transient, dtype.itemsize * sum(each.size for each in [*given, *own]))
        else:
            shard, padding = _lay_out([each for each in given if each.is_matrix], parts)
            num_elements += padding
            pieces += [(each.size, _MUON) for each in shard]
            pieces += [(-(-each.size // parts), _ADAM) for each in given if not each.is_matrix]
    copies = 1 if dtype.itemsize < _FLOAT32 else 0
    gradients = _FLOAT32 * num_elements
    states = ModelStates(
        weights=dtype.itemsize * num_elements,
        optimizer_states=sum(_FLOAT32 * size * (copies + moments) for size, moments in pieces),
        standing_gradients=gradients,
        gradients=gradients,
        gradients_at_rest=gradients,
        step_transient=transient,
    )
    return states, pieces


def _count_moments(parameter: Parameter) -> int:
    return _MUON if parameter.is_matrix else _ADAM


def _deal_out(parameters: Iterable[Parameter], ranks: int) -> Iterator[Parameter]:
    """The last rank's: from the smallest parameter on, to the first rank, ..., the last, the last, ..., the first."""
    for place, parameter in enumerate(sorted(parameters, key=lambda each: each.size)):
        if place % (2 * ranks) in (ranks - 1, ranks):
            yield parameter


def _lay_out(matrices: Sequence[Parameter], ranks: int) -> tuple[list[Parameter], int]:
    """The last shard's, and the elements of padding in all shards.

    The weights that cost Newton-Schulz most come first, each to the shard that costs least so far.
    """
    shards: list[list[Parameter]] = [[] for _ in range(ranks)]
    ends, costs = [0] * ranks, [0] * ranks
    total = sum(each.size for each in matrices)
    largest = total / ranks * _LARGEST_SHARD

    def find_cost(parameter: Parameter) -> int:
        return parameter.size * min(parameter.shape)

    # Among those that cost as much, the last of the model comes first.
    backwards = list(reversed(matrices))
    for parameter in sorted(backwards, key=find_cost, reverse=True):
        fitting = [place for place in range(ranks) if _align(ends[place]) + parameter.size <= largest]
        place = (
            min(fitting, key=lambda each: costs[each]) if fitting else min(range(ranks), key=lambda each: ends[each])
        )
        shards[place].append(parameter)
        ends[place] = _align(ends[place]) + parameter.size
        costs[place] += find_cost(parameter)
    size = _align(max(ends), math.lcm(_ALIGNMENT, math.lcm(ranks, 128) // ranks))
    return shards[-1], size * ranks - total


def _align(number: int, divisor: int = _ALIGNMENT) -> int:
    return -(-number // divisor) * divisor

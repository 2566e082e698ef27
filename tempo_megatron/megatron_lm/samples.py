"""Tells Tempo's dropout which samples a micro batch holds, from what Megatron-LM knows.

Megatron's schedules say before each forward which micro batch of the step it is, for each model chunk of its own under
interleaving; its arguments say how many samples the run has consumed, also after it was resumed. Evaluation does not
count: it draws no masks, and consumes samples of its own.
"""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state

from tempo_megatron.slots.dropout_rng import set_micro_batch


def announce_micro_batch(args: Any, microbatch_id: int) -> None:
    """Say which samples the next forward sees: those of a step's micro batch, by Megatron's arguments."""
    rank = parallel_state.get_data_parallel_rank()
    set_micro_batch(args.seed, find_first_sample(args, microbatch_id, rank))


def find_first_sample(args: Any, microbatch_id: int, data_parallel_rank: int) -> int:
    """Index over the whole run of the first sample that this rank's micro batch holds, as Megatron's sampler deals."""
    place = microbatch_id * args.data_parallel_size + data_parallel_rank
    return int(args.consumed_train_samples + place * args.micro_batch_size)

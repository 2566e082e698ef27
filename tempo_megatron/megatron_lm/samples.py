"""Tells Tempo's dropout which samples a micro batch holds, from what Megatron-LM knows.

Megatron's schedules say before each forward which micro batch of the step it is, for each model chunk of its own under
interleaving; its arguments say how many samples the run has consumed, also after it was resumed. Evaluation counts for
nothing: it draws no masks, and consumes samples of its own. Where no model draws masks nothing is told, so that
Megatron's tracker holds its own states only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state

from tempo_megatron.slots.dropout_rng import set_micro_batch


class MicroBatches:
    """Says which samples the forward that begins sees, once a model of the run draws masks.

    Args:
        get_args: Megatron's.
    """

    def __init__(self, get_args: Callable[[], Any]) -> None:
        self._get_args = get_args
        self.is_drawn_for = False
        """Whether a model draws masks for them."""

    def follow(self, begin_micro_batch: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        """Megatron's own function that is called at the start of a micro batch, which says it to Tempo as well."""

        @functools.wraps(begin_micro_batch)
        def begin(model: Any, microbatch_id: int) -> Any:
            if self.is_drawn_for:
                args = self._get_args()
                rank = parallel_state.get_data_parallel_rank()
                set_micro_batch(args.seed, find_first_sample(args, microbatch_id, rank))
            return begin_micro_batch(model, microbatch_id)

        return begin


def find_first_sample(args: Any, microbatch_id: int, data_parallel_rank: int) -> int:
    """Index over the whole run of the first sample that this rank's micro batch holds, as Megatron's sampler deals."""
    place = microbatch_id * args.data_parallel_size + data_parallel_rank
    return int(args.consumed_train_samples + place * args.micro_batch_size)

"""Which samples a micro batch holds, told to Tempo's dropout by what Megatron-LM knows.

Megatron's schedules say before each forward which micro batch of the step it is, for each model chunk of its own under
interleaving; its arguments say how many samples the run has consumed, also after it was resumed. Evaluation counts for
nothing: it draws no masks, and consumes samples of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state

from tempo_megatron.slots.dropout_rng import set_micro_batch


class MicroBatches:
    """Says which samples the forward that begins sees, and that a training forward begins without it.

    Args:
        get_args: Megatron's.
    """

    def __init__(self, get_args: Callable[[], Any]) -> None:
        self._get_args = get_args
        self._is_announced = False

    def follow(self, begin_micro_batch: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        """Megatron's own function that is called at the start of a micro batch, which says it to Tempo as well."""

        @functools.wraps(begin_micro_batch)
        def begin(model: Any, microbatch_id: int) -> Any:
            self._announce(microbatch_id)
            return begin_micro_batch(model, microbatch_id)

        return begin

    def check(self, model: torch.nn.Module, *_: Any) -> None:
        """A forward pre-hook of a model that draws masks.

        Raises RuntimeError where a second training forward would draw the masks of the one before.
        """
        if not model.training:
            return
        if not self._is_announced:
            raise RuntimeError(
                f"{type(model).__name__} runs forward in training mode outside of Megatron's schedules, so that "
                "Tempo's dropout does not know which samples it sees; call model.eval() first, or set tempo.dropout "
                'and tempo.attention to "off"'
            )
        self._is_announced = False

    def _announce(self, microbatch_id: int) -> None:
        args = self._get_args()
        set_micro_batch(args.seed, find_first_sample(args, microbatch_id, parallel_state.get_data_parallel_rank()))
        self._is_announced = True


def find_first_sample(args: Any, microbatch_id: int, data_parallel_rank: int) -> int:
    """Index over the whole run of the first sample that this rank's micro batch holds, as Megatron's sampler deals."""
    place = microbatch_id * args.data_parallel_size + data_parallel_rank
    return int(args.consumed_train_samples + place * args.micro_batch_size)

"""Numbers the samples that the forwards of a model see, over all steps and ranks, as if one device saw them in order.

Gradient caching runs a batch without a gradient, restores torch's generator, and runs it again with one. Masks advance
no generator, so that several forwards may begin in one state. A forward in training without a gradient advances it by
one number, where stock's dropout advances it by many: then its state comes back only if the program restores it.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

FIRST_OVERSIZED = 1 << 47
"""From here on batches are numbered that have more samples than the first step's."""
OVERSIZED_BITS = 16
_MAX_STATES = 1 << 16


class ForwardPass:
    """One forward of the model: its samples, and how often it called the places that draw."""

    def __init__(self, num_samples: int, device: torch.device) -> None:
        self.num_samples, self.device = num_samples, device
        self.first_sample: int | None = None
        self.first_sample_tensor: Tensor | None = None
        # 0, or the bits of the distance between numbers of batches with more samples than the first step's.
        self.spacing = 0
        self.counts: dict[str, int] = {}
        self.is_over = False
        # The numbers of the nodes that autograd makes during the pass. A checkpointed region around the whole forward
        # runs it without a graph, and the region's own node has the number before.
        self.first_node = get_next_node() - 1
        self.last_node = self.first_node
        # `counts` at a module's call with a tensor, by (the module's number, the tensor's storage). A weak reference
        # frees the memory, but keeps another storage from getting the same address.
        self.entries: dict[tuple[int, int], tuple[StorageWeakRef, dict[str, int] | None]] = {}
        self.recalled: dict[str, int] | None = None


class Samples:
    """What is known of the samples of a model's forwards.

    Args:
        rank, num_ranks: this process among those that train on different samples; None for torch.distributed's.
        sequence: this process among those that share the tokens of a sample, and how many they are.
    """

    def __init__(self, rank: int | None, num_ranks: int | None, sequence: tuple[int, int]) -> None:
        self._ranks: tuple[Any, Any] = (rank, num_ranks)
        self.sequence = sequence
        self.num_steps = 0
        """Forwards that drew outside of `samples`."""
        self.step_samples: int | None = None
        """Samples of the first of them."""
        self.said: int | None = None
        """Samples of each batch, if `samples` says it."""
        # The next sample in `samples`, None outside of it, and whether a forward has drawn in it.
        self._next_sample: int | None = None
        self._has_begun = False
        self._drawn: dict[bytes, tuple[int, int]] = {}
        """First sample and spacing of forwards in training without a gradient, by the generator's state before."""

    @contextlib.contextmanager
    def set_next(self, first_sample: int, num_samples: int | None = None) -> Iterator[None]:
        """The context of `samples`."""
        if not 0 <= first_sample < FIRST_OVERSIZED:
            raise ValueError(f"first_sample is {first_sample}; expected 0 to 2**47 - 1, the index over the whole run")
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"num_samples is {num_samples}; expected at least 1, the samples of each batch")
        before = self.said, self._next_sample, self._has_begun
        self.said, self._next_sample, self._has_begun = num_samples, first_sample, False
        try:
            yield
        finally:
            self.said, self._next_sample, self._has_begun = before

    def __getstate__(self) -> dict[str, Any]:
        # A copy that is made inside of `samples` is outside of it.
        return {**self.__dict__, "said": None, "_next_sample": None, "_has_begun": False}

    def check_sequence(self) -> None:
        """Raises ValueError if ranks among which DeepSpeed's Ulysses divides a sample would draw masks as if they had
        another place in it, or as if each had the whole sample."""
        ulysses: Any = sys.modules.get("deepspeed.runtime.sequence_parallel.parallel_state_sp")
        if ulysses is None or ulysses._SEQUENCE_PARALLEL_GROUP is None:
            return
        size, given = ulysses.get_sequence_parallel_world_size(), self.sequence[1]
        # Without a rank or `samples` each process numbers its samples differently, so no two draw the same mask.
        if size != given and (given > 1 or self._ranks[0] is not None or self._next_sample is not None):
            raise ValueError(
                f"DeepSpeed's Ulysses divides a sample among {size} ranks, and sequence_ranks is {given}; expected "
                f"the same, or parts of a sample might get one dropout mask; give tempoize sequence_ranks={size}"
            )

    def number(self, now: ForwardPass) -> int:
        """Returns the index of a pass's first sample, found once, when it first draws."""
        state = self._read_state(now)
        drawn = None if state is None else self._drawn.get(state)
        if drawn is not None and (self._has_begun or self._next_sample is None):
            number, now.spacing = drawn
        else:  # what a person says comes first
            number = self._count_step(now) if self._next_sample is None else self._next_sample
        if state is not None and (drawn is not None or not torch.is_grad_enabled()):
            self._drawn[state] = number, now.spacing
            if len(self._drawn) > _MAX_STATES:
                del self._drawn[next(iter(self._drawn))]
            torch.rand((), device=now.device if now.device.type == "cuda" else "cpu")
        if self._next_sample is not None:
            self._next_sample, self._has_begun = number + now.num_samples, True
        now.first_sample = number
        return number

    def _read_state(self, now: ForwardPass) -> bytes | None:
        """Returns a hash of the generator's state and of the batch's size; None where it is not asked for again."""
        if torch.is_grad_enabled() and not self._drawn:
            return None
        if now.device.type == "meta" or torch._C._are_functorch_transforms_active():
            return None  # nothing can be drawn
        state = torch.cuda.get_rng_state(now.device) if now.device.type == "cuda" else torch.get_rng_state()
        return hashlib.blake2b(state.numpy().tobytes() + b"%d" % now.num_samples, digest_size=16).digest()

    def _count_step(self, now: ForwardPass) -> int:
        """Returns the first of as many numbers as a pass has samples, which no other step or rank uses."""
        rank, num_ranks = get_rank() if None in self._ranks else self._ranks
        if self.step_samples is None:
            self.step_samples = now.num_samples
        step = self.num_steps * num_ranks + rank
        self.num_steps += 1
        if now.num_samples <= self.step_samples:
            first, number = 0, step * self.step_samples
        else:
            # More samples than in the first step get separate numbers, which other ranks need not know.
            now.spacing = max(OVERSIZED_BITS, (now.num_samples - 1).bit_length())
            first, number = FIRST_OVERSIZED, step << now.spacing
        if number + now.num_samples > FIRST_OVERSIZED:
            raise ValueError(
                f"{self.num_steps} forwards on {num_ranks} ranks, the first of {self.step_samples} samples, have come "
                "to sample 2**47; expected fewer; say with tempo_torch.samples which samples a forward sees"
            )
        return first + number

    def is_restored(self, now: ForwardPass) -> bool:
        """Returns whether the program has restored the generator's state of a forward that drew."""
        state = self._read_state(now)
        return state is not None and state in self._drawn


def get_rank() -> tuple[int, int]:
    """Returns this process's rank in torch.distributed and the number of ranks; (0, 1) without it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def get_next_node() -> int:
    """Returns the number that autograd will give the next node."""
    return torch._C._autograd._get_sequence_nr()

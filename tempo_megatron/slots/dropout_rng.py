"""Gives each dropout mask its key: seed, sample, layer and place, whatever the layout over devices.

A mask is a pure function of (seed, global sample, stack, layer, site, global head, global row, global column). The
trainer announces the samples of each micro batch. The announcement is stored as a named state of Megatron's CUDA RNG
tracker. Every recomputation saves and restores the tracker's states, so a recomputed forward sees the samples of its
own micro batch, under any pipeline schedule. No generator is ever advanced.

Megatron treats every state of its tracker as that of a CUDA generator: it registers the states with CUDA graphs, saves
them in checkpoints, and converts them from one form to the other. So this one is such a state too, in the form of the
tracker's other states. Its seed is the run's seed, and its offset is the sample.
"""

from __future__ import annotations

import enum
import functools
import struct
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from tempo_kernels.philox import derive_key
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.slots.linear import is_in_backward

STATE_NAME = "tempo-micro-batch"
# A CUDA generator's offset counts words of Philox, and must be a whole number of blocks of four.
_WORDS = 4
# A generator's state as bytes: the seed, then the offset, in this machine's byte order.
_STATE = struct.Struct("=Qq")

_REMEDY = (
    "call tempo_megatron.set_micro_batch(seed, first_sample) before each forward in training mode (with another seed "
    'for other masks of the same samples), call model.eval() first, or set tempo.dropout and tempo.attention to "off"'
)

_DRAWN: set[int] = set()
"""The keys of the masks that forwards have drawn since the micro batch was announced."""


class Stack(enum.IntEnum):
    """The stacks of layers that one model can have; layers of both are numbered from 1."""

    DECODER = 0
    ENCODER = 1


class Site(enum.IntEnum):
    """The places of a layer where dropout is applied; the embedding is layer 0. The numbers are part of the masks."""

    EMBEDDING = 0
    ATTENTION = 1
    SELF_ATTENTION_OUTPUT = 2
    MLP_OUTPUT = 3
    CROSS_ATTENTION_OUTPUT = 4
    CROSS_ATTENTION = 5


def draws_masks(config: Any, tempo_config: TempoConfig) -> bool:
    """Whether a model draws Tempo's masks, so that its micro batches must be announced.

    Args:
        config: has `hidden_dropout` and `attention_dropout`, such as a TransformerConfig.
        tempo_config: the model's.
    """
    dropouts = {"dropout": config.hidden_dropout, "attention": config.attention_dropout}
    return any(p > 0 and tempo_config.values_of(name) != {"off"} for name, p in dropouts.items())


def set_micro_batch(seed: int, first_sample: int) -> None:
    """Announce which samples the next forward sees. Call it before the forward of every training micro batch.

    Args:
        seed: the run's seed, any 64-bit integer; equal on every rank.
        first_sample: index of the micro batch's first sample over the whole run, as if one device consumed all samples
            in order; in [0, 2**48). The samples of a micro batch are consecutive.

    Raises ValueError where an index is out of range.
    """
    if not 0 <= first_sample < 2**48:
        raise ValueError(f"first_sample is {first_sample}; it must be in [0, 2**48)")
    _DRAWN.clear()
    # A new state each time, because recomputation still holds those of earlier micro batches.
    states = get_cuda_rng_tracker().states_
    graphable = next((state for state in states.values() if isinstance(state, torch.Generator)), None)
    states[STATE_NAME] = _make_state(seed, first_sample, None if graphable is None else graphable.device)


def _make_state(seed: int, first_sample: int, device: torch.device | None) -> Tensor | torch.Generator:
    """The state as bytes, or for CUDA graphs, where `device` is given, as a generator."""
    seed, offset = seed % 2**64, _WORDS * first_sample
    if device is None:
        return torch.tensor(list(_STATE.pack(seed, offset)), dtype=torch.uint8)
    generator = torch.Generator(device).manual_seed(seed)
    generator.set_offset(offset)
    return generator


def read_micro_batch() -> tuple[int, int]:
    """(seed, first_sample) of the micro batch whose forward, or recomputed forward, is running.

    Raises RuntimeError where `set_micro_batch` was never called.
    """
    state = get_cuda_rng_tracker().states_.get(STATE_NAME)
    if state is None:
        raise RuntimeError(f"Tempo's dropout does not know which samples it sees; {_REMEDY}")
    if isinstance(state, torch.Generator):
        seed, offset = state.initial_seed(), state.get_offset()
    else:
        seed, offset = _STATE.unpack(bytes(state.tolist()))
    return seed, offset // _WORDS


@functools.lru_cache(maxsize=4096)
def derive_site_key(seed: int, stack: Stack, layer_number: int, site: Site) -> int:
    """The 64-bit key of the masks at `site` of global layer `layer_number` of `stack`: no two places share one."""
    # A decoder's keys have no stack in them: they are older than stacks.
    path = (layer_number, site) if stack == Stack.DECODER else (layer_number, site, stack)
    return derive_key(seed, *map(int, path))


def find_key_and_sample(layer_number: int, site: Site, stack: Stack = Stack.DECODER) -> tuple[int, int]:
    """(64-bit key, first sample) for a dropout at `site` of layer `layer_number` (1-based) of `stack` in this forward.

    The layer number is global, over all pipeline stages.

    Raises RuntimeError where a forward that is not a recomputed one would draw the masks of an earlier forward.
    """
    seed, first_sample = read_micro_batch()
    key = derive_site_key(seed, stack, layer_number, site)
    if not is_in_backward():
        if key in _DRAWN:
            raise RuntimeError(
                f"dropout at {site.name} of {stack.name} layer {layer_number} would draw one mask twice: a second "
                f"forward in training mode runs, and no micro batch was announced since the first; {_REMEDY}"
            )
        _DRAWN.add(key)
    return key, first_sample

"""Where a dropout mask is applied, said in numbers that do not depend on how the model is laid out over devices.

A mask is a pure function of (seed, global sample, stack, layer, site, global head, global row, global column).
The trainer says once per micro batch which samples it holds; that nonce lives in a named state of Megatron's
CUDA RNG tracker, because every recomputation saves and restores the tracker's states: a recomputed forward
therefore sees the nonce of its own micro batch, under any pipeline schedule. Nothing is ever advanced.
"""

from __future__ import annotations

import enum
import functools

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from tempo_kernels.philox import derive_key

STATE_NAME = "tempo-micro-batch"


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


def set_micro_batch(seed: int, first_sample: int) -> None:
    """Say which samples the next forward sees. Call it before the forward of every training micro batch.

    Args:
        seed: the run's seed, any 64-bit integer; equal on every rank.
        first_sample: index over the whole run, as if one device consumed all samples in order, of the micro
            batch's first sample; its samples are consecutive. In [0, 2**48).

    Raises ValueError where an index is out of range.
    """
    if not 0 <= first_sample < 2**48:
        raise ValueError(f"first_sample is {first_sample}; it must be in [0, 2**48)")
    # A fresh tensor each time: recomputation holds on to the states of earlier micro batches.
    signed_seed = (seed + 2**63) % 2**64 - 2**63
    get_cuda_rng_tracker().states_[STATE_NAME] = torch.tensor([signed_seed, first_sample], dtype=torch.int64)


def read_micro_batch() -> tuple[int, int]:
    """(seed, first_sample) of the micro batch whose forward, or recomputed forward, is running.

    Raises RuntimeError where `set_micro_batch` was never called.
    """
    state = get_cuda_rng_tracker().states_.get(STATE_NAME)
    if state is None:
        raise RuntimeError(
            "Tempo's dropout does not know which samples it sees; call tempo_megatron.slots.dropout_rng.set_micro_batch"
            "(seed, first_sample) before the forward of each training micro batch"
        )
    seed, first_sample = state.tolist()
    return seed, first_sample


@functools.lru_cache(maxsize=4096)
def derive_site_key(seed: int, stack: Stack, layer_number: int, site: Site) -> int:
    """The 64-bit key of the masks at `site` of global layer `layer_number` of `stack`: no two places share one."""
    # A decoder's keys, GPT's too, are those of the masks drawn before there were stacks.
    path = (layer_number, site) if stack == Stack.DECODER else (layer_number, site, stack)
    return derive_key(seed, *map(int, path))


def find_key_and_sample(layer_number: int, site: Site, stack: Stack = Stack.DECODER) -> tuple[int, int]:
    """(64-bit key, first sample) for a dropout at `site` of layer `layer_number` (1-based) of `stack` in this forward.

    The layer number is global, over all pipeline stages.
    """
    seed, first_sample = read_micro_batch()
    return derive_site_key(seed, stack, layer_number, site), first_sample

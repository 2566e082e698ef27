"""Fake tensors for a step of a Megatron model, of which none stays behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from megatron.core import parallel_state

from tempo_megatron.memory.fake_tensors import use_fake_tensors


@contextlib.contextmanager
def use_megatron_fakes() -> Iterator[None]:
    """`use_fake_tensors`, with a global memory buffer of its own: Megatron's would keep fake tensors for later steps.

    A step whose dropout draws from Megatron's random states can be ordered with it, and not run: those states are no
    part of the trace. Nor is the micro batch by which Tempo draws its masks.
    """
    buffer = parallel_state.get_global_memory_buffer().buffer
    with use_fake_tensors(), mock.patch.dict(buffer, clear=True):
        yield

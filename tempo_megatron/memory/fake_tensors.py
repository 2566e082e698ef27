"""A model's real modules at their real size on tensors that have no memory and no values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch._subclasses.fake_tensor import FakeTensorMode

from tempo_megatron.slots.late_check import LateCheck


@contextlib.contextmanager
def use_fake_tensors() -> Iterator[None]:
    """Every tensor that is made inside has a shape, a dtype and a storage, and nothing else.

    No random states are swapped, and no flag is read: both need values. What Megatron compiles runs as it is written:
    compiled code would read memory that is not there.
    """
    tracker = get_cuda_rng_tracker()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.compiler.set_stance("force_eager"),
        mock.patch.object(tracker, "fork", lambda *_, **__: contextlib.nullcontext()),
        mock.patch.object(LateCheck, "note", lambda *_: None),
    ):
        yield

"""A tensor-parallel layout in one process: rank 0 of a group whose collectives do nothing.

Which tensors are kept, and their sizes, do not depend on the values that other ranks would send. torch's "fake"
process group is the one its own tests and distributed tracing use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def simulate_layout(tensor_model_parallel_size: int) -> Iterator[None]:
    """Model parallelism initialised as rank 0 of `tensor_model_parallel_size`; undone at the end.

    Raises ValueError where torch.distributed is already initialised: a real layout is there to be measured.
    """
    if torch.distributed.is_initialized():
        raise ValueError("torch.distributed is already initialised; measure in the real layout instead")
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=tensor_model_parallel_size)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_model_parallel_size, create_gloo_process_groups=False
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()

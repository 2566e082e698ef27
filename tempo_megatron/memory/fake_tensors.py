"""Runs a model's real modules at their real size, on tensors without memory and in layouts without other ranks.

Which tensors are kept, and their sizes, do not depend on the values that other ranks would send. torch's "fake"
process group is the one its own tests and distributed tracing use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def use_fake_tensors() -> Iterator[None]:
    """Every tensor that is made inside has a shape, a dtype and a storage, and nothing else.

    What Megatron compiles runs as it is written: compiled code would read memory that is not there. The scale of the
    experts' balancing loss, which a backward makes once in a process (moe_utils.py: MoEAuxLossAutoScaler), is there
    from the beginning, and as before at the end.
    """
    tracker: Any = get_cuda_rng_tracker()
    scaler, scale, fork = MoEAuxLossAutoScaler, MoEAuxLossAutoScaler.main_loss_backward_scale, tracker.fork
    if scale is None:
        scaler.main_loss_backward_scale = torch.tensor(1.0, dtype=torch.float32)
    # It swaps random states and compares them, which needs values. Megatron has a tracker without it for inference
    # only, which knows no states, and Tempo's masks need theirs.
    tracker.fork = lambda *_, **__: contextlib.nullcontext()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        tracker.fork, scaler.main_loss_backward_scale = fork, scale


@contextlib.contextmanager
def simulate_layout(tensor_model_parallel_size: int) -> Iterator[None]:
    """Model parallelism initialised as rank 0 of this size; undone at the end.

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


@contextlib.contextmanager
def use_megatron_fakes() -> Iterator[None]:
    """`use_fake_tensors`, and an empty global memory buffer before and after: it would keep fake tensors.

    A step whose dropout draws from Megatron's random states can be ordered with it, and not run: those states are no
    part of the trace. Nor is the micro batch by which Tempo draws its masks.
    """
    buffer = parallel_state.get_global_memory_buffer().buffer
    buffer.clear()
    try:
        with use_fake_tensors():
            yield
    finally:
        buffer.clear()

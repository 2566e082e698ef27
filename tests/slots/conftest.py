from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random

from tempo_megatron import cpu
from tempo_megatron.memory.fake_tensors import simulate_layout


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Megatron-core ready on the CPU in this process, alone, as distributed.run_megatron_ranks has it in others."""
    # What use_cpu() puts in the place of these would stand in the way of tests on a GPU.
    for name in ("current_device", "get_rng_state", "manual_seed"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
        monkeypatch.setattr(megatron_random, name, getattr(megatron_random, name))
    monkeypatch.setattr(torch.Tensor, "cuda", torch.Tensor.cuda)
    cpu.use_cpu()
    with simulate_layout(1):
        megatron_random.model_parallel_cuda_manual_seed(1234)
        torch.manual_seed(1234)
        yield
        megatron_random.get_cuda_rng_tracker().reset()

"""The estimate, and its simulation of the allocator, against torch's counters on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from distributed import run_ranks
from peak_cases import AUTO, FAMILIES, FUSED_ONLY, OFF, RECOMPUTE, Step, estimate_step, make_step

from tempo_megatron.models.shape import ModelShape, make_shape

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

# Large enough that what an allocator rounds up, 512 bytes to 2 MiB a tensor, is a small part.
SIZES: dict[str, Any] = {"num_layers": 6, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024}


@dataclasses.dataclass(frozen=True)
class LargeStep(Step):
    """As Step, of a size that people train."""

    __str__ = Step.__str__

    @property
    def shape(self) -> ModelShape:
        more = {"decoder_seq_length": 256} if self.family == "t5" else {}
        return make_shape(**{**FAMILIES[self.family], **SIZES, "vocab_size": 50_304, **more})

    @property
    def micro_batch_size(self) -> int:
        return 4


STEPS = [
    *(LargeStep("gpt", False, tempo) for tempo in (OFF, AUTO, RECOMPUTE, FUSED_ONLY)),
    LargeStep("gpt", False, AUTO, torch.float32),
    *(LargeStep("gpt", False, tempo, recompute=("full",)) for tempo in (OFF, AUTO)),
    LargeStep("gpt", False, OFF, recompute=("core_attn",)),
    *(LargeStep(family, False, tempo) for family in ("llama", "bert") for tempo in (OFF, AUTO)),
    LargeStep("gqa", False, RECOMPUTE),
    LargeStep("t5", False, AUTO),
]


def measure_on_gpu(step: Step) -> tuple[int, int]:
    """torch's highest numbers of bytes, allocated and reserved, of the second of two steps."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    ready = make_step(step, "cuda")
    before = torch.cuda.memory_allocated()
    # Workspaces of cuBLAS come out of torch's memory in the first step, and stay.
    ready.forward().backward()
    for parameter in ready.there:
        parameter.grad = None
    torch.cuda.synchronize()
    workspaces = torch.cuda.memory_allocated() - before
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    ready.forward().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - workspaces, torch.cuda.max_memory_reserved() - workspaces


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_gpu_allocates_and_reserves_what_is_estimated(step: Step) -> None:
    ((allocated, reserved),) = run_ranks(measure_on_gpu, 1, step)
    rank = estimate_step(step, stock="local", simulates_allocator=True)
    assert rank.peak_bytes == pytest.approx(allocated, rel=0.02)
    assert rank.rounded_bytes == pytest.approx(allocated, rel=0.02)
    assert rank.reserved_bytes == pytest.approx(reserved, rel=0.05)

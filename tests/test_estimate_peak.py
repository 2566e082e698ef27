"""The estimate against the peak of whole real steps on the CPU: it is exact, but for numbers of no dimension."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import run_megatron_ranks
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from peak_cases import AUTO, FUSED_ONLY, INPLACE_STOCK_HEAD, OFF, RECOMPUTE, Step, estimate_step, measure_step

from tempo_megatron import use_cpu
from tempo_megatron.memory.layout import simulate_layout

# The 0-dim tensors of the loss, which may or may not be there still when the peak is.
SCALARS_BYTES = 16

ONE_PROCESS = [
    Step(family, is_wide, tempo, dtype)
    for family in ("gpt", "llama", "bert")
    for is_wide, tempo, dtype in (
        (False, OFF, torch.bfloat16),
        (False, OFF, torch.float32),
        (False, AUTO, torch.bfloat16),
        (False, AUTO, torch.float32),
        (False, RECOMPUTE, torch.bfloat16),
        (False, INPLACE_STOCK_HEAD, torch.bfloat16),
        (False, FUSED_ONLY, torch.float32),
        (True, OFF, torch.bfloat16),
        (True, AUTO, torch.bfloat16),
    )
] + [
    Step(family, False, tempo, recompute=recompute)
    for family in ("gpt", "llama", "bert")
    for tempo in (OFF, AUTO)
    for recompute in (("full",), ("core_attn",))
]  # fmt: skip
TENSOR_PARALLEL = [
    Step(family, is_wide, tempo, tp=2, sp=sp, recompute=recompute)
    for family, sp in (("gpt", False), ("gpt", True), ("llama", True), ("bert", True))
    for is_wide, tempo, recompute in (
        (False, OFF, ()),
        (False, AUTO, ()),
        (False, OFF, ("full",)),
        (False, RECOMPUTE, ("core_attn",)),
        (True, AUTO, ()),
    )
]


@pytest.fixture(autouse=True)
def _without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor's own code makes, no dispatcher sees."""
    monkeypatch.setenv("CXX", "no-compiler")


@pytest.mark.parametrize("step", ONE_PROCESS, ids=str)
def test_the_peak_of_a_step_is_estimated(step: Step) -> None:
    use_cpu()
    with torch.compiler.set_stance("force_eager"), simulate_layout(1):
        model_parallel_cuda_manual_seed(1)
        measured = measure_step(step)
    assert abs(estimate_step(step) - measured) <= SCALARS_BYTES


def measure_all(steps: list[Step]) -> list[int]:
    with torch.compiler.set_stance("force_eager"):
        return [measure_step(step) for step in steps]


def test_the_peak_of_a_step_is_estimated_on_tensor_parallel_ranks() -> None:
    measured: list[list[int]] = run_megatron_ranks(measure_all, 2, 2, TENSOR_PARALLEL)
    wrong: dict[str, Any] = {}
    for step, *found in zip(TENSOR_PARALLEL, *measured, strict=True):
        estimated = estimate_step(step)
        if any(abs(estimated - each) > SCALARS_BYTES for each in found):
            wrong[str(step)] = estimated, found, [f"{estimated / each - 1:+.2%}" for each in found]
    assert not wrong

"""Every operation in a CUDA graph, and without waiting for the GPU.

benchmarks/gpu_suite.py runs them on other streams and devices, and a whole layer in a graph with masks that change.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu import operations
from gpu.operations import Sizes
from gpu.right import capture
from torch import Tensor

from tempo_kernels.recompute import drop

pytestmark = pytest.mark.gpu

SIZES = Sizes(s=8, b=2, h=256, ffn=512, gated_ffn=264, p=0.1, dtype=torch.bfloat16)
FORMS = [
    pytest.param(operation, form, id=f"{operation.name}, keeping {form.keeps}")
    for operation in operations.OPERATIONS
    for form in operation.forms
]
SLEEP_CYCLES = 1_000_000_000  # half a second


class Step:
    """Forward and backward of a function, over tensors that stay where they are."""

    def __init__(self, function: Callable[..., Tensor], tensors: list[Tensor]) -> None:
        self.function = function
        self.leaves = [t.detach().clone().requires_grad_() for t in tensors]
        self.grad = torch.randn_like(function(*self.leaves))

    def __call__(self, function: Callable[..., Tensor] | None = None) -> list[Tensor]:
        y = (function or self.function)(*self.leaves)
        return [y.detach(), *torch.autograd.grad(y, self.leaves, self.grad)]

    def refresh(self, tensors: list[Tensor]) -> None:
        with torch.no_grad():
            for t, new in zip([*self.leaves, self.grad], [*tensors, torch.randn_like(self.grad)], strict=True):
                t.copy_(new)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(("operation", "form"), FORMS)
def test_a_replay_over_new_data_is_an_ordinary_call_and_refills_what_was_dropped(operation, form, drops):
    if drops and not form.refills:
        pytest.skip("it keeps its output")
    function = form.factory(SIZES.p)
    scale = torch.randn(getattr(SIZES, operation.width), device="cuda").to(SIZES.dtype)

    # As a linear does, a product keeps y; and its bits do not depend on what else runs.
    def run(*tensors: Tensor, drops: bool = drops) -> Tensor:
        y = function(*tensors[:-1])
        out = y * tensors[-1]
        if drops:
            drop(y, after=out)
        return out

    step = Step(run, [*operation.tensors(SIZES, "cuda"), scale])
    replay = capture(step)
    before = [t.clone() for t in replay()]
    for _ in range(2):
        step.refresh([*operation.tensors(SIZES, "cuda"), scale * 2])
        found = [t.clone() for t in replay()]
        wanted = step(lambda *tensors: run(*tensors, drops=False))
        assert all(map(torch.equal, found, wanted)) and not torch.equal(before[0], found[0])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.parametrize(("operation", "form"), FORMS)
def test_no_call_waits_for_the_gpu(operation, form):
    step = Step(form.factory(SIZES.p), operation.tensors(SIZES, "cuda"))
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Waiting for an event is no error to that mode: so again, while the GPU sleeps.
    torch.cuda.synchronize()
    awake = torch.cuda.Event()
    torch.cuda._sleep(SLEEP_CYCLES)
    awake.record()
    for _ in range(8):
        step()
    assert not awake.query()
    torch.cuda.synchronize()

"""Every operation in a CUDA graph, on another stream and another device, and without waiting for the GPU.

What can be said of a CPU too is said of it: there a replay is one more call with the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu import operations
from gpu.operations import Sizes
from gpu.right import capture
from torch import Tensor

from tempo_kernels.dropout_add import bias_dropout_add
from tempo_kernels.recompute import drop

SIZES = Sizes(s=8, b=2, h=256, ffn=512, gated_ffn=264, p=0.1, dtype=torch.bfloat16)
FORMS = [
    pytest.param(operation, form, id=f"{operation.name}, keeping {form.keeps}")
    for operation in operations.OPERATIONS
    for form in operation.forms
]
REFILLED = [param for param in FORMS if param.values[1].refills]
ON_ANY_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
CALLS = 8
SLEEP_CYCLES = 1_000_000_000  # half a second


class Step:
    """Forward and backward of a function, over tensors that stay where they are."""

    def __init__(self, function: Callable[..., Tensor | tuple[Tensor, ...]], tensors: list[Tensor]) -> None:
        self.function = function
        self.leaves = [t.detach().clone().requires_grad_() for t in tensors]
        self.grads = [torch.randn_like(output) for output in self.outputs()]

    def outputs(self) -> tuple[Tensor, ...]:
        found = self.function(*self.leaves)
        return found if isinstance(found, tuple) else (found,)

    def __call__(self) -> list[Tensor]:
        outputs = self.outputs()
        return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, self.leaves, self.grads)]

    def refresh(self, tensors: list[Tensor]) -> None:
        with torch.no_grad():
            for t, new in zip([*self.leaves, *self.grads], [*tensors, *map(torch.randn_like, self.grads)], strict=True):
                t.copy_(new)

    def anew(self) -> list[Tensor]:
        """The same from copies, by ordinary calls."""
        step = Step(self.function, self.leaves)
        step.grads = [grad.clone() for grad in self.grads]
        return step()


def recorded(step: Callable[[], list[Tensor]], device: str) -> Callable[[], list[Tensor]]:
    """A function that replays step and returns copies of its results."""
    if device == "cpu":
        return lambda: [t.clone() for t in step()]
    replay = capture(step)
    return lambda: [t.clone() for t in replay()]


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(a, b), f"result {index} is off by {(a.double() - b.double()).abs().max()}"


@ON_ANY_DEVICE
@pytest.mark.parametrize(("operation", "form"), FORMS)
def test_a_replay_over_new_data_is_an_ordinary_call(operation, form, device):
    step = Step(form.factory(SIZES.p), operation.tensors(SIZES, device))
    replay = recorded(step, device)
    before = replay()
    for _ in range(2):
        step.refresh(operation.tensors(SIZES, device))
        after = replay()
        assert_equal(after, step.anew())
        assert not torch.equal(before[0], after[0])


@ON_ANY_DEVICE
@pytest.mark.parametrize(("operation", "form"), REFILLED)
def test_a_replay_refills_what_was_dropped(operation, form, device):
    function = form.factory(SIZES.p)
    scale = torch.randn(getattr(SIZES, operation.width), device=device).to(SIZES.dtype)

    # As a linear does, a product keeps y; and its bits do not depend on what else runs.
    def keeping(*tensors: Tensor) -> Tensor:
        return function(*tensors[:-1]) * tensors[-1]

    def dropping(*tensors: Tensor) -> Tensor:
        y = function(*tensors[:-1])
        out = y * tensors[-1]
        drop(y, after=out)
        return out

    step = Step(dropping, [*operation.tensors(SIZES, device), scale])
    replay = recorded(step, device)
    for _ in range(2):
        step.refresh([*operation.tensors(SIZES, device), scale * 2])
        found = replay()
        step.function = keeping
        assert_equal(found, step.anew())
        step.function = dropping


@ON_ANY_DEVICE
def test_a_replay_draws_the_mask_that_key_and_sample_then_ask_for(device):
    [operation] = [each for each in operations.OPERATIONS if each.name == "bias_dropout_add"]
    key, first_sample = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))

    def drawing(key: int | Tensor, first_sample: int | Tensor) -> Callable[..., Tensor]:
        return lambda *tensors: bias_dropout_add(*tensors, p=0.3, key=key, first_sample=first_sample, first_row=5)

    step = Step(drawing(key, first_sample), operation.tensors(SIZES, device))
    replay = recorded(step, device)
    seen = [replay()]
    for new_key, new_sample in [(2**63 + 12345, 0), (2**63 + 12345, 2**33), (1, 2**33)]:
        key.fill_(new_key - 2**64 if new_key >> 63 else new_key)
        first_sample.fill_(new_sample)
        found = replay()
        by_numbers = Step(drawing(new_key, new_sample), step.leaves)
        by_numbers.grads = step.grads
        assert_equal(found, by_numbers())
        assert not any(torch.equal(found[0], other[0]) for other in seen)
        seen.append(found)


@pytest.mark.gpu
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
    for _ in range(CALLS):
        step()
    assert not awake.query()
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize(("operation", "form"), FORMS)
def test_work_is_queued_on_the_current_stream(operation, form):
    step = Step(form.factory(SIZES.p), operation.tensors(SIZES, "cuda"))
    before = step()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES // 10)
        # On any other stream its work would be done before these tensors change.
        step.refresh(operation.tensors(SIZES, "cuda"))
        found = step()
    assert torch.cuda.current_stream() != side
    side.synchronize()
    assert_equal(found, step())
    assert not torch.equal(found[0], before[0])


@pytest.mark.gpu
@pytest.mark.parametrize(("operation", "form"), FORMS)
def test_work_is_done_on_the_device_of_its_tensors(operation, form):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices, and torch sees one")
    step = Step(form.factory(SIZES.p), operation.tensors(SIZES, "cuda:0"))
    other = Step(step.function, [t.detach().to("cuda:1") for t in step.leaves])
    other.grads = [grad.to("cuda:1") for grad in step.grads]
    assert torch.cuda.current_device() == 0
    found = other()
    assert all(t.device == torch.device("cuda:1") for t in found)
    if torch.cuda.get_device_capability(0) == torch.cuda.get_device_capability(1):
        assert_equal([t.to("cuda:0") for t in found], step())

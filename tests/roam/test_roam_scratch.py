"""What an operation holds inside is measured in some rounds of its loop, and is that of all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tempo_kernels import opaque
from tempo_kernels.attention import cpu, eager
from tempo_kernels.attention.settings import Inputs, Kept, Settings
from tempo_megatron.memory.tape.follower import Follower

HEADS, LENGTH, SIZE = 4, 128, 16


class CountCalls(TorchDispatchMode):
    """How many operations reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def measure(batch: int, settings: Settings, dtype: torch.dtype, *, has_mask: bool) -> tuple[int, ...]:
    """The bytes alive in forward and in backward beside what was there, and the operations of both."""
    with FakeTensorMode(), torch.no_grad(), CountCalls() as calls:
        q, k, v, grad = (torch.empty(LENGTH, batch, HEADS, SIZE, dtype=dtype) for _ in range(4))
        mask = torch.zeros(batch, 1, LENGTH, LENGTH, dtype=torch.bool) if has_mask else None
        inputs = Inputs(q, k, v, mask)
        known = [t for t in (*inputs, grad) if t is not None]
        with Follower(*known) as seen:
            (out, logsumexp), forward = seen.measure(lambda: cpu.forward(inputs, settings))
            grads, backward = seen.measure(lambda: cpu.backward(grad, inputs, Kept(out, logsumexp), settings))
        assert [t.shape for t in (out, *grads[:3])] == [t.shape for t in (grad, q, k, v)]
        return forward, backward, calls.number


@pytest.mark.parametrize(
    "num_samples, causal, window, dtype, has_mask",
    [
        (6, True, None, torch.float32, False),
        (7, True, None, torch.float32, False),
        (9, True, None, torch.float32, False),
        (9, False, (32, 16), torch.float32, False),
        (9, False, None, torch.bfloat16, True),
    ],
)
def test_the_rounds_that_are_left_out_hold_no_more(
    num_samples: int,
    causal: bool,
    window: tuple[int, int] | None,
    dtype: torch.dtype,
    has_mask: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A round is of 2 samples, the last of 2 or 1: of 7 samples only the third round is left out, of 9 two.
    monkeypatch.setattr(eager, "_choose_block", lambda *_: (64, 2))
    settings = Settings(causal, 0.25, 0.1, 7, 0, 0, window)
    *short, num_short = measure(num_samples, settings, dtype, has_mask=has_mask)
    monkeypatch.setattr(opaque, "NUM_ROUNDS", num_samples)
    *whole, num_whole = measure(num_samples, settings, dtype, has_mask=has_mask)
    assert short == whole
    assert (num_short < num_whole) == (num_samples > 6)

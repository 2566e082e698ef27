"""What an operation holds inside is measured in some rounds of its loop, and is that of all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tempo_kernels import opaque
from tempo_kernels.attention import cpu, eager
from tempo_kernels.attention.settings import Inputs, Kept, Settings
from tempo_megatron.memory.tape.follower import Follower

HEADS, LENGTH, SIZE = 4, 128, 16


def measure(batch: int, settings: Settings, dtype: torch.dtype, *, has_mask: bool) -> tuple[int, ...]:
    """The bytes alive in forward and in backward beside what was there, and how many operations make something."""
    with FakeTensorMode(), torch.no_grad():
        q, k, v, grad = (torch.empty(LENGTH, batch, HEADS, SIZE, dtype=dtype) for _ in range(4))
        mask = torch.zeros(batch, 1, LENGTH, LENGTH, dtype=torch.bool) if has_mask else None
        inputs = Inputs(q, k, v, mask)
        known = [t for t in (*inputs, grad) if t is not None]
        with Follower(*known) as seen:
            (out, logsumexp), forward = seen.measure(lambda: cpu.forward(inputs, settings))
            grads, backward = seen.measure(lambda: cpu.backward(grad, inputs, Kept(out, logsumexp), settings))
        assert [t.shape for t in (out, *grads[:3])] == [t.shape for t in (grad, q, k, v)]
        return forward, backward, seen.tape.num_steps


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
    num_samples: int, causal: bool, window: Any, dtype: torch.dtype, has_mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A round is of 2 samples, the last of 2 or 1: of 7 samples only the third round is left out, of 9 two.
    monkeypatch.setattr(eager, "_choose_block", lambda *_: (64, 2))
    settings = Settings(causal, 0.25, 0.1, 7, 0, 0, window)
    *short, num_short = measure(num_samples, settings, dtype, has_mask=has_mask)
    monkeypatch.setattr(opaque, "NUM_ROUNDS", num_samples)
    *whole, num_whole = measure(num_samples, settings, dtype, has_mask=has_mask)
    assert short == whole
    assert (num_short < num_whole) == (num_samples > 6)

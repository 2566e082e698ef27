"""Sums over rows by a second launch: see interpreted.py for where the kernels run."""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, kernel_test

from tempo_kernels.kernel_sums import launch_sums, plan_sums


@kernel_test
@pytest.mark.parametrize("shape", [(1, 1, 64), (1, 7, 100), (2, 16, 128), (2, 50, 130)], ids=str)
def test_rows_are_added_up_in_one_order_and_rounded_once(shape):
    partial = torch.randn(shape, device=DEVICE) * torch.logspace(-3, 3, shape[1], device=DEVICE)[:, None]
    plan = plan_sums(shape, 1024, 4, partial.device)

    def add_up(dtype):
        sums = torch.full((shape[0], shape[2]), torch.nan, dtype=dtype, device=DEVICE)
        launch_sums(plan, partial, sums)
        return sums

    found = add_up(torch.float32)
    torch.testing.assert_close(
        found.double(), partial.double().sum(1), rtol=0, atol=1e-6 * partial.abs().sum(1).max().item()
    )
    assert torch.equal(add_up(torch.float32), found) and torch.equal(add_up(torch.bfloat16), found.bfloat16())

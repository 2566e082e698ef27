"""Sums over rows by a second launch: see interpreted.py for where the kernels run."""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, kernel_test

from tempo_kernels.kernel_sums import add_up


@kernel_test
@pytest.mark.parametrize("shape", [(1, 1, 64), (1, 7, 100), (2, 16, 128), (2, 50, 130)], ids=str)
def test_rows_are_added_up_in_one_order_and_rounded_once(shape):
    partial = torch.randn(shape, device=DEVICE) * torch.logspace(-3, 3, shape[1], device=DEVICE)[:, None]
    found, again, rounded = (add_up(partial, dtype, 1024, 4) for dtype in [torch.float32] * 2 + [torch.bfloat16])
    torch.testing.assert_close(
        found.double(), partial.double().sum(1), rtol=0, atol=1e-6 * partial.abs().sum(1).max().item()
    )
    assert torch.equal(again, found) and torch.equal(rounded, found.bfloat16())

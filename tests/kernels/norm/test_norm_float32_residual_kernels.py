"""The norms' Triton kernels of a float32 x beside 16-bit parameters: see interpreted.py for where they run."""

from __future__ import annotations

import pytest
import torch
from covering import parametrize_covering
from interpreted import DEVICE, kernel_test
from norm_kernel_checks import check_both_forms, norm_of, random_norm

from tempo_kernels.norm import kernel as norm_kernel
from tempo_kernels.norm import kernel_long_rows as long_rows

DTYPES = [torch.bfloat16, torch.float16]


def float32_residual(name, shape, dtype):
    """As random_norm, with an x that has digits of its own in float32."""
    _, *others = random_norm(name, shape, dtype)
    return [torch.randn(shape, device=DEVICE) * 3 + 1, *others]


@kernel_test
@parametrize_covering(
    rows_are_long={"whole rows": False, "long rows": True},
    dtype=DTYPES,
    name=["trained", "one in a hundred gamma 0", "beta / gamma 100"],
)
def test_norm_does_what_is_specified(name, dtype, rows_are_long, monkeypatch):
    if rows_are_long:
        for constant in ("FORWARD_ROW_BYTES", "BACKWARD_ROW_BYTES"):
            monkeypatch.setattr(norm_kernel, constant, 64)
        monkeypatch.setitem(long_rows.OPTIONS, "BLOCK_COLUMNS", 32)
    x, weight, bias, grad = float32_residual(name, (3, 2, 104), dtype)
    check_both_forms(x, weight, bias, grad)
    check_both_forms(x, weight, None, grad)


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES)
def test_which_channels_are_lost_is_a_matter_of_the_outputs_dtype(dtype):
    x, weight, bias, _ = float32_residual("initial", (4, 64), dtype)
    weight[3], weight[17] = 0.0, torch.finfo(dtype).tiny / 2
    y, kept = norm_kernel.forward(x, norm_of(weight, bias))
    assert (y.dtype, kept.rstd.dtype, kept.lost_xhat.dtype) == (dtype, torch.float32, dtype)
    assert kept.lost[[3, 17]].tolist() == [0, 1] and (kept.lost >= 0).sum() == 2

"""The norms' Triton kernels against their specification: see interpreted.py for where they run."""

from __future__ import annotations

import pytest
import torch
from covering import parametrize_covering
from interpreted import DEVICE, DTYPES, kernel_test
from norm_inputs import PARAMETERS
from norm_kernel_checks import check_both_forms, norm_forward_and_backward, norm_from_input, norm_of, random_norm

from tempo_kernels import kernel_sums
from tempo_kernels.norm import kernel as norm_kernel
from tempo_kernels.norm import kernel_long_rows as long_rows
from tempo_kernels.norm import kernel_whole_rows as whole_rows


@kernel_test
@parametrize_covering(each={"name": PARAMETERS.keys()}, dtype=DTYPES)
def test_norm_does_what_is_specified_for_any_gamma_and_beta(name, dtype):
    x, weight, bias, grad = random_norm(name, (5, 3, 200), dtype)
    check_both_forms(x, weight, bias, grad)
    check_both_forms(x, weight.float(), None, grad)


@kernel_test
@parametrize_covering(each={"name": PARAMETERS.keys()}, dtype=DTYPES)
def test_norm_does_what_is_specified_for_a_zero_centered_gamma(name, dtype):
    x, weight, bias, grad = random_norm(name, (15, 72), dtype)
    check_both_forms(x, weight - 1, bias, grad, zero_centered=True)
    check_both_forms(x, weight.float() - 1, None, grad, zero_centered=True)


@kernel_test
@pytest.mark.parametrize("magnitude", [1e-25, 1e25])
def test_norm_does_what_is_specified_where_the_square_of_gamma_is_out_of_range(magnitude):
    x, weight, bias, grad = random_norm("initial", (6, 200), torch.float32)
    check_both_forms(x, weight * magnitude, bias, grad + x)
    check_both_forms(x, weight * magnitude, None, grad + x)


@kernel_test
@pytest.mark.parametrize("shape", [(7, 768), (2, 4096), (9, 33), (1, 1), (5, 1), (0, 16), (3, 0, 8)], ids=str)
def test_norm_does_what_is_specified_for_any_shape(shape):
    check_both_forms(*random_norm("one in a hundred gamma 0", shape, torch.bfloat16))
    check_both_forms(*random_norm("trained", shape, torch.float32))


@kernel_test
@pytest.mark.parametrize(
    ("hidden_size", "name", "dtype"),
    [
        (100, "one in a hundred gamma 0", torch.float32),
        (136, "trained", torch.float16),
        (100, "beta / gamma 100", torch.bfloat16),
    ],
)
def test_norm_of_long_rows_does_what_is_specified(hidden_size, name, dtype, monkeypatch):
    for constant in ("FORWARD_ROW_BYTES", "BACKWARD_ROW_BYTES"):
        monkeypatch.setattr(norm_kernel, constant, 64)
    monkeypatch.setitem(long_rows.OPTIONS, "BLOCK_COLUMNS", 32)
    monkeypatch.setitem(long_rows.SUMS_OPTIONS, "BLOCK_COLUMNS", 64)
    monkeypatch.setattr(long_rows, "SUMS_PROGRAMS", 4)
    x, weight, bias, grad = random_norm(name, (6, hidden_size), dtype)
    check_both_forms(x, weight, bias, grad)
    check_both_forms(x, weight, None, grad)


@kernel_test
@pytest.mark.exhaustive  # with smaller room the test above has long rows
@pytest.mark.parametrize("hidden_size", [16392, 65536])
def test_norm_takes_rows_that_no_program_has_room_for(hidden_size):
    check_both_forms(*random_norm("one in a hundred gamma 0", (1, hidden_size), torch.bfloat16))


@kernel_test
def test_norm_takes_any_strides_and_alignment():
    x = torch.randn(40, 6, 8, device=DEVICE).transpose(0, 1)[:, ::2]
    weight, bias = torch.randn(16, device=DEVICE)[::2], torch.randn(9, device=DEVICE)[1:]
    check_both_forms(x, weight, bias, torch.randn(20, 8, device=DEVICE).expand(6, 20, 8))
    x, grad = (torch.randn(385, device=DEVICE).bfloat16()[1:].view(6, 64) for _ in range(2))
    check_both_forms(x, torch.ones(65, device=DEVICE)[1:], None, grad)


@kernel_test
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_norm_of_a_row_with_inf_or_nan_is_nan_and_leaves_other_rows_alone():
    x, weight, bias, grad = random_norm("trained", (4, 40), torch.float32)
    x[0, 3], x[1, 4], x[2] = float("inf"), float("nan"), 3.0
    for run in (norm_forward_and_backward, norm_from_input):
        y, grad_x, grad_weight, _ = run(norm_kernel, x, weight, bias, grad)
        assert y[:2].isnan().all() and grad_x[:2].isnan().all() and grad_weight.isnan().all()
        assert y[2:].isfinite().all() and grad_x[2:].isfinite().all()


@kernel_test
def test_norms_gradients_of_gamma_and_beta_are_summed_over_many_programs_in_a_fixed_order(monkeypatch):
    monkeypatch.setattr(whole_rows, "FORWARD_PROGRAMS", 3)
    for module in (whole_rows, kernel_sums):
        monkeypatch.setattr(module, "count_multiprocessors", lambda device: 1)
    for shape, dtype in (((200, 130), torch.float32), ((10, 1100), torch.bfloat16)):
        inputs = random_norm("trained", shape, dtype)
        check_both_forms(*inputs)
        for run in (norm_forward_and_backward, norm_from_input):
            first, second = (run(norm_kernel, *inputs) for _ in range(2))
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@kernel_test
@pytest.mark.parametrize(("hidden_size", "per_multiprocessor"), [(64, 4), (1024, 1), (4096, 1), (8192, 1)])
def test_a_norms_backward_has_as_many_programs_as_run_at_once(monkeypatch, hidden_size, per_multiprocessor):
    grids = []

    class Noted:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(whole_rows, "_backward_kernel", Noted())
    for module in (whole_rows, kernel_sums):
        monkeypatch.setattr(module, "count_multiprocessors", lambda device: 4)
    shape = (max(32, 2**15 // hidden_size), hidden_size)
    norm_forward_and_backward(norm_kernel, *random_norm("initial", shape, torch.bfloat16))
    assert grids == [(4 * per_multiprocessor,)]


@kernel_test
@pytest.mark.parametrize("limit", [64, 32768], ids=["long rows", "whole rows"])
def test_sums_are_rounded_once_to_the_dtype_that_is_asked_for(limit, monkeypatch):
    monkeypatch.setattr(norm_kernel, "BACKWARD_ROW_BYTES", limit)
    x, weight, bias, grad = random_norm("initial", (12, 136), torch.bfloat16)
    norm = norm_of(weight, bias)
    _, kept = norm_kernel.forward(x, norm)
    wide, narrow = (norm_kernel.backward(grad, x, kept, True, x.dtype, dtype)[1] for dtype in (torch.float32, x.dtype))
    assert wide.dtype == torch.float32 and torch.equal(narrow, wide.bfloat16())
    assert torch.equal(norm_kernel.backward(grad, x, kept, True, x.dtype, torch.float32)[1], wide)
    _, statistics = norm_kernel.forward_from_input(x, norm)
    wider = norm_of(weight, bias.float())
    narrow, wide = (norm_kernel.backward_from_input(grad, x, one, statistics)[1] for one in (norm, wider))
    assert wide.dtype == torch.float32 and torch.equal(narrow, wide.bfloat16())


def float32_residual(name, shape, dtype):
    """As random_norm, with an x that has digits of its own in float32."""
    _, *others = random_norm(name, shape, dtype)
    return [torch.randn(shape, device=DEVICE) * 3 + 1, *others]


@kernel_test
@parametrize_covering(
    rows_are_long={"whole rows": False, "long rows": True},
    dtype=DTYPES[1:],
    name=["trained", "one in a hundred gamma 0", "beta / gamma 100"],
)
def test_norm_of_a_float32_residual_does_what_is_specified(name, dtype, rows_are_long, monkeypatch):
    if rows_are_long:
        for constant in ("FORWARD_ROW_BYTES", "BACKWARD_ROW_BYTES"):
            monkeypatch.setattr(norm_kernel, constant, 64)
        monkeypatch.setitem(long_rows.OPTIONS, "BLOCK_COLUMNS", 32)
    x, weight, bias, grad = float32_residual(name, (3, 2, 104), dtype)
    check_both_forms(x, weight, bias, grad)
    check_both_forms(x, weight, None, grad)


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_which_channels_are_lost_is_a_matter_of_the_outputs_dtype(dtype):
    x, weight, bias, _ = float32_residual("initial", (4, 64), dtype)
    weight[3], weight[17] = 0.0, torch.finfo(dtype).tiny / 2
    y, kept = norm_kernel.forward(x, norm_of(weight, bias))
    assert (y.dtype, kept.rstd.dtype, kept.lost_xhat.dtype) == (dtype, torch.float32, dtype)
    assert kept.lost[[3, 17]].tolist() == [0, 1] and (kept.lost >= 0).sum() == 2


@pytest.mark.gpu
def test_norm_addresses_more_than_two_billion_elements_in_long_rows(hidden_size=65536):
    """Rows of 4096 are in test_large_tensors.py."""
    x = torch.zeros(2**31 // hidden_size + 9, hidden_size, dtype=torch.bfloat16, device="cuda")
    _, weight, bias, _ = random_norm("one in a hundred gamma 0", (1, hidden_size), torch.bfloat16)
    x[-9:] = torch.randn(9, hidden_size)
    for run in (norm_forward_and_backward, norm_from_input):
        found = run(norm_kernel, x, weight, bias, x)
        last = run(norm_kernel, x[-9:], weight, bias, x[-9:])
        assert all(torch.equal(a[-9:], b) for a, b in zip(found[:2], last[:2], strict=True))
        assert not found[1][:-9].any()

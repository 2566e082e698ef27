"""The norms' Triton kernels against their specification: see interpreted.py for where they run."""

from __future__ import annotations

import pytest
import torch
from covering import parametrize_covering
from interpreted import DEVICE, DTYPES, kernel_test
from norm_inputs import PARAMETERS
from norm_kernel_checks import (
    LONG_ROWS,
    check_both_forms,
    norm_forward_and_backward,
    norm_from_input,
    norm_of,
    random_norm,
)

from tempo_kernels.norm import kernel as norm_kernel
from tempo_kernels.norm.kernel_backward import plan_backward
from tempo_kernels.norm.settings import Blocks

FEW = Blocks(multiprocessors=4)


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
        (500, "one in a hundred beta / gamma 100", torch.bfloat16),
        (100, "beta / gamma 100", torch.bfloat16),
    ],
)
def test_norm_of_long_rows_does_what_is_specified(hidden_size, name, dtype):
    x, weight, bias, grad = random_norm(name, (6, hidden_size), dtype)
    check_both_forms(x, weight, bias, grad, blocks=LONG_ROWS)
    check_both_forms(x, weight, None, grad, blocks=LONG_ROWS)


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
@pytest.mark.parametrize(("shape", "dtype"), [((200, 130), torch.float32), ((10, 1100), torch.bfloat16)])
def test_norms_gradients_of_gamma_and_beta_are_summed_over_many_programs_in_a_fixed_order(shape, dtype):
    blocks = Blocks(forward_programs=3, multiprocessors=1)
    inputs = random_norm("one in a hundred gamma 0", shape, dtype)
    check_both_forms(*inputs, blocks=blocks)
    for run in (norm_forward_and_backward, norm_from_input):
        first, second = (run(norm_kernel, *inputs, blocks=blocks) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@kernel_test
@pytest.mark.parametrize(("hidden_size", "per_multiprocessor"), [(64, 2), (1024, 2), (4096, 1), (8192, 1)])
def test_a_norms_backward_has_as_many_programs_as_run_at_once(hidden_size, per_multiprocessor):
    plan = plan_backward(
        2**20 // hidden_size, hidden_size, *[torch.bfloat16] * 2, False, False, False, torch.device(DEVICE), FEW
    )
    assert plan.launch.grid == (4 * per_multiprocessor, 1)


@kernel_test
@pytest.mark.parametrize("blocks", [LONG_ROWS, Blocks()], ids=["long rows", "whole rows"])
def test_sums_are_rounded_once_to_the_dtype_that_is_asked_for(blocks):
    x, weight, bias, grad = random_norm("initial", (12, 136), torch.bfloat16)
    norm = norm_of(weight, bias)
    _, kept = norm_kernel.forward(x, norm, blocks=blocks)
    wide, narrow = (
        norm_kernel.backward(grad, x, kept, True, x.dtype, dtype, blocks)[1] for dtype in (torch.float32, x.dtype)
    )
    assert wide.dtype == torch.float32 and torch.equal(narrow, wide.bfloat16())
    _, statistics = norm_kernel.forward_from_input(x, norm, blocks)
    wider = norm_of(weight, bias.float())
    narrow, wide = (norm_kernel.backward_from_input(grad, x, one, statistics, blocks)[1] for one in (norm, wider))
    assert wide.dtype == torch.float32 and torch.equal(narrow, wide.bfloat16())


def float32_residual(name, shape, dtype):
    """As random_norm, with an x that has digits of its own in float32."""
    _, *others = random_norm(name, shape, dtype)
    return [torch.randn(shape, device=DEVICE) * 3 + 1, *others]


@kernel_test
@parametrize_covering(
    blocks={"whole rows": Blocks(), "long rows": LONG_ROWS},
    dtype=DTYPES[1:],
    name=["trained", "one in a hundred gamma 0", "one in a hundred beta / gamma 100"],
)
def test_norm_of_a_float32_residual_does_what_is_specified(name, dtype, blocks):
    x, weight, bias, grad = float32_residual(name, (3, 2, 104), dtype)
    weight[100:], bias[100:] = 1.0, 0.0  # one column is all there is
    check_both_forms(x, weight, bias, grad, blocks=blocks)
    check_both_forms(x, weight, None, grad, blocks=blocks)


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_which_channels_are_lost_is_a_matter_of_the_outputs_dtype(dtype):
    x, weight, bias, _ = float32_residual("initial", (4, 128), dtype)
    weight[3], weight[17] = 0.0, torch.finfo(dtype).tiny / 2
    y, kept = norm_kernel.forward(x, norm_of(weight, bias))
    assert (y.dtype, kept.rstd.dtype, kept.lost_xhat.dtype) == (dtype, torch.float32, dtype)
    assert kept.lost.tolist() == [3, 17]

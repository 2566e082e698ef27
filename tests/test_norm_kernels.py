"""The norms' Triton kernels against their specification: see interpreted.py for where they run."""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, DTYPES, assert_as_specified, kernel_test
from test_norm import PARAMETERS, reference_layer_norm
from witness import assert_three_witnesses

from tempo_kernels.norm import eager as norm_eager
from tempo_kernels.norm import kernel as norm_kernel
from tempo_kernels.norm import layer_norm
from tempo_kernels.norm.long_rows import kernel as long_rows


def norm_forward_and_backward(module, x, weight, bias, grad):
    """y, grad_x, grad_weight and, where there is a bias, grad_bias; a norm without a bias is RMSNorm."""
    y, rstd, lost, lost_xhat = module.forward(x, weight, bias, 1e-5, bias is not None)
    grads = module.backward(grad, y, rstd, weight, bias, lost, lost_xhat, bias is not None)
    return [y, *grads[: 2 if bias is None else 3]]


def check_norm(x, weight, bias, grad):
    inputs = [x, weight, bias, grad]
    found = norm_forward_and_backward(norm_kernel, *inputs)
    names = ["y", "grad_x", "grad_weight", "grad_bias"][: len(found)]
    assert_as_specified(found, inputs, lambda *t: norm_forward_and_backward(norm_eager, *t), *names)


def random_norm(name, shape, dtype):
    """x, weight, bias and grad of `dtype`, for the parameters that go by `name`."""
    weight, bias = PARAMETERS[name](shape[-1])
    tensors = [torch.randn(shape) * 3 + 1, weight, bias, torch.randn(shape)]
    return [t.to(device=DEVICE, dtype=dtype) for t in tensors]


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PARAMETERS)
def test_norm_does_what_is_specified_for_any_gamma_and_beta(name, dtype):
    x, weight, bias, grad = random_norm(name, (5, 3, 200), dtype)
    check_norm(x, weight, bias, grad)
    check_norm(x, weight.float(), None, grad)


@kernel_test
@pytest.mark.parametrize("magnitude", [1e-25, 1e25])
def test_norm_does_what_is_specified_where_the_square_of_gamma_is_out_of_range(magnitude):
    x, weight, bias, grad = random_norm("initial", (6, 200), torch.float32)
    check_norm(x, weight * magnitude, bias, grad + x)
    check_norm(x, weight * magnitude, None, grad + x)


@kernel_test
@pytest.mark.parametrize("shape", [(7, 768), (2, 4096), (9, 33), (1, 1), (5, 1), (0, 16), (3, 0, 8)], ids=str)
def test_norm_does_what_is_specified_for_any_shape(shape):
    check_norm(*random_norm("one in a hundred gamma 0", shape, torch.bfloat16))
    check_norm(*random_norm("trained", shape, torch.float32))


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
    x, weight, bias, grad = random_norm(name, (11, hidden_size), dtype)
    check_norm(x, weight, bias, grad)
    check_norm(x, weight, None, grad)


@kernel_test
def test_norm_takes_rows_of_65536():
    check_norm(*random_norm("one in a hundred gamma 0", (2, 65536), torch.bfloat16))


@kernel_test
def test_norm_takes_any_strides_and_alignment():
    x = torch.randn(40, 6, 8, device=DEVICE).transpose(0, 1)[:, ::2]
    weight, bias = torch.randn(16, device=DEVICE)[::2], torch.randn(9, device=DEVICE)[1:]
    check_norm(x, weight, bias, torch.randn(20, 8, device=DEVICE).expand(6, 20, 8))
    x, grad = (torch.randn(385, device=DEVICE).bfloat16()[1:].view(6, 64) for _ in range(2))
    check_norm(x, torch.ones(65, device=DEVICE)[1:], None, grad)


@kernel_test
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_norm_of_a_row_with_inf_or_nan_is_nan_and_leaves_other_rows_alone():
    x, weight, bias, grad = random_norm("trained", (4, 40), torch.float32)
    x[0, 3], x[1, 4], x[2] = float("inf"), float("nan"), 3.0
    y, grad_x, *_ = norm_forward_and_backward(norm_kernel, x, weight, bias, grad)
    assert y[:2].isnan().all() and grad_x[:2].isnan().all()
    assert y[2:].isfinite().all() and grad_x[2:].isfinite().all()


@kernel_test
def test_norms_gradients_of_gamma_and_beta_are_summed_over_many_programs_in_a_fixed_order(monkeypatch):
    for constant in ("FORWARD_PROGRAMS", "BACKWARD_PROGRAMS"):
        monkeypatch.setattr(norm_kernel, constant, 3)
    inputs = random_norm("trained", (200, 130), torch.float32)
    check_norm(*inputs)
    first, second = (norm_forward_and_backward(norm_kernel, *inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@kernel_test
def test_norm_keeps_a_column_for_each_lost_channel_in_multiples_of_eight_and_none_at_first():
    x, weight, bias, _ = random_norm("initial", (4, 64), torch.float32)
    assert [t.shape for t in norm_kernel.forward(x, weight, bias, 1e-5, True)[2:]] == [(0,), (4, 0)]
    weight[3], weight[17], weight[30], bias[60] = 0.0, -1e-35, 1e-5, 50.0
    _, _, slots, lost_xhat = norm_kernel.forward(x, weight, bias, 1e-5, True)
    assert lost_xhat.shape == (4, 8)
    assert {channel: slot for channel, slot in enumerate(slots.tolist()) if slot >= 0} == {3: 0, 17: 1, 60: 2}
    weight[:9] = 0.0
    assert norm_kernel.forward(x, weight, bias, 1e-5, True)[3].shape == (4, 16)


@kernel_test
def test_channels_that_any_change_loses_between_calls_are_right_at_once():
    x, weight, bias, grad = random_norm("initial", (6, 64), torch.float32)
    check_norm(x, weight, bias, grad)
    weight[5] = 0.0
    check_norm(x, weight, bias, grad)
    weight.data[20:40] = 0.0
    check_norm(x, weight, bias, grad)
    bias.data.fill_(100.0)
    check_norm(x, weight, bias, grad)
    weight.data.copy_(torch.ones(64)), bias.data.zero_()
    check_norm(x, weight, bias, grad)
    weight.data = torch.zeros_like(weight)
    check_norm(x, weight, bias, grad)


@kernel_test
def test_a_norm_that_changed_since_its_forward_is_differentiated_with_the_channels_of_its_forward():
    x, weight, bias, grad = random_norm("initial", (6, 64), torch.float32)
    first, second = weight.clone(), weight.clone()
    first[5], second[40:50] = 0.0, 0.0
    wanted = norm_forward_and_backward(norm_kernel, x, first, bias, grad)
    y, rstd, slots, lost_xhat = norm_kernel.forward(x, first, bias, 1e-5, True)
    norm_kernel.forward(x, second, bias, 1e-5, True)
    found = norm_kernel.backward(grad, y, rstd, first, bias, slots, lost_xhat, True)
    assert all(torch.equal(a, b) for a, b in zip([y, *found], wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", PARAMETERS)
def test_layer_norm_on_a_gpu_obeys_the_rule(name):
    x, weight, bias, grad = random_norm(name, (512, 768), torch.bfloat16)
    assert_three_witnesses(layer_norm, reference_layer_norm, [x, weight, bias], grad, torch.bfloat16)

"""The norms' Triton kernels against their specification: see interpreted.py for where they run."""

from __future__ import annotations

import pytest
import torch
from covering import parametrize_covering
from interpreted import DEVICE, DTYPES, assert_as_specified, kernel_test
from norm_inputs import PARAMETERS

from tempo_kernels.norm import eager
from tempo_kernels.norm import kernel as norm_kernel
from tempo_kernels.norm.settings import Blocks, Norm, get_reserve_size

LONG_ROWS = Blocks(forward_row_bytes=64, backward_row_bytes=64, row_columns=32, strip_columns=64, elements=256)


def norm_of(weight, bias, zero_centered=False):
    """A norm without a bias is an RMSNorm."""
    return Norm(weight, bias, 1e-5, subtracts_mean=bias is not None, zero_centered=zero_centered)


def norm_forward_and_backward(module, x, weight, bias, grad, zero_centered=False, **more):
    """y, grad_x, grad_weight and, where there is a bias, grad_bias."""
    norm = norm_of(weight, bias, zero_centered)
    y, kept = module.forward(x, norm, **more)
    found = module.backward(grad, y, kept, norm.subtracts_mean, x.dtype, norm.sums_dtype, **more)
    return [y, *cast_sums(norm, *found)]


def cast_sums(norm, grad_x, sums):
    """grad_x, and each sum in the dtype of its parameter."""
    parameters = [norm.weight] if norm.bias is None else [norm.weight, norm.bias]
    return [grad_x, *(total.to(parameter.dtype) for total, parameter in zip(sums, parameters, strict=True))]


def norm_from_input(module, x, weight, bias, grad, zero_centered=False, **more):
    """The same with keep="recompute"; y is also filled in again."""
    norm = norm_of(weight, bias, zero_centered)
    y, statistics = module.forward_from_input(x, norm, **more)
    refilled = torch.full_like(y, float("nan"))
    module.refill(refilled, x, norm, statistics, **more)
    assert torch.equal(refilled.nan_to_num(), y.nan_to_num()) and torch.equal(refilled.isnan(), y.isnan())
    return [y, *cast_sums(norm, *module.backward_from_input(grad, x, norm, statistics, **more))]


def check_norm(run, x, weight, bias, grad, zero_centered=False, **more):
    inputs = [x, weight, bias, grad]
    found = run(norm_kernel, *inputs, zero_centered, **more)
    names = ["y", "grad_x", "grad_weight", "grad_bias"][: len(found)]
    assert_as_specified(found, inputs, lambda *t: run(eager, *t, zero_centered), *names)


def check_both_forms(x, weight, bias, grad, zero_centered=False, **more):
    """Where more channels are lost than the reserve has columns, the form in place has to say so."""
    check_norm(norm_from_input, x, weight, bias, grad, zero_centered, **more)
    dtype = weight.dtype if x.dtype == torch.float32 else x.dtype
    lost = eager.get_lost_channels(norm_of(weight, bias, zero_centered).compute_affine(x.dtype), dtype)
    if len(lost) <= get_reserve_size(x.size(-1)) or not x.numel():
        check_norm(norm_forward_and_backward, x, weight, bias, grad, zero_centered, **more)
    else:
        with pytest.raises(RuntimeError, match='keep="recompute", in Megatron tempo.norm "recompute"'):
            norm_forward_and_backward(norm_kernel, x, weight, bias, grad, zero_centered, **more)


def random_norm(name, shape, dtype):
    """x, weight, bias and grad of `dtype`, for the parameters that go by `name`."""
    weight, bias = PARAMETERS[name](shape[-1])
    tensors = [torch.randn(shape) * 3 + 1, weight, bias, torch.randn(shape)]
    return [t.to(device=DEVICE, dtype=dtype) for t in tensors]


@kernel_test
@parametrize_covering(
    each={"name": PARAMETERS.keys(), "shape": [(5, 3, 200), (15, 72)], "zero_centered": [False, True]}, dtype=DTYPES
)
def test_norm_does_what_is_specified_for_any_gamma_and_beta(name, shape, zero_centered, dtype):
    x, weight, bias, grad = random_norm(name, shape, dtype)
    check_both_forms(x, weight - int(zero_centered), bias, grad, zero_centered)
    check_both_forms(x, weight.float() - int(zero_centered), None, grad, zero_centered)


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
        (264, "one in a hundred beta / gamma 100", torch.bfloat16),
        (100, "beta / gamma 100", torch.bfloat16),
    ],
)
def test_norm_of_long_rows_does_what_is_specified(hidden_size, name, dtype):
    x, weight, bias, grad = random_norm(name, (6, hidden_size), dtype)
    check_both_forms(x, weight, bias, grad, blocks=LONG_ROWS)
    check_both_forms(x, weight, None, grad, blocks=LONG_ROWS)


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
@pytest.mark.parametrize(("shape", "dtype"), [((100, 130), torch.float32), ((10, 1100), torch.bfloat16)])
def test_norms_gradients_of_gamma_and_beta_are_summed_over_many_programs_in_a_fixed_order(shape, dtype):
    blocks = Blocks(forward_programs=3, multiprocessors=1)
    inputs = random_norm("one in a hundred gamma 0", shape, dtype)
    check_both_forms(*inputs, blocks=blocks)
    for run in (norm_forward_and_backward, norm_from_input):
        first, second = (run(norm_kernel, *inputs, blocks=blocks) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


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


def random_parameters(hidden_size, dtype):
    """Of every kind: carried, lost by a small gamma, or lost by a large beta."""
    weight = torch.randn(hidden_size) * torch.tensor([1.0, 0.05, 0.0, 1e-37, 1.0])[torch.arange(hidden_size) % 5]
    bias = torch.randn(hidden_size) * torch.tensor([1.0, 0.0, 3.0])[torch.arange(hidden_size) % 3]
    return weight.to(DEVICE, dtype), bias.to(DEVICE, dtype)


@kernel_test
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(
    ("hidden_size", "dtype"), [(1, DTYPES[0]), (33, DTYPES[1]), (4096, DTYPES[2]), (9000, DTYPES[2])]
)
def test_the_lost_channels_are_the_specified_ones_in_their_order(hidden_size, dtype, zero_centered):
    weight, bias = random_parameters(hidden_size, dtype)
    reserve = get_reserve_size(hidden_size)
    for first_lost in (0, hidden_size - hidden_size // 80):  # many, and fewer than there is room for
        weight[:first_lost], bias[:first_lost] = 1.0 - zero_centered, 0.0
        for beta in (bias, None):
            norm = norm_of(weight, beta, zero_centered)
            expected = eager.get_lost_channels(norm.compute_affine(dtype), dtype).tolist()[:reserve]
            _, kept = norm_kernel.forward(torch.zeros(1, hidden_size, dtype=dtype, device=DEVICE), norm)
            assert kept.lost.tolist() == expected + [-1] * (reserve - len(expected))
            torch.testing.assert_close(kept.affine, norm.compute_affine(dtype), rtol=0, atol=2.0**-126)


@kernel_test
@pytest.mark.parametrize("blocks", [LONG_ROWS, Blocks()], ids=["long rows", "whole rows"])
def test_a_gamma_whose_inverse_would_count_as_0_keeps_its_column(blocks):
    weight = torch.ones(140, device=DEVICE)
    weight[3], weight[17], weight[129], weight[131] = 1.5 * 2.0**126, 2.0**62, 1e-20, 1e-18
    x, grad_y = torch.randn(3, 140, device=DEVICE) * 0.3, torch.randn(3, 140, device=DEVICE)
    grad_y[:, 3], grad_y[:, 17] = grad_y[:, 3] * 2.0**-126, grad_y[:, 17] * 2.0**-62
    grad_y *= 1e5
    norm = norm_of(weight, None)
    y, kept = norm_kernel.forward(x, norm, blocks=blocks)
    assert kept.lost.tolist() == [3, 129]
    found = norm_kernel.backward(grad_y, y, kept, False, x.dtype, norm.sums_dtype, blocks)
    exact = norm_of(weight.cpu().double(), None)
    _, statistics = eager.forward_from_input(x.cpu().double(), exact)
    expected = eager.backward_from_input(grad_y.cpu().double(), x.cpu().double(), exact, statistics)
    for ours, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu().double(), truth, rtol=1e-5, atol=1)


@kernel_test
@parametrize_covering(has_bias=[True, False], dtype=DTYPES, blocks={"whole rows": Blocks(), "long rows": LONG_ROWS})
def test_lost_channels_beyond_the_reserve_have_nan_gradients_and_spoil_no_other_sum(dtype, has_bias, blocks):
    x, weight, bias, grad = random_norm("initial", (5, 136), dtype)
    bias = bias if has_bias else None
    weight[7::8] = 0.0
    if has_bias:
        bias[7::8] = 100.0
    gone = torch.arange(136) % 8 == 7
    gone[[7, 15]] = False  # for which there is room
    norm = norm_of(weight, bias)
    y, kept = norm_kernel.forward(x, norm, blocks=blocks)
    found = cast_sums(
        norm, *norm_kernel.backward(grad, y, kept, has_bias, x.dtype, norm.sums_dtype, blocks, checks=False)
    )
    with pytest.raises(RuntimeError, match='keep="recompute", in Megatron tempo.norm "recompute"'):
        for _ in range(100):
            norm_kernel.backward(grad, y, kept, has_bias, x.dtype, norm.sums_dtype, blocks)
            torch.cuda.synchronize()  # only a GPU comes here
    assert y.isfinite().all() and found[0].isnan().all() and torch.equal(found[1].isnan().cpu(), gone)
    exact = norm_forward_and_backward(eager, *(t if t is None else t.cpu().double() for t in (x, weight, bias, grad)))
    for ours, truth in zip(found[1:], exact[2:], strict=True):
        error, limit = (ours.cpu().double() - truth).abs(), 16 * torch.finfo(dtype).eps * truth.abs().max()
        assert (error[error.isfinite()] <= limit).all()


@kernel_test
def test_a_norm_that_changed_since_its_forward_is_differentiated_with_the_channels_of_its_forward():
    x, weight, bias, grad = random_norm("initial", (6, 64), torch.float32)
    first, second = weight.clone(), weight.clone()
    first[5], second[40:50] = 0.0, 0.0
    expected = norm_forward_and_backward(norm_kernel, x, first, bias, grad)
    norm = norm_of(first, bias)
    y, kept = norm_kernel.forward(x, norm)
    first.copy_(second)
    found = cast_sums(norm, *norm_kernel.backward(grad, y, kept, True, x.dtype, norm.sums_dtype))
    assert all(torch.equal(a, b) for a, b in zip([y, *found], expected, strict=True))


@kernel_test
def test_a_forward_without_gradients_keeps_and_notes_nothing():
    x, weight, bias, grad = random_norm("gamma 0 and beta 0", (6, 64), torch.float32)
    y, kept = norm_kernel.forward(x, norm_of(weight, bias), needs_grad=False)
    assert not y.any() and kept.lost.numel() == kept.lost_xhat.numel() == 0
    norm_forward_and_backward(norm_kernel, x, weight + 1, bias, grad)

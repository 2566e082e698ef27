"""The channels that a norm's output cannot carry, in its Triton kernels: see interpreted.py for where they run."""

from __future__ import annotations

import pytest
import torch
from covering import parametrize_covering
from interpreted import DEVICE, DTYPES, kernel_test
from norm_kernel_checks import LONG_ROWS, cast_sums, norm_forward_and_backward, norm_of, random_norm

from tempo_kernels.norm import eager
from tempo_kernels.norm import kernel as norm_kernel
from tempo_kernels.norm.settings import Blocks, get_reserve_size

BLOCKS = {"whole rows": Blocks(), "long rows": LONG_ROWS}


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
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
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
@parametrize_covering(has_bias=[True, False], dtype=DTYPES, blocks=BLOCKS)
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

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from squared_relu_inputs import every_number
from witness import assert_strides_do_not_show, assert_three_witnesses, kept_storages, outputs_and_gradients

from tempo_kernels.squared_relu import squared_relu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KEEPS = ["output", "input"]


def ours(keep):
    return lambda x, bias=None: squared_relu(x, bias, keep=keep)


def stock(x, bias=None):
    return F.relu(x if bias is None else x + bias).pow(2)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_number_gives_torchs_output_and_gradient_bit_for_bit(dtype, keep, nan_poison):
    x = every_number(dtype)
    grad = torch.randn(x.numel()).to(dtype)
    for a, b in zip(*(outputs_and_gradients(f, [x], grad, dtype) for f in (ours(keep), stock)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_numbers_give_torchs_output_and_gradient_bit_for_bit(dtype, keep):
    x, grad = torch.randn(100_001, dtype=dtype) * 10, torch.randn(100_001, dtype=dtype)
    for a, b in zip(*(outputs_and_gradients(f, [x], grad, dtype) for f in (ours(keep), stock)), strict=True):
        assert torch.equal(a, b)


def test_no_root_of_a_million_float32_squares_is_rounded_to_its_neighbour():
    x = torch.randn(1_000_003).abs()
    _, grad_x = outputs_and_gradients(ours("output"), [x], torch.ones_like(x), torch.float32)
    assert torch.equal(grad_x, 2 * x)


def test_the_square_of_a_small_float16_loses_digits_as_documented():
    x = torch.rand(100_000).half() * 0.008
    _, grad_x = outputs_and_gradients(squared_relu, [x], torch.ones_like(x), torch.float16)
    error = (grad_x.double() - 2 * x.double()).abs().max()
    assert 3.4e-4 < error < 3.5e-4


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (4, 0, 8), (0, 3), (3, 0), (3, 1, 5), (65, 33)], ids=str)
def test_three_witnesses_agree_on_output_and_gradients(shape, dtype, keep, nan_poison):
    x, bias, grad = torch.rand(shape) * 16 - 8, torch.randn(shape[-1]), torch.randn(shape)
    assert_three_witnesses(ours(keep), stock, [x], grad, dtype)
    assert_three_witnesses(ours(keep), stock, [x, bias], grad, dtype)


@pytest.mark.parametrize("keep", KEEPS)
def test_any_strides_give_the_contiguous_result(keep):
    strided = [torch.randn(26, 24).t()[::2], torch.randn(52)[::2]]
    grad = torch.randn(26).expand(12, 26)
    assert ours(keep)(strided[0]).is_contiguous()
    assert_strides_do_not_show(ours(keep), strided, grad, torch.float32)


@pytest.mark.parametrize("keep", KEEPS)
def test_zeros_infinity_and_nan_are_torchs(keep):
    x = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), -1.0])
    for a, b in zip(*(outputs_and_gradients(f, [x], torch.ones(6), x.dtype) for f in (ours(keep), stock)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("keep", KEEPS)
def test_float64_passes_gradcheck(keep):
    x = torch.linspace(-2, 2, 40, dtype=torch.float64).view(4, 10).requires_grad_()
    bias = torch.randn(10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ours(keep), (x, bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_keeps_its_output_only_or_its_input_and_bias_only(dtype):
    x, bias = torch.randn(33, 24).to(dtype).requires_grad_(), torch.randn(24).to(dtype).requires_grad_()
    outputs = []

    def kept_by(keep):
        return set(kept_storages(lambda: outputs.append(squared_relu(x, bias, keep=keep)) or outputs[-1]))

    assert kept_by("output") == {outputs[-1].data_ptr()}
    assert kept_by("input") == {x.data_ptr(), bias.data_ptr()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_output_is_given_again_bit_for_bit(dtype, nan_poison):
    x, bias = torch.randn(33, 20).to(dtype).requires_grad_(), torch.randn(20).to(dtype).requires_grad_()
    for y in (squared_relu(x, keep="input"), squared_relu(x, bias, keep="input")):
        out = torch.empty_like(y, requires_grad=False)
        y.grad_fn.refill(y.grad_fn, out)
        assert torch.equal(out, y) and not out.requires_grad


@pytest.mark.parametrize("keep", KEEPS)
def test_second_derivative_is_refused(keep):
    x, weight = torch.randn(6, requires_grad=True), torch.ones(6, requires_grad=True)
    (grad,) = torch.autograd.grad((squared_relu(x, keep=keep) * weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="not twice differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("arguments", "keep", "message"),
    [
        ((torch.arange(4),), "input", "squared_relu: x is torch.int64; expected float32"),
        ((torch.ones(4),), "both", 'keep is \'both\'; expected "output" or "input"'),
        ((torch.ones(2, 4), torch.ones(2)), "input", "bias is torch.float32 of shape \\[2\\]"),
        ((torch.ones(4), torch.ones(4).half()), "output", "bias is torch.float16 of shape \\[4\\]"),
    ],
    ids=["integers", "keep", "bias too short", "bias of another dtype"],
)
def test_wrong_arguments_are_named(arguments, keep, message):
    with pytest.raises(ValueError, match=message):
        squared_relu(*arguments, keep=keep)

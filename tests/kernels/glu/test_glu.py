from __future__ import annotations

import pytest
import torch
from glu_inputs import ACTIVATIONS, over_the_range
from witness import (
    assert_output_is_given_again,
    assert_strides_do_not_show,
    assert_three_witnesses,
    kept_storages,
    outputs_and_gradients,
)

from tempo_kernels.glu import cpu, geglu, reglu, swiglu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
every_activation = pytest.mark.parametrize(("ours", "activation"), ACTIVATIONS.values(), ids=ACTIVATIONS)


def stock(activation):
    """What Megatron's MLP computes without fusion."""

    def function(x, bias=None):
        gate, up = torch.chunk(x if bias is None else x + bias, 2, dim=-1)
        return activation(gate) * up

    return function


@every_activation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
def test_output_and_gradients_are_as_good_as_stocks(has_bias, dtype, ours, activation, monkeypatch, nan_poison):
    monkeypatch.setattr(cpu, "BLOCK_ELEMENTS", 7 * 2 * 200)
    bias = torch.randn(400) * 0.1 if has_bias else None
    inputs = [over_the_range(200), bias][: 1 + has_bias]
    assert_three_witnesses(ours, stock(activation), inputs, torch.randn(101, 200), dtype)


@every_activation
@pytest.mark.parametrize("shape", [(0,), (2,), (14,), (4, 0, 8), (0, 6), (3, 0), (3, 1, 10), (65, 66)], ids=str)
def test_odd_and_empty_shapes_give_stocks_output_and_gradients(shape, ours, activation, nan_poison):
    x, bias, grad = torch.randn(shape), torch.randn(shape[-1]), torch.randn(*shape[:-1], shape[-1] // 2)
    for dtype in (torch.float32, torch.float64):
        assert_three_witnesses(ours, stock(activation), [x], grad, dtype)
        assert_three_witnesses(ours, stock(activation), [x, bias], grad, dtype)


def test_gate_comes_first():
    assert torch.equal(reglu(torch.tensor([-1.0, 2.0, 3.0, 4.0])), torch.tensor([0.0, 8.0]))


def test_sum_of_x_and_bias_is_not_rounded():
    x, bias = torch.tensor([1.0, 256.0]).bfloat16(), torch.tensor([0.0, 1.0]).bfloat16()
    assert reglu(x * 1.0, bias).item() == torch.tensor(257.0).bfloat16().item()
    assert reglu(torch.tensor([3.0, 256.0]).bfloat16(), bias).item() == torch.tensor(771.0).bfloat16().item()


def test_any_strides_give_the_contiguous_result():
    strided = [torch.randn(26, 24).t()[::2], torch.randn(52)[::2]]
    grad = torch.randn(13).expand(12, 13)
    for ours, _ in ACTIVATIONS.values():
        assert_strides_do_not_show(ours, strided, grad, torch.float32)


@every_activation
def test_float64_passes_gradcheck(ours, activation):
    x = over_the_range(5)[::10].requires_grad_()
    bias = torch.randn(10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ours, (x, bias))


@every_activation
@pytest.mark.parametrize("dtype", DTYPES)
def test_keeps_its_input_and_bias_only(dtype, ours, activation):
    x, bias = torch.randn(33, 48).to(dtype).requires_grad_(), torch.randn(48).to(dtype).requires_grad_()
    assert set(kept_storages(ours, x, bias)) == {x.data_ptr(), bias.data_ptr()}
    assert set(kept_storages(ours, x)) == {x.data_ptr()}


@every_activation
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_is_given_again_bit_for_bit(dtype, ours, activation, nan_poison):
    assert_output_is_given_again(ours, 20, dtype)


@every_activation
def test_infinity_and_nan_are_stocks(ours, activation):
    x = torch.tensor([[float("inf"), 2.0], [float("nan"), 2.0], [3.0, float("nan")], [1.0, -float("inf")]])
    found = outputs_and_gradients(ours, [x], torch.ones(4, 1), torch.float32)
    wanted = outputs_and_gradients(stock(activation), [x], torch.ones(4, 1), torch.float32)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


@every_activation
def test_second_derivative_is_refused(ours, activation):
    x, weight = torch.randn(6, requires_grad=True), torch.ones(3, requires_grad=True)
    (grad,) = torch.autograd.grad((ours(x) * weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="not twice differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (swiglu, (torch.arange(4),), "swiglu: x is torch.int64; expected float32"),
        (
            reglu,
            (torch.ones(2, 5),),
            "reglu: x has shape \\[2, 5\\]; expected \\[..., 2f\\]",
        ),
        (swiglu, (torch.tensor(1.0),), "swiglu: x has shape \\[\\]"),
        (geglu, (torch.ones(4), None, "fast"), 'approximate is \'fast\'; expected "none" \\(erf\\) or "tanh"'),
        (geglu, (torch.ones(2, 4), torch.ones(2)), "geglu: bias is torch.float32 of shape \\[2\\]"),
        (
            swiglu,
            (torch.ones(4), torch.ones(4).half()),
            "bias is torch.float16 of shape \\[4\\] and x torch.float32",
        ),
    ],
    ids=["integers", "odd", "scalar", "form", "bias too short", "bias of another dtype"],
)
def test_wrong_arguments_are_named(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)

"""Activations that keep their input: exact, and ready to give their output again."""

from __future__ import annotations

import pytest
import torch
from covering import parametrize_covering
from pointwise_activations import ACTIVATIONS, DTYPES, SHAPES, over_the_range, strided
from witness import (
    assert_output_is_given_again,
    assert_strides_do_not_show,
    assert_three_witnesses,
    kept_storages,
    outputs_and_gradients,
)

from tempo_kernels.pointwise import activate, cpu

every_activation = pytest.mark.parametrize(("ours", "stock"), ACTIVATIONS.values(), ids=ACTIVATIONS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@every_activation
@every_dtype
def test_output_and_gradients_over_the_whole_range_are_as_good_as_torchs(dtype, ours, stock, nan_poison):
    x = over_the_range()
    assert_three_witnesses(ours, stock, [x], torch.randn(x.shape), dtype)
    assert_three_witnesses(ours, stock, [x, torch.randn(200) * 0.1], torch.randn(x.shape), dtype)


@parametrize_covering(each={"shape": SHAPES}, dtype=[*DTYPES, torch.float64], activation=ACTIVATIONS)
def test_odd_and_empty_shapes_give_torchs_output_and_gradients(shape, dtype, activation, monkeypatch, nan_poison):
    ours, stock = activation
    monkeypatch.setattr(cpu, "_MAX_CHUNK", 128)
    x, bias, grad = torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape)
    assert_three_witnesses(ours, stock, [x], grad, dtype)
    assert_three_witnesses(ours, stock, [x, bias], grad, dtype)


@every_activation
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_output_is_torchs_bit_for_bit(dtype, ours, stock):
    x, bias = (torch.randn(33, 97) * 3).to(dtype), torch.randn(97).to(dtype)
    for inputs in ((x,), (x, bias)):
        torch.testing.assert_close(ours(*inputs), stock(*inputs), rtol=0, atol=0)


@every_activation
def test_any_strides_give_the_contiguous_result(ours, stock):
    *inputs, grad = strided()
    assert ours(inputs[0]).is_contiguous()
    assert_strides_do_not_show(ours, inputs, grad, torch.float32)


@every_activation
def test_zeros_infinity_and_nan_are_torchs(ours, stock):
    x = torch.tensor([0.0, -0.0, float("inf"), float("nan"), -1.0, 30.0, -30.0, 1e4, -1e4])
    for a, b in zip(*(outputs_and_gradients(f, [x], torch.ones(9), x.dtype) for f in (ours, stock)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, equal_nan=True)


@every_activation
def test_float64_passes_gradcheck(ours, stock):
    x = torch.linspace(-6, 6, 40, dtype=torch.float64).view(2, 20).requires_grad_()
    bias = torch.randn(20, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ours, (x, bias))


@every_activation
@every_dtype
def test_output_is_given_again_bit_for_bit(dtype, ours, stock, nan_poison):
    assert_output_is_given_again(ours, 20, dtype)


@every_activation
@every_dtype
def test_keeps_its_input_and_bias_only(dtype, ours, stock):
    x, bias = torch.randn(33, 24).to(dtype).requires_grad_(), torch.randn(24).to(dtype).requires_grad_()
    assert set(kept_storages(ours, x, bias)) == {x.data_ptr(), bias.data_ptr()}
    assert set(kept_storages(ours, x)) == {x.data_ptr()}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_second_derivative_is_refused_by_name(name):
    x, weight = torch.randn(6, requires_grad=True), torch.ones(6, requires_grad=True)
    (grad,) = torch.autograd.grad((ACTIVATIONS[name][0](x) * weight).sum(), x, create_graph=True)
    message = rf'^{name.removesuffix("_tanh")} is not twice differentiable.* setting tempo.activation to "off"'
    with pytest.raises(RuntimeError, match=message):
        grad.sum().backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("is_meta", [False, True], ids=["compiled", "meta"])
def test_compiled_and_without_numbers_it_is_one_node_of_the_same_shapes(name, is_meta):
    ours = ACTIVATIONS[name][0]
    x, bias = torch.randn(3, 4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    if is_meta:
        leaves = [t.detach().to("meta").requires_grad_() for t in (x, bias)]
        y = ours(*leaves)
        shapes = [t.shape for t in (y, *torch.autograd.grad(y, leaves, torch.empty_like(y)))]
        assert y.is_meta and shapes == [x.shape, x.shape, bias.shape]
    else:
        torch._dynamo.reset()
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        for a, b in zip(*(outputs_and_gradients(f, [x, bias], x, x.dtype) for f in (compiled, ours)), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.arange(4), None, "relu"), "relu: x is torch.int64; expected float32, bfloat16, float16 or float64"),
        ((torch.ones(2, 4), torch.ones(2), "gelu"), "gelu: bias is torch.float32 of shape \\[2\\]"),
        ((torch.ones(4), torch.ones(4).half(), "gelu"), "bias is torch.float16 of shape \\[4\\] and x torch.float32"),
        ((torch.ones(4), None, "swish"), "activation is 'swish'; expected one of silu, gelu, gelu_tanh, relu"),
    ],
    ids=["integers", "bias too short", "bias of another dtype", "unknown activation"],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        activate(*arguments)

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from witness import assert_three_witnesses, kept_storages

from tempo_kernels.norm import layer_norm, rms_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PARAMETERS = {
    "initial": lambda h: (torch.ones(h), torch.zeros(h)),
    "trained": lambda h: (torch.randn(h) * 0.3 + 1, torch.randn(h) * 0.2),
    "one in a hundred gamma 0": lambda h: (
        torch.ones(h).masked_fill(torch.arange(h) % 100 == 0, 0.0),
        torch.randn(h) * 0.2,
    ),
    "gamma 0 and beta 0": lambda h: (torch.zeros(h), torch.zeros(h)),
    "beta / gamma 100": lambda h: (torch.full((h,), 0.01), torch.ones(h)),
    "beta / gamma about 2": lambda h: (torch.ones(h), torch.full((h,), 1.99)),
    "tiny gamma": lambda h: (torch.full((h,), 1e-7), torch.zeros(h)),
    "negative gamma": lambda h: (-torch.rand(h) - 0.1, torch.randn(h) * 0.1),
}


def reference_layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def reference_rms_norm(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS)
@pytest.mark.parametrize("shape", [(64, 3, 768), (7, 33)], ids=str)
def test_layer_norm_obeys_the_rule_for_any_gamma_and_beta(shape, parameters, dtype, nan_poison):
    x, grad = torch.randn(shape) * 3 + 1, torch.randn(shape)
    assert_three_witnesses(layer_norm, reference_layer_norm, [x, *parameters(shape[-1])], grad, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["initial", "one in a hundred gamma 0", "tiny gamma", "gamma 0 and beta 0"])
def test_rms_norm_obeys_the_rule(name, dtype, nan_poison):
    x, grad = torch.randn(65, 257), torch.randn(65, 257)
    assert_three_witnesses(rms_norm, reference_rms_norm, [x, PARAMETERS[name](257)[0]], grad, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_that_follow_the_normalised_input_obey_the_rule(dtype):
    x = torch.randn(32, 512)
    assert_three_witnesses(
        layer_norm, reference_layer_norm, [x, *PARAMETERS["trained"](512)], F.layer_norm(x, (512,)), dtype
    )


@pytest.mark.parametrize("shape", [(0, 16), (1, 1), (5, 1), (3, 0, 8), (1, 65)], ids=str)
def test_odd_and_empty_shapes_give_torchs_results(shape):
    x, grad = torch.randn(shape), torch.randn(shape)
    assert_three_witnesses(
        layer_norm, reference_layer_norm, [x, *PARAMETERS["trained"](shape[-1])], grad, torch.float32
    )


def test_rows_of_constant_value_give_torchs_results():
    x = torch.full((4, 96), 3.0)
    x[1:] = torch.randn(3, 96)
    assert_three_witnesses(
        layer_norm, reference_layer_norm, [x, *PARAMETERS["trained"](96)], torch.randn(4, 96), torch.float32
    )


def test_a_row_with_inf_or_nan_is_nan_and_leaves_other_rows_alone():
    x = torch.randn(3, 32)
    x[0, 3], x[1, 4] = float("inf"), float("nan")
    x.requires_grad_()
    weight, bias = (t.requires_grad_() for t in PARAMETERS["trained"](32))
    y = layer_norm(x, weight, bias)
    y.sum().backward()
    assert y[:2].isnan().all() and x.grad[:2].isnan().all()
    assert y[2].isfinite().all() and x.grad[2].isfinite().all()


def test_strided_inputs_and_gradients_give_torchs_results():
    x, grad = torch.randn(40, 6, 8).transpose(0, 1)[:, ::2], torch.randn(8, 20, 6).permute(2, 1, 0)
    assert_three_witnesses(layer_norm, reference_layer_norm, [x, *PARAMETERS["trained"](8)], grad, torch.float32)


def test_float64_passes_gradcheck_with_zero_gamma():
    x, weight, bias = (torch.randn(n, dtype=torch.float64) for n in (48, 12, 12))
    weight[3], weight[5] = 0.0, 1e-3
    inputs = [t.requires_grad_() for t in (x.view(4, 12).clone(), weight, bias)]
    assert torch.autograd.gradcheck(layer_norm, inputs)
    assert torch.autograd.gradcheck(lambda x, w, b: layer_norm(x, w, b, zero_centered=True), inputs)
    assert torch.autograd.gradcheck(rms_norm, inputs[:2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_keeps_the_output_rstd_and_nothing_else(dtype):
    x = torch.randn(64, 2, 128).to(dtype).requires_grad_()
    weight, bias = (t.to(dtype).requires_grad_() for t in PARAMETERS["trained"](128))
    weight.data.fill_(1)
    outputs = []

    def run(*inputs):
        outputs.append(layer_norm(*inputs))
        return outputs[0]

    kept = kept_storages(run, x, weight, bias)
    for parameter in (weight, bias):
        del kept[parameter.data_ptr()]
    y = outputs[0]
    assert kept.pop(y.data_ptr()) == y.numel() * y.element_size()
    assert list(kept.values()) == [64 * 2 * 4]


def test_keeps_one_column_for_each_channel_that_the_output_cannot_carry():
    weight, bias = torch.ones(128), torch.zeros(128)
    weight[5], bias[9] = 0.0, 50.0
    kept = kept_storages(
        layer_norm, torch.randn(64, 128).requires_grad_(), weight.requires_grad_(), bias.requires_grad_()
    )
    assert 64 * 2 * 4 in kept.values()


def test_the_next_linear_keeps_the_same_storage():
    x, weight, bias = (torch.randn(s).requires_grad_() for s in ((16, 32), (32,), (32,)))
    matrix = torch.randn(8, 32).requires_grad_()
    outputs = []

    def run(x):
        outputs.append(layer_norm(x, weight, bias))
        return F.linear(outputs[0], matrix)

    kept = kept_storages(run, x)
    large = [pointer for pointer, size in kept.items() if size == 16 * 32 * 4]
    assert large == [outputs[0].data_ptr()]


def test_a_second_derivative_raises():
    x = torch.randn(4, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(layer_norm(x, torch.ones(8), torch.zeros(8)).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("x", "weight", "bias", "message"),
    [
        (torch.ones(2, 8, dtype=torch.int64), torch.ones(8), torch.ones(8), "floating-point"),
        (torch.ones(2, 8), torch.ones(7), torch.ones(8), r"weight has shape \[7\]"),
        (torch.ones(2, 8), torch.ones(8), torch.ones(8, dtype=torch.float16), "bias is torch.float16"),
    ],
    ids=["integers", "weight size", "bias dtype"],
)
def test_what_does_not_fit_is_refused(x, weight, bias, message):
    with pytest.raises(ValueError, match=message):
        layer_norm(x, weight, bias)

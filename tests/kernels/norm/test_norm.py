from __future__ import annotations

from functools import partial

import pytest
import torch
from covering import parametrize_covering
from norm_inputs import (
    DTYPES,
    FORMS,
    PARAMETERS,
    reference_layer_norm,
    reference_rms_norm,
    zero_centered_layer_norm,
)  # fmt: skip
from torch.nn import functional as F
from witness import assert_three_witnesses, assert_within_rule, kept_storages

from tempo_kernels.norm import cpu, layer_norm, rms_norm


@parametrize_covering(parameters=PARAMETERS, dtype=DTYPES, keep=FORMS, shape=[(64, 3, 768), (7, 33)])
def test_layer_norm_obeys_the_rule_for_any_gamma_and_beta(parameters, dtype, keep, shape, nan_poison):
    x, grad = torch.randn(shape) * 3 + 1, torch.randn(shape)
    ours = partial(layer_norm, keep=keep)
    assert_three_witnesses(ours, reference_layer_norm, [x, *parameters(shape[-1])], grad, dtype)


@pytest.mark.parametrize("keep", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["initial", "one in a hundred gamma 0", "tiny gamma", "gamma 0 and beta 0"])
def test_rms_norm_obeys_the_rule(name, dtype, keep, nan_poison):
    x, grad = torch.randn(65, 257), torch.randn(65, 257)
    ours = partial(rms_norm, keep=keep)
    assert_three_witnesses(ours, reference_rms_norm, [x, PARAMETERS[name](257)[0]], grad, dtype)


@pytest.mark.parametrize("keep", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_zero_centered_gamma_obeys_the_rule(name, dtype, keep):
    weight, bias = PARAMETERS[name](768)
    ours = partial(layer_norm, zero_centered=True, keep=keep)
    inputs = [torch.randn(64, 768) * 3 + 1, weight - 1, bias]
    assert_three_witnesses(ours, zero_centered_layer_norm, inputs, torch.randn(64, 768), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_small_zero_centered_weight_of_16_bits_is_not_rounded_away(dtype):
    x, weight, bias = torch.randn(4, 32), torch.full((32,), 2.0**-12), torch.zeros(32)
    ours = layer_norm(x.to(dtype), weight.to(dtype), bias.to(dtype), zero_centered=True)
    expected = F.layer_norm(x.to(dtype).double(), (32,), (weight + 1).double(), bias.double(), 1e-5)
    assert torch.equal(ours, expected.to(dtype))


@pytest.mark.parametrize("keep", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float32_parameters_of_a_16_bit_norm_obey_the_rule(dtype, keep):
    x, grad = torch.randn(64, 768).to(dtype) * 3, torch.randn(64, 768).to(dtype)
    weight, bias = PARAMETERS["trained"](768)
    weight[::100] = 0.0

    def run(function, cast):
        leaves = [cast(t).detach().requires_grad_() for t in (x, weight, bias)]
        y = function(*leaves)
        y.backward(cast(grad))
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    exact, same = (run(reference_layer_norm, cast) for cast in (torch.Tensor.double, lambda t: t))
    ours = run(partial(layer_norm, keep=keep), lambda t: t)
    for name, *three in zip(["y", "grad_x", "grad_weight", "grad_bias"], ours, same, exact, strict=True):
        assert_within_rule(name, *three)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_that_follow_the_normalised_input_obey_the_rule(dtype):
    x = torch.randn(32, 512)
    assert_three_witnesses(
        layer_norm, reference_layer_norm, [x, *PARAMETERS["trained"](512)], F.layer_norm(x, (512,)), dtype
    )


@pytest.mark.parametrize("keep", FORMS)
@pytest.mark.parametrize("shape", [(0, 16), (1, 1), (5, 1), (3, 0, 8), (4, 0), (1, 65), (12,)], ids=str)
def test_odd_and_empty_shapes_give_torchs_results(shape, keep):
    inputs = [torch.randn(shape), *PARAMETERS["trained"](shape[-1])]
    ours = partial(layer_norm, keep=keep)
    assert_three_witnesses(ours, reference_layer_norm, inputs, torch.randn(shape), torch.float32)


@pytest.mark.parametrize("keep", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_constant_value_give_torchs_results(dtype, keep):
    x = torch.full((4, 96), 3.0)
    x[1:] = torch.randn(3, 96)
    inputs, ours = [x, *PARAMETERS["trained"](96)], partial(layer_norm, keep=keep)
    assert_three_witnesses(ours, reference_layer_norm, inputs, torch.randn(4, 96), dtype)


@pytest.mark.parametrize("keep", FORMS)
def test_a_row_with_inf_or_nan_is_nan_as_torchs_and_leaves_other_rows_alone(keep):
    x = torch.randn(3, 32)
    x[0, 3], x[1, 4] = float("inf"), float("nan")
    nan = []
    for function in (partial(layer_norm, keep=keep), reference_layer_norm):
        leaves = [t.clone().requires_grad_() for t in (x, *PARAMETERS["initial"](32))]
        y = function(*leaves)
        y.sum().backward()
        nan.append([t.isnan() for t in (y, *(leaf.grad for leaf in leaves))])
        assert y[2].isfinite().all() and leaves[0].grad[2].isfinite().all()
    assert all(torch.equal(ours, torchs) for ours, torchs in zip(*nan, strict=True))
    assert nan[0][0][:2].all() and nan[0][1][:2].all()


@pytest.mark.parametrize("keep", FORMS)
def test_strided_inputs_and_gradients_give_torchs_results(keep):
    x, grad = torch.randn(40, 6, 8).transpose(0, 1)[:, ::2], torch.randn(8, 20, 6).permute(2, 1, 0)
    inputs, ours = [x, *PARAMETERS["trained"](8)], partial(layer_norm, keep=keep)
    assert_three_witnesses(ours, reference_layer_norm, inputs, grad, torch.float32)


@pytest.mark.parametrize("keep", FORMS)
def test_float64_passes_gradcheck_with_zero_gamma(keep):
    x, weight, bias = (torch.randn(n, dtype=torch.float64) for n in (48, 12, 12))
    weight[3], weight[5], weight[7] = 0.0, 1e-3, -1.0
    inputs = [t.requires_grad_() for t in (x.view(4, 12).clone(), weight, bias)]
    for zero_centered in (False, True):
        options = {"keep": keep, "zero_centered": zero_centered}
        assert torch.autograd.gradcheck(partial(layer_norm, **options), inputs)
        assert torch.autograd.gradcheck(partial(rms_norm, **options), inputs[:2])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("function", [layer_norm, rms_norm])
def test_what_keeps_its_input_refills_its_output_bit_for_bit(function, dtype, monkeypatch):
    monkeypatch.setattr(cpu, "BLOCK_ELEMENTS", 3 * 40)
    x, (weight, bias) = torch.randn(5, 40, 8).transpose(1, 2).to(dtype), PARAMETERS["trained"](40)
    parameters = [weight.to(dtype), bias.to(dtype)][: 2 if function is layer_norm else 1]
    y = function(x.requires_grad_(), *parameters, zero_centered=True, keep="input")
    out = torch.full_like(y, float("nan"), requires_grad=False)
    y.grad_fn.refill(y.grad_fn, out)
    assert torch.equal(out, y) and not out.requires_grad
    y.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_keeps_the_output_rstd_a_copy_of_the_parameters_and_nothing_else(dtype):
    x = torch.randn(64, 2, 128).to(dtype).requires_grad_()
    weight, bias = (t.to(dtype).requires_grad_() for t in PARAMETERS["trained"](128))
    weight.data.fill_(1)
    outputs = []

    def run(*inputs):
        outputs.append(layer_norm(*inputs))
        return outputs[0]

    kept = kept_storages(run, x, weight, bias)
    y = outputs[0]
    assert kept.pop(y.data_ptr()) == y.numel() * y.element_size()
    assert sorted(kept.values()) == sorted([64 * 2 * 4, 2 * 128 * 4])  # rstd, and the gamma and beta of this call


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [layer_norm, rms_norm])
def test_what_keeps_its_input_keeps_that_and_one_or_two_numbers_a_row(function, dtype):
    x = torch.randn(64, 128).to(dtype).requires_grad_()
    parameters = [t.to(dtype).requires_grad_() for t in PARAMETERS["gamma 0 and beta 0"](128)]
    parameters = parameters[: 2 if function is layer_norm else 1]
    kept = kept_storages(partial(function, keep="input"), x, *parameters)
    for tensor in (x, *parameters):
        del kept[tensor.data_ptr()]
    assert list(kept.values()) == [64 * 4] * len(parameters)


def test_keeps_one_column_for_each_channel_that_the_output_cannot_carry():
    weight, bias = torch.ones(128), torch.zeros(128)
    weight[5], bias[9] = 0.0, 50.0
    kept = kept_storages(
        layer_norm, torch.randn(64, 128).requires_grad_(), weight.requires_grad_(), bias.requires_grad_()
    )
    assert 64 * 2 * 4 in kept.values()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("change", ["fused AdamW", "in place", ".data"])
def test_gradients_are_those_of_the_parameters_of_the_forward_though_they_changed_since(change, dtype):
    x, grad = torch.randn(2, 32, 64).to(dtype)
    leaves = [t.to(dtype).requires_grad_() for t in (x, *PARAMETERS["one in a hundred gamma 0"](64))]
    expected = torch.autograd.grad(layer_norm(*leaves), leaves, grad)
    y = layer_norm(*leaves)
    for leaf in leaves[1:]:
        leaf.grad = torch.ones_like(leaf)
    with torch.no_grad():
        if change == "fused AdamW":
            torch.optim.AdamW(leaves[1:], lr=0.5, fused=True).step()
        elif change == "in place":
            leaves[1].zero_()
        else:
            leaves[1].data += 7
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(y, leaves, grad), expected, strict=True))


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


X, ONES = torch.ones(2, 8), torch.ones(8)
HALF, BRAIN = ONES.half(), ONES.bfloat16()
REFUSED = {
    "integers": (X.long(), ONES, ONES, {}, "floating-point"),
    "weight size": (X, torch.ones(7), ONES, {}, r"weight has shape \[7\]"),
    "bias of 16 bits alone": (X, ONES, HALF, {}, "bias is torch.float16; expected torch.float32, beside"),
    "weight of 16 bits alone": (X, HALF, ONES, {}, "bias is torch.float32; expected torch.float16, beside"),
    "two dtypes of 16 bits": (
        X, BRAIN, HALF, {}, "bias is torch.float16; expected torch.bfloat16, beside x's torch.float32; cast it",
    ),
    "float64 x": (
        X.double(), BRAIN, ONES, {}, "weight is torch.bfloat16; expected torch.float64 or torch.float32, beside x's",
    ),
    "other 16-bit weight dtype": (
        X.half(), BRAIN, ONES, {}, "weight is torch.bfloat16; expected torch.float16 or torch.float32, beside x's",
    ),
    "unknown form": (X, ONES, ONES, {"keep": "both"}, 'keep is "both".*expected "output" or "input"'),
}  # fmt: skip


@pytest.mark.parametrize(("x", "weight", "bias", "form", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(x, weight, bias, form, message):
    with pytest.raises(ValueError, match=message):
        layer_norm(x, weight, bias, **form)

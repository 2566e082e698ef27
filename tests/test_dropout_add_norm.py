from __future__ import annotations

import contextlib

import pytest
import torch
from test_dropout_add import DRAW, DTYPES, mask_of
from test_norm import PARAMETERS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from witness import assert_three_witnesses, kept_storages

from tempo_kernels.dropout_add import bias_dropout_add
from tempo_kernels.dropout_add_norm import bias_dropout_add_layer_norm, bias_dropout_add_rms_norm
from tempo_kernels.norm import layer_norm, rms_norm
from tempo_kernels.philox import effective_probability

SHAPES = [(40, 2, 96), (1, 1, 1), (5, 3, 13), (0, 2, 8), (4, 2, 0)]


def fused(*inputs, zero_centered=False, **draw):
    """Both outputs; five inputs are LayerNorm's, four are RMSNorm's."""
    function = bias_dropout_add_layer_norm if len(inputs) == 5 else bias_dropout_add_rms_norm
    return function(*inputs, zero_centered=zero_centered, **(draw or DRAW))


def in_a_row(x, bias, residual, *parameters, zero_centered=False, **draw):
    residual_out = bias_dropout_add(x, bias, residual, **(draw or DRAW))
    norm = layer_norm if len(parameters) == 2 else rms_norm
    return residual_out, norm(residual_out, *parameters, zero_centered=zero_centered)


def reference(x, bias, residual, *parameters, zero_centered=False):
    residual_out = residual + (x if bias is None else x + bias) * (~mask_of(x)) / (1 - effective_probability(0.1))
    weight, *norm_bias = parameters
    gamma = 1 + weight if zero_centered else weight
    norm = F.layer_norm if norm_bias else F.rms_norm
    return residual_out, norm(residual_out, x.shape[-1:], gamma, *norm_bias, eps=1e-5)


def joined(function, **options):
    """`function` with its two outputs side by side, as one tensor."""
    return lambda *inputs: torch.cat(function(*inputs, **options), dim=-1)


def random_inputs(shape, name="trained", has_bias=True, has_norm_bias=True):
    """x, bias, residual and the norm's parameters, of any name in PARAMETERS."""
    x, residual = torch.rand(shape) * 16 - 8, torch.randn(shape) * 3 + 1
    weight, norm_bias = PARAMETERS[name](shape[-1])
    return [x, torch.randn(shape[-1]) if has_bias else None, residual, weight, *([norm_bias] if has_norm_bias else [])]


def assert_rule(inputs, dtype, **options):
    grad = torch.randn(*inputs[0].shape[:2], 2 * inputs[0].size(2))
    assert_three_witnesses(joined(fused, **options), joined(reference, **options), inputs, grad, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PARAMETERS)
def test_both_outputs_and_every_gradient_obey_the_rule_for_any_gamma_and_beta(name, dtype, nan_poison):
    assert_rule(random_inputs((40, 2, 96), name), dtype)
    assert_rule(random_inputs((40, 2, 96), name, has_norm_bias=False), dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_norm_bias", [True, False])
def test_odd_and_empty_shapes_obey_the_rule(has_norm_bias, has_bias, shape, nan_poison):
    assert_rule(random_inputs(shape, has_bias=has_bias, has_norm_bias=has_norm_bias), torch.bfloat16)


@pytest.mark.parametrize("has_norm_bias", [True, False])
def test_a_zero_centered_gamma_and_strided_inputs_obey_the_rule(has_norm_bias):
    x, bias, residual, weight, *norm_bias = random_inputs((8, 5, 12), has_norm_bias=has_norm_bias)
    inputs = [x.permute(1, 0, 2)[:, ::2], bias, residual[::2].permute(1, 0, 2), weight - 1, *norm_bias]
    assert_rule(inputs, torch.float32, zero_centered=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("has_norm_bias", [True, False])
def test_both_outputs_are_those_of_the_two_operations_in_a_row_bit_for_bit(has_norm_bias, p, dtype):
    inputs = random_inputs((30, 3, 40), "one in a hundred gamma 0", has_norm_bias=has_norm_bias)
    inputs = [t.to(dtype) for t in inputs]
    for zero_centered in (False, True):
        draw = {"p": p, "key": torch.tensor(7), "first_sample": 3, "first_row": 2, "zero_centered": zero_centered}
        for ours, theirs in zip(fused(*inputs, **draw), in_a_row(*inputs, **draw), strict=True):
            assert ours.dtype == dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("used", [(True, False), (False, True)], ids=["residual_out", "y"])
def test_an_output_that_nobody_uses_adds_nothing_to_the_gradients(used):
    results = []
    for function in (fused, in_a_row):
        leaves = [t.requires_grad_() for t in random_inputs((6, 2, 40))] if not results else results[0][0]
        outputs = [out for out, is_used in zip(function(*leaves), used, strict=True) if is_used]
        grads = torch.autograd.grad(outputs[0].square().sum(), leaves, allow_unused=True)
        results.append((leaves, grads))
    (_, ours), (_, theirs) = results
    assert [grad is None for grad in ours] == [grad is None for grad in theirs]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None)


def test_a_gradient_that_nobody_wants_is_not_given():
    inputs = random_inputs((6, 2, 40))
    for wanted in range(5):
        leaves = [t.clone().requires_grad_(index == wanted) for index, t in enumerate(inputs)]
        torch.cat(fused(*leaves)).sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == [index == wanted for index in range(5)]


def test_float64_passes_gradcheck_with_zero_gamma():
    inputs = [t.double().requires_grad_() for t in random_inputs((4, 2, 12))]
    with torch.no_grad():
        inputs[3][3], inputs[3][5] = 0.0, 1e-3
    assert torch.autograd.gradcheck(fused, inputs)
    assert torch.autograd.gradcheck(lambda *t: fused(*t, zero_centered=True), inputs)
    assert torch.autograd.gradcheck(fused, inputs[:4])


@pytest.mark.parametrize("name", ["initial", "one in a hundred gamma 0"])
def test_keeps_y_and_rstd_and_a_column_for_each_lost_channel(name):
    inputs = [t.bfloat16().requires_grad_() for t in random_inputs((16, 2, 300), name)]
    outputs = []

    def run(*tensors):
        outputs.extend(fused(*tensors))
        return outputs[1]

    kept = kept_storages(run, *inputs)
    assert kept.pop(outputs[1].data_ptr()) == 32 * 300 * 2
    columns = [] if name == "initial" else [3 * 8, 3 * 32 * 2]  # their numbers, and what is kept of them
    assert sorted(kept.values()) == sorted([32 * 4, 2 * 300 * 4, *columns])  # rstd, gamma and beta


@pytest.mark.parametrize("mode", ["fake", "meta"])
@pytest.mark.parametrize("has_norm_bias", [True, False])
def test_shapes_are_known_without_data(has_norm_bias, mode):
    with contextlib.nullcontext() if mode == "meta" else FakeTensorMode():
        device = {"fake": "cpu", "meta": "meta"}[mode]
        shapes = [(8, 2, 16), (16,), (8, 2, 16), (16,), (16,)][: 5 if has_norm_bias else 4]
        inputs = [torch.empty(shape, dtype=torch.bfloat16, device=device, requires_grad=True) for shape in shapes]
        outputs = fused(*inputs)
        sum(out.sum() for out in outputs).backward()
        for tensor, like in zip([*outputs, *(t.grad for t in inputs)], [inputs[0]] * 2 + inputs, strict=True):
            assert (tensor.shape, tensor.dtype, tensor.device) == (like.shape, like.dtype, like.device)


def test_inputs_stay_as_they_are():
    inputs = random_inputs((8, 2, 16))
    copies = [t.clone() for t in inputs]
    fused(*inputs)
    assert all(torch.equal(t, copy) for t, copy in zip(inputs, copies, strict=True))


@pytest.mark.parametrize("output", [0, 1])
def test_a_second_derivative_raises(output):
    inputs = [t.requires_grad_() for t in random_inputs((4, 2, 8))]
    loss = fused(*inputs)[output].sum()
    (grad,) = torch.autograd.grad(loss, inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match='not twice differentiable.* setting tempo.norm to "off"'):
        (loss + grad.square().sum()).backward()


@pytest.mark.parametrize(
    ("index", "tensor", "message"),
    [
        (0, torch.ones(2, 8), r"x is torch.float32 of shape \[2, 8\]"),
        (2, torch.ones(2, 2, 8).half(), "residual is torch.float16"),
        (3, torch.ones(4), r"weight has shape \[4\]"),
        (4, torch.ones(8).half(), "norm_bias is torch.float16"),
    ],
    ids=["x", "residual", "weight", "norm_bias"],
)
def test_what_does_not_fit_is_refused(index, tensor, message):
    inputs = [torch.ones(2, 2, 8), None, torch.ones(2, 2, 8), torch.ones(8), torch.ones(8)]
    inputs[index] = tensor
    with pytest.raises(ValueError, match=message):
        fused(*inputs)

"""gelu(keep="input"): exact, and ready to give its output again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gelu_inputs import DTYPES, FORMS, inputs
from witness import assert_strides_do_not_show, assert_three_witnesses, kept_storages

from tempo_kernels.gelu import cpu, gelu


def ours(form):
    return lambda x, bias=None: gelu(x, bias, form, keep="input")


def reference(form):
    """What the operation replaces: erf GELU of the rounded sum, tanh GELU of the float32 sum."""

    def function(x, bias=None):
        if bias is None:
            return F.gelu(x, approximate=form)
        if form == "none":
            return F.gelu(x + bias)
        dtype = torch.promote_types(x.dtype, torch.float32)
        return F.gelu(x.to(dtype) + bias.to(dtype), approximate="tanh").to(x.dtype)

    return function


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_output_and_gradients_over_the_whole_range_are_as_good_as_torchs(form, dtype, nan_poison):
    x = inputs(form)[:-3].view(-1, 200)
    assert_three_witnesses(ours(form), reference(form), [x], torch.randn(x.shape), dtype)
    assert_three_witnesses(ours(form), reference(form), [x, torch.randn(200) * 0.1], torch.randn(x.shape), dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(0,), (1,), (9,), (4, 0, 8), (0, 3), (3, 0), (3, 1, 5), (65, 33)], ids=str)
def test_odd_and_empty_shapes_give_torchs_output_and_gradients(shape, form, dtype, monkeypatch, nan_poison):
    monkeypatch.setattr(cpu, "_MAX_CHUNK", 128)
    x, bias, grad = torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape)
    assert_three_witnesses(ours(form), reference(form), [x], grad, dtype)
    assert_three_witnesses(ours(form), reference(form), [x, bias], grad, dtype)


def test_any_strides_give_the_contiguous_result():
    strided = [torch.randn(26, 24).t()[::2], torch.randn(52)[::2]]
    grad = torch.randn(26).expand(12, 26)
    for form in FORMS:
        assert_strides_do_not_show(ours(form), strided, grad, torch.float32)


@pytest.mark.parametrize("form", FORMS)
def test_float64_passes_gradcheck_at_the_minimum_too(form):
    x = torch.linspace(-6, 6, 40).double().view(2, 20).requires_grad_()
    bias = torch.randn(20, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ours(form), (x, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_output_is_that_of_the_in_place_form_bit_for_bit_and_is_given_again(form, dtype, nan_poison):
    x, bias = torch.randn(33, 20).to(dtype).requires_grad_(), torch.randn(20).to(dtype).requires_grad_()
    for arguments in ((x, None, form), (x, bias, form)):
        y = gelu(*arguments, keep="input")
        assert torch.equal(y, gelu(*arguments))
        out = torch.empty_like(y, requires_grad=False)
        y.grad_fn.refill(y.grad_fn, out)
        assert torch.equal(out, y) and not out.requires_grad


@pytest.mark.parametrize("dtype", DTYPES)
def test_keeps_its_input_and_bias_only(dtype):
    x, bias = torch.randn(33, 24).to(dtype).requires_grad_(), torch.randn(24).to(dtype).requires_grad_()
    for form in FORMS:
        assert set(kept_storages(ours(form), x, bias)) == {x.data_ptr(), bias.data_ptr()}
        assert set(kept_storages(ours(form), x)) == {x.data_ptr()}


def test_second_derivative_is_refused_by_name():
    x = torch.randn(6, requires_grad=True)
    weight = torch.ones(6, requires_grad=True)
    (grad,) = torch.autograd.grad((gelu(x, keep="input") * weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r'gelu is not twice differentiable.* setting tempo.activation to "off"'):
        grad.sum().backward()


def test_an_unknown_choice_is_named():
    with pytest.raises(ValueError, match=r'gelu: keep is \'both\'; expected "output" or "input"'):
        gelu(torch.ones(4), keep="both")

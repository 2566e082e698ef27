"""GELU's Triton kernels against their specification: see interpreted.py for where they run."""

from __future__ import annotations

import pytest
import torch
from covering import parametrize_covering
from gelu_inputs import ACTIVATION, FORMS, exact_derivative, floor_of, inputs, minimum_of
from interpreted import DEVICE, DTYPES, check_backward, check_many_tiles, kernel_test
from pointwise_activations import misaligned, strided
from witness import ulp

from tempo_kernels.gelu import eager, kernel
from tempo_kernels.gelu.inverse import INVERSES
from tempo_kernels.pointwise import eager as pointwise_eager
from tempo_kernels.pointwise import kernel as pointwise_kernel

# The interpreter computes with NumPy, which warns where exp(-x) is infinite and its reciprocal, the result, is 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning")
SHAPES = [(3, 2, 768), (5, 1000), (9, 33), (1, 1), (2, 2049), (40, 8), (0, 16), (3, 0)]


def forward(x, bias, form):
    return pointwise_kernel.forward_with_bits(x, bias, ACTIVATION[form], INVERSES[form].x_min)


def specify(x, bias, form):
    return pointwise_eager.forward_with_bits(x, bias, ACTIVATION[form], INVERSES[form].x_min)


def check_gelu(x, grad, form):
    """Backward, where each backend is given the same y and bits."""
    kept = [t.to(x.device) for t in specify(x.cpu(), None, form)]
    check_backward(kernel, eager, [grad, *kept], form)


def random_gelu(shape, dtype):
    x, grad = ((torch.rand(shape, device=DEVICE) * 16 - 8).to(dtype), torch.randn(shape, device=DEVICE).to(dtype))
    # Not all in the left tail, where GELU' is below what an erf in float32 is off by, here 0 and there 6e-8.
    x.view(-1)[:1] = 1.5
    return x, grad


@kernel_test
@parametrize_covering(each={"shape": SHAPES}, dtype=DTYPES, form=FORMS)
def test_gelu_does_what_is_specified_for_any_shape(shape, dtype, form):
    check_gelu(*random_gelu(shape, dtype), form)


@kernel_test
@pytest.mark.parametrize("form", FORMS)
def test_gelu_takes_any_strides_and_alignment(form):
    x, _, grad = strided(DEVICE)
    check_gelu(x, grad, form)
    check_gelu(misaligned((3, 64), DEVICE), misaligned((3, 64), DEVICE), form)


@kernel_test
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelus_bits_are_right_at_the_minimum_and_its_neighbours(dtype, form):
    nearest = torch.tensor(minimum_of(form)).to(dtype).double()
    near = nearest + torch.arange(-20, 20) * ulp(nearest, dtype)
    x = torch.cat([near, torch.linspace(-8, 8, 24)]).to(DEVICE, dtype)
    for bias in (None, torch.zeros_like(x)):
        found, expected = (
            f(t, None if bias is None else bias.to(t.device), form) for f, t in ((forward, x), (specify, x.cpu()))
        )
        assert torch.equal(found[1].cpu(), expected[1])
    check_gelu(x, torch.ones_like(x), form)


@kernel_test
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelus_gradient_is_at_the_floor_that_the_computed_output_sets(dtype, form):
    x = inputs(form, dtype)[::7]
    y, bits = forward(x.to(DEVICE), None, form)
    grad_x, _ = kernel.backward(torch.ones_like(y), y, bits, form, False)
    error = (grad_x.cpu().double() - exact_derivative(x, form)).abs().max()
    assert error <= 1.2 * floor_of(x.double(), y.cpu(), form)


@kernel_test
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_is_right_at_zeros_infinity_nan_and_far_away(dtype, form):
    x = torch.tensor([0.0, -0.0, float("inf"), 30.0, 1e4, -30.0, -1e4, float("nan")], dtype=dtype, device=DEVICE)
    y, bits = forward(x, None, form)
    far = torch.tensor([0.0, -0.0, float("inf"), 30.0, 1e4, -0.0, -0.0, float("nan")], dtype=dtype)
    assert torch.equal(y.cpu().nan_to_num(7.0), far.nan_to_num(7.0)) and torch.equal(y.cpu().isnan(), far.isnan())
    grad_x, _ = kernel.backward(torch.ones_like(y), y, bits, form, False)
    expected = torch.tensor([0.5, 0.5, 1.0, 1.0, 1.0, 0.0, 0.0, float("nan")], dtype=dtype)
    torch.testing.assert_close(grad_x.cpu(), expected, rtol=0, atol=1e-5, equal_nan=True)


@kernel_test
def test_gelus_bias_gradient_sums_many_tiles_in_a_fixed_order(monkeypatch):
    def grad_bias(x, grad, form):
        return kernel.backward(grad, *forward(x, None, form), form, True)[1]

    check_many_tiles(monkeypatch, check_gelu, (*random_gelu((70, 264), torch.float32), "none"), grad_bias)

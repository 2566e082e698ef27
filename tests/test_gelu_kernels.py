"""GELU's Triton kernels against their specification: see interpreted.py for where they run."""

from __future__ import annotations

import pytest
import torch
from gelu_inputs import FORMS, exact_derivative, floor_of, inputs, minimum_of
from interpreted import DEVICE, DTYPES, assert_as_specified, kernel_test
from witness import ulp

from tempo_kernels.gelu import eager, kernel
from tempo_kernels.pointwise import kernel_tiles

# The interpreter computes with NumPy, which warns where exp(-x) is infinite and its reciprocal, the result, is 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning")


def check_gelu(x, bias, grad, form):
    """Forward, and both backward passes where each backend is given the same y and bits."""
    y, bits = kernel.forward(x, bias, form)
    assert_as_specified([y], [x, bias], lambda *t: [eager.forward(*t, form)[0]], "y")
    cpu_y, cpu_bits = eager.forward(x.cpu(), None if bias is None else bias.cpu(), form)
    assert torch.equal(bits.cpu(), cpu_bits)
    again = torch.full_like(y, torch.nan)
    assert kernel.forward(x, bias, form, has_bits=False, out=again) == (again, None) and torch.equal(again, y)

    has_bias = bias is not None
    names = ["grad_x", "grad_bias"] if has_bias else ["grad_x"]
    kept = [cpu_y.to(x.device), cpu_bits.to(x.device)]
    for name, tensors in (("backward", [grad, *kept]), ("backward_from_input", [grad, x, bias])):
        found = getattr(kernel, name)(*tensors, form, has_bias)[: len(names)]
        assert_as_specified(
            found, tensors, lambda *t, n=name: getattr(eager, n)(*t, form, has_bias)[: len(names)], *names
        )
        assert has_bias or getattr(kernel, name)(*tensors, form, False)[1] is None


def random_gelu(shape, dtype):
    x, grad = ((torch.rand(shape, device=DEVICE) * 16 - 8).to(dtype), torch.randn(shape, device=DEVICE).to(dtype))
    # Not all in the left tail, where GELU' is below what an erf in float32 is off by, here 0 and there 6e-8.
    x.view(-1)[:1] = 1.5
    return x, torch.randn(shape[-1], device=DEVICE).to(dtype), grad


@kernel_test
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(3, 2, 768), (5, 1000), (9, 33), (1, 1), (2, 2049), (40, 8), (0, 16), (3, 0)], ids=str
)
def test_gelu_does_what_is_specified_for_any_shape(shape, dtype, form):
    x, bias, grad = random_gelu(shape, dtype)
    check_gelu(x, bias, grad, form)
    check_gelu(x, None, grad, form)


@kernel_test
def test_gelu_takes_any_strides_and_alignment():
    x, bias, grad = (
        torch.randn(24, 10, device=DEVICE).t(),
        torch.randn(48, device=DEVICE)[::2],
        torch.randn(24, device=DEVICE),
    )
    check_gelu(x, bias, grad.expand(10, 24), "none")
    x, grad = (torch.randn(193, device=DEVICE).bfloat16()[1:].view(3, 64) for _ in range(2))
    check_gelu(x, torch.randn(65, device=DEVICE).bfloat16()[1:], grad, "tanh")


@kernel_test
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelus_bits_are_right_at_the_minimum_and_its_neighbours(dtype, form):
    nearest = torch.tensor(minimum_of(form)).to(dtype).double()
    near = nearest + torch.arange(-20, 20) * ulp(nearest, dtype)
    x = torch.cat([near, torch.linspace(-8, 8, 24)]).to(DEVICE, dtype)
    check_gelu(x, None, torch.ones_like(x), form)
    check_gelu(x, torch.zeros_like(x), torch.ones_like(x), form)


@kernel_test
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelus_gradient_is_at_the_floor_that_the_computed_output_sets(dtype, form):
    x = inputs(form, dtype)[::7]
    y, bits = kernel.forward(x.to(DEVICE), None, form)
    grad_x, _ = kernel.backward(torch.ones_like(y), y, bits, form, False)
    error = (grad_x.cpu().double() - exact_derivative(x, form)).abs().max()
    assert error <= 1.2 * floor_of(x.double(), y.cpu(), form)


@kernel_test
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_is_right_at_zeros_infinity_nan_and_far_away(dtype, form):
    x = torch.tensor([0.0, -0.0, float("inf"), 30.0, 1e4, -30.0, -1e4, float("nan")], dtype=dtype, device=DEVICE)
    y, bits = kernel.forward(x, None, form)
    far = torch.tensor([0.0, -0.0, float("inf"), 30.0, 1e4, -0.0, -0.0, float("nan")], dtype=dtype)
    assert torch.equal(y.cpu().nan_to_num(7.0), far.nan_to_num(7.0)) and torch.equal(y.cpu().isnan(), far.isnan())
    grad_x, _ = kernel.backward(torch.ones_like(y), y, bits, form, False)
    expected = torch.tensor([0.5, 0.5, 1.0, 1.0, 1.0, 0.0, 0.0, float("nan")], dtype=dtype)
    torch.testing.assert_close(grad_x.cpu(), expected, rtol=0, atol=1e-5, equal_nan=True)


@kernel_test
def test_gelus_bias_gradient_sums_many_tiles_in_a_fixed_order(monkeypatch):
    monkeypatch.setattr(kernel_tiles, "BACKWARD_PROGRAMS", 3)
    x, bias, grad = random_gelu((70, 264), torch.float32)
    check_gelu(x, bias, grad, "none")
    for name, tensors in (
        ("backward", [grad, *kernel.forward(x, bias, "none")]),
        ("backward_from_input", [grad, x, bias]),
    ):
        first, second = (getattr(kernel, name)(*tensors, "none", True)[1] for _ in range(2))
        assert torch.equal(first, second)


@pytest.mark.gpu
def test_gelu_addresses_more_than_two_billion_elements():
    x = torch.zeros(2**31 // 4096 + 9, 4096, dtype=torch.bfloat16, device="cuda")
    x[-9:] = torch.randn(9, 4096)
    y, bits = kernel.forward(x, None, "tanh")
    last = kernel.forward(x[-9:].clone(), None, "tanh")
    assert torch.equal(y[-9:], last[0]) and torch.equal(bits[-9 * 512 :], last[1]) and not y[:-9].any()
    grad_x, _ = kernel.backward(torch.ones_like(y), y, bits, "tanh", False)
    assert torch.equal(grad_x[-9:], kernel.backward(torch.ones_like(last[0]), *last, "tanh", False)[0])


@kernel_test
def test_gelu_refuses_float64_where_kernels_run():
    with pytest.raises(ValueError, match="x is torch.float64; expected float32, float16 or bfloat16"):
        kernel.forward(torch.ones(8, dtype=torch.float64, device=DEVICE), None, "none")

"""The Triton kernels of pointwise activations against their specification: see interpreted.py for where they run."""

from __future__ import annotations

import pytest
import torch
from covering import parametrize_covering
from interpreted import DEVICE, DTYPES, assert_as_specified, kernel_test, round_sums
from pointwise_activations import ACTIVATIONS, misaligned, over_the_range, strided

from tempo_kernels.pointwise import eager, kernel, kernel_sums

# The interpreter computes with NumPy, which warns where exp(-x) is infinite and its reciprocal, the result, is 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning")
SHAPES = [(3, 2, 768), (5, 1000), (9, 33), (1, 1), (2, 2049), (40, 8), (0, 16), (3, 0)]
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def check_activation(x, bias, grad, activation):
    y = kernel.forward(x, bias, activation)
    assert_as_specified([y], [x, bias], lambda *t: [eager.forward(*t, activation)], "y")
    if bias is not None and activation != "gelu_tanh":  # whose sum stays in float32, as in Megatron's own
        assert torch.equal(y, kernel.forward(x + bias, None, activation)), "the sum is rounded as torch rounds it"
    again = torch.full_like(y, torch.nan)
    assert kernel.forward(x, bias, activation, again) is again and torch.equal(again, y)
    with_bits, bits = kernel.forward_with_bits(x, bias, activation, -0.7)
    cpu_bits = eager.forward_with_bits(x.cpu(), None if bias is None else bias.cpu(), activation, -0.7)[1]
    assert torch.equal(with_bits, y) and torch.equal(bits.cpu(), cpu_bits)

    found = kernel.backward(grad, x, bias, activation, True)
    assert_as_specified(
        found, [grad, x, bias], lambda *t: round_sums(eager.backward(*t, activation, True)), "grad_x", "grad_bias"
    )
    alone, nothing = kernel.backward(grad, x, bias, activation, False)
    assert torch.equal(alone, found[0]) and nothing is None


def random_input(shape, dtype):
    x, grad = (torch.rand(shape, device=DEVICE) * 16 - 8).to(dtype), torch.randn(shape, device=DEVICE).to(dtype)
    # Not all in the left tail, where GELU' is below what an erf in float32 is off by, here 0 and there 6e-8.
    x.view(-1)[:1] = 1.5
    return x, torch.randn(shape[-1], device=DEVICE).to(dtype), grad


@kernel_test
@every_activation
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_activation_does_over_the_range_what_is_specified(dtype, activation):
    x = over_the_range().to(DEVICE, dtype)
    check_activation(x, None, torch.randn(x.shape, device=DEVICE).to(dtype), activation)


@kernel_test
@parametrize_covering(each={"shape": SHAPES}, dtype=DTYPES, activation=ACTIVATIONS.keys())
def test_an_activation_does_what_is_specified_for_any_shape(shape, dtype, activation):
    x, bias, grad = random_input(shape, dtype)
    check_activation(x, bias, grad, activation)
    check_activation(x, None, grad, activation)


@kernel_test
@every_activation
def test_an_activation_takes_any_strides_and_alignment(activation):
    check_activation(*strided(DEVICE), activation)
    check_activation(*(misaligned(shape, DEVICE) for shape in ((3, 64), (64,), (3, 64))), activation)


@kernel_test
@every_activation
def test_an_activation_passes_nan_and_is_relu_far_from_zero(activation):
    far = torch.tensor([-3e38, -1e30, -1e4, -100.0, 100.0, 1e4, 1e9], device=DEVICE)
    y = kernel.forward(far, None, activation)
    grad_x, _ = kernel.backward(torch.ones_like(far), far, None, activation, False)
    power = 2 if activation == "squared_relu" else 1
    torch.testing.assert_close(y, far.clamp_min(0) ** power)
    torch.testing.assert_close(grad_x, power * far.clamp_min(0) ** (power - 1) * (far > 0))
    nan = torch.full((9,), torch.nan, device=DEVICE)
    assert kernel.forward(nan, None, activation).isnan().all()
    assert activation == "relu" or kernel.backward(nan, nan, None, activation, False)[0].isnan().all()


@kernel_test
@every_activation
def test_a_bias_gradient_sums_many_tiles_in_a_fixed_order(activation, monkeypatch):
    monkeypatch.setattr(kernel_sums, "count_multiprocessors", lambda device: 1)
    x, bias, grad = random_input((70, 264), torch.float32)
    check_activation(x, bias, grad, activation)
    first, second = (kernel.backward(grad, x, bias, activation, True)[1] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.gpu
def test_an_activation_addresses_more_than_two_billion_elements():
    x = torch.zeros(2**31 // 4096 + 9, 4096, dtype=torch.bfloat16, device="cuda")
    x[-9:] = torch.randn(9, 4096)
    y, bits = kernel.forward_with_bits(x, None, "gelu_tanh", -0.75)
    last = kernel.forward_with_bits(x[-9:].clone(), None, "gelu_tanh", -0.75)
    assert torch.equal(y[-9:], last[0]) and torch.equal(bits[-9 * 512 :], last[1]) and not y[:-9].any()
    grad_x, _ = kernel.backward(torch.ones_like(y), x, None, "gelu_tanh", False)
    ones = torch.ones_like(last[0])
    assert torch.equal(grad_x[-9:], kernel.backward(ones, x[-9:].clone(), None, "gelu_tanh", False)[0])


@kernel_test
def test_float64_is_refused_where_kernels_run():
    with pytest.raises(ValueError, match="gelu: x is torch.float64; expected float32, float16 or bfloat16"):
        kernel.forward(torch.ones(8, dtype=torch.float64, device=DEVICE), None, "gelu")


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_gelus_left_tail_is_rounded_as_the_exact_one_to_one_unit(dtype):
    x = torch.linspace(-5.5, 0, 4001).to(dtype)
    exact = torch.nn.functional.gelu(x.double())
    y = kernel.forward(x.to(DEVICE), None, "gelu").cpu().double()
    # A quarter of a unit more than rounding alone, and float16's subnormal numbers are all one unit apart.
    limits = torch.finfo(dtype)
    unit = torch.ldexp(torch.full_like(exact, limits.eps), torch.frexp(exact)[1] - 1)
    unit = unit.clamp_min(limits.tiny * limits.eps)
    assert ((y - exact).abs() <= 0.76 * unit).all()
    infinite = kernel.forward(torch.tensor([-torch.inf, torch.inf], dtype=dtype, device=DEVICE), None, "gelu")
    assert infinite.tolist() == [0, torch.inf]

"""The Triton kernels of activations against their specification: see interpreted.py for where they run."""

from __future__ import annotations

import pytest
import torch
from activation_cases import ACTIVATIONS, every_number, misaligned, over_the_range, strided
from covering import parametrize_covering
from gelu_inputs import ACTIVATION, FORMS, exact_derivative, floor_of, inputs, minimum_of
from interpreted import DEVICE, DTYPES, assert_as_specified, check_backward, check_many_tiles, kernel_test
from witness import ulp

from tempo_kernels.activation import ACTIVATIONS as TABLE
from tempo_kernels.activation import eager, kernel

# The interpreter computes with NumPy, which warns where exp(-x) is infinite and its reciprocal, the result, is 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning")
SHAPES = [(3, 2, 768), (5, 1000), (9, 33), (1, 1), (2, 2049), (40, 8), (0, 16), (3, 0)]
INPLACE = [name for name, row in TABLE.items() if row.slope_of_output is not None]
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
gated_or_not = {"plain": False, "gated": True}


def check(x, bias, grad, activation, is_gated=False):
    y = kernel.forward(x, bias, activation, is_gated)
    assert_as_specified([y], [x, bias], lambda *t: [eager.forward(*t, activation, is_gated)], "y")
    if bias is not None and TABLE[activation].rounds_sum and not is_gated:
        assert torch.equal(y, kernel.forward(x + bias, None, activation)), "the sum is rounded as torch rounds it"
    again = torch.full_like(y, torch.nan)
    assert kernel.forward(x, bias, activation, is_gated, again) is again and torch.equal(again, y)
    check_backward(kernel.backward, eager.backward, [grad, x, bias], activation, is_gated)


def check_inplace(x, bias, grad, activation):
    """In place, where each backend's backward is given the same y and bits."""
    y, bits = kernel.forward_inplace(x, bias, activation)
    specified, expected = eager.forward_inplace(x.cpu(), None if bias is None else bias.cpu(), activation)
    assert torch.equal(y, kernel.forward(x, bias, activation)) and (bits is None) == (expected is None)
    assert bits is None or torch.equal(bits.cpu(), expected)
    kept = [None if t is None else t.to(DEVICE) for t in (specified, expected)]
    check_backward(kernel.backward_inplace, eager.backward_inplace, [grad, *kept], activation)


def random_input(shape, dtype, is_gated=False):
    """x, twice as wide where it is gated, bias and grad."""
    *rows, width = shape
    x = (torch.rand(*rows, width * (1 + is_gated), device=DEVICE) * 16 - 8).to(dtype)
    # Not all in the left tail, where GELU' is below what an erf in float32 is off by, here 0 and there 6e-8.
    x.view(-1)[:1] = 1.5
    return x, *(torch.randn(size, device=DEVICE).to(dtype) for size in (x.size(-1), shape))


@kernel_test
@parametrize_covering(each={"dtype": DTYPES, "activation": ACTIVATIONS.keys()}, is_gated=gated_or_not)
def test_an_activation_does_over_the_range_what_is_specified(dtype, activation, is_gated):
    x = over_the_range(101, 40, is_gated=is_gated).to(DEVICE, dtype)
    check(x, None, torch.randn(101, 40, device=DEVICE).to(dtype), activation, is_gated)


@kernel_test
@parametrize_covering(each={"shape": SHAPES, "activation": ACTIVATIONS.keys()}, dtype=DTYPES, is_gated=gated_or_not)
def test_an_activation_does_what_is_specified_for_any_shape(shape, dtype, activation, is_gated):
    x, bias, grad = random_input(shape, dtype, is_gated)
    check(x, bias, grad, activation, is_gated)
    check(x, None, grad, activation, is_gated)


@kernel_test
@parametrize_covering(each={"shape": SHAPES}, dtype=DTYPES, activation=INPLACE)
def test_an_activation_in_place_does_what_is_specified_for_any_shape(shape, dtype, activation):
    x, bias, grad = random_input(shape, dtype)
    check_inplace(x, bias, grad, activation)
    check_inplace(x, None, grad, activation)


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squared_relus_gradient_from_the_output_is_that_from_the_input_for_every_number(dtype):
    x = every_number(dtype).to(DEVICE)
    y, grad = kernel.forward(x, None, "squared_relu"), torch.randn(x.numel(), device=DEVICE).to(dtype)
    assert torch.equal(y.cpu(), eager.forward(x.cpu(), None, "squared_relu"))
    found = kernel.backward_inplace(grad, y, None, "squared_relu", False)[0]
    assert torch.equal(found, kernel.backward(grad, x, None, "squared_relu", False, False)[0])
    assert torch.equal(found.cpu(), eager.backward_inplace(grad.cpu(), y.cpu(), None, "squared_relu", False)[0])


@kernel_test
def test_strides_and_alignment_do_not_matter():
    x, bias, grad = strided(DEVICE)
    for activation in ACTIVATIONS:
        check(x, bias, grad, activation)
        check(*(misaligned(shape, DEVICE) for shape in ((3, 64), (64,), (3, 64))), activation)
    check(x, bias, grad[:, ::2], "silu", True)
    check(*(misaligned(shape, DEVICE) for shape in ((3, 64), (64,), (3, 32))), "gelu", True)
    for activation in INPLACE:
        check_inplace(x, bias, grad, activation)
        check_inplace(misaligned((3, 64), DEVICE), None, misaligned((3, 64), DEVICE), activation)


@kernel_test
@every_activation
def test_an_activation_passes_nan_and_is_relu_far_from_zero(activation):
    far = torch.tensor([-3e38, -1e30, -1e4, -100.0, 100.0, 1e4, 1e9], device=DEVICE)
    power = 2 if activation == "squared_relu" else 1
    value, slope = far.clamp_min(0) ** power, power * far.clamp_min(0) ** (power - 1) * (far > 0)
    torch.testing.assert_close(kernel.forward(far, None, activation), value)
    one = torch.ones_like(far)
    torch.testing.assert_close(kernel.backward(one, far, None, activation, False, False)[0], slope)
    nan = torch.full((9,), torch.nan, device=DEVICE)
    assert kernel.forward(nan, None, activation).isnan().all()
    assert activation == "relu" or kernel.backward(nan, nan, None, activation, False, False)[0].isnan().all()

    x = torch.stack([far, one], dim=1)
    torch.testing.assert_close(kernel.forward(x, None, activation, True)[:, 0], value)
    grad_x, _ = kernel.backward(one[:, None], x, None, activation, True, True)
    torch.testing.assert_close(grad_x, torch.stack([slope, value], dim=1))
    nan = torch.tensor([[torch.nan, 1.0], [1.0, torch.nan]], device=DEVICE)
    assert kernel.forward(nan, None, activation, True).isnan().all()
    assert kernel.backward(one[:2, None], nan, None, activation, True, False)[0][[0, 1], [1, 0]].isnan().all()


@kernel_test
def test_squared_relu_passes_infinity_and_nan():
    x = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), -1.0], device=DEVICE)
    y, expected = (module.forward(t, None, "squared_relu") for module, t in ((kernel, x), (eager, x.cpu())))
    torch.testing.assert_close(y.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    found = kernel.backward_inplace(torch.ones_like(x), y, None, "squared_relu", False)[0]
    assert found[2] == torch.inf and found[4].isnan() and not found[[0, 1, 3, 5]].any()


SUMMED = {
    "recompute": (lambda *t: check(*t, "gelu"), lambda x, b, g: kernel.backward(g, x, b, "gelu", False, True)[1]),
    "gated": (lambda *t: check(*t, "silu", True), lambda x, b, g: kernel.backward(g, x, b, "silu", True, True)[1]),
    "inplace": (
        lambda *t: check_inplace(*t, "gelu"),
        lambda x, b, g: kernel.backward_inplace(g, *kernel.forward_inplace(x, b, "gelu"), "gelu", True)[1],
    ),
}


@kernel_test
@pytest.mark.parametrize("form", SUMMED)
def test_a_bias_gradient_sums_many_tiles_in_a_fixed_order(form, monkeypatch):
    check_many_tiles(
        monkeypatch, SUMMED[form][0], random_input((70, 264), torch.float32, form == "gated"), SUMMED[form][1]
    )


@kernel_test
def test_what_kernels_do_not_compute_is_refused():
    with pytest.raises(ValueError, match="x is torch.float64; expected float32, float16 or bfloat16"):
        kernel.forward(torch.ones(8, dtype=torch.float64, device=DEVICE), None, "gelu")
    long = torch.empty(1, 1 << 30, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match="a row of y has 1073741824 elements; expected fewer .*; divide each row"):
        kernel.forward(long, long[0], "gelu")


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


@kernel_test
@pytest.mark.parametrize("form", FORMS)
def test_gelus_derivative_of_16_bits_is_the_exact_one_rounded_once(form):
    x = torch.linspace(-4, 4, 2001).half()
    found, _ = kernel.backward(torch.ones_like(x, device=DEVICE), x.to(DEVICE), None, ACTIVATION[form], False, False)
    exact = exact_derivative(x, form)
    assert ((found.cpu().double() - exact).abs() <= 0.51 * torch.finfo(torch.float16).eps * exact.abs() + 1e-6).all()


@kernel_test
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelus_bits_are_right_at_the_minimum_and_its_neighbours(dtype, form):
    nearest = torch.tensor(minimum_of(form)).to(dtype).double()
    near = nearest + torch.arange(-20, 20) * ulp(nearest, dtype)
    x = torch.cat([near, torch.linspace(-8, 8, 24)]).to(DEVICE, dtype)
    for bias in (None, torch.zeros_like(x)):
        found, expected = (
            module.forward_inplace(t, None if bias is None else bias.to(t.device), ACTIVATION[form])
            for module, t in ((kernel, x), (eager, x.cpu()))
        )
        assert torch.equal(found[1].cpu(), expected[1])
    check_inplace(x, None, torch.ones_like(x), ACTIVATION[form])


@kernel_test
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelus_gradient_is_at_the_floor_that_the_computed_output_sets(dtype, form):
    x = inputs(form, dtype)[::7]
    y, bits = kernel.forward_inplace(x.to(DEVICE), None, ACTIVATION[form])
    grad_x, _ = kernel.backward_inplace(torch.ones_like(y), y, bits, ACTIVATION[form], False)
    error = (grad_x.cpu().double() - exact_derivative(x, form)).abs().max()
    assert error <= 1.2 * floor_of(x.double(), y.cpu(), form)


@kernel_test
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_is_right_at_zeros_infinity_nan_and_far_away(dtype, form):
    x = torch.tensor([0.0, -0.0, float("inf"), 30.0, 1e4, -30.0, -1e4, float("nan")], dtype=dtype, device=DEVICE)
    y, bits = kernel.forward_inplace(x, None, ACTIVATION[form])
    far = torch.tensor([0.0, -0.0, float("inf"), 30.0, 1e4, -0.0, -0.0, float("nan")], dtype=dtype)
    assert torch.equal(y.cpu().nan_to_num(7.0), far.nan_to_num(7.0)) and torch.equal(y.cpu().isnan(), far.isnan())
    grad_x, _ = kernel.backward_inplace(torch.ones_like(y), y, bits, ACTIVATION[form], False)
    expected = torch.tensor([0.5, 0.5, 1.0, 1.0, 1.0, 0.0, 0.0, float("nan")], dtype=dtype)
    torch.testing.assert_close(grad_x.cpu(), expected, rtol=0, atol=1e-5, equal_nan=True)

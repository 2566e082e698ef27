"""The Triton kernels of activations against their specification: see interpreted.py for where they run."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from activation_cases import ACTIVATIONS, every_number, misaligned, over_the_range, strided
from covering import parametrize_covering
from gelu_inputs import ACTIVATION, FORMS, exact_derivative, floor_of, inputs, minimum_of
from interpreted import DEVICE, DTYPES, assert_as_specified, check_backward, check_many_tiles, kernel_test
from witness import ulp

from tempo_kernels.activation import ACTIVATIONS as TABLE
from tempo_kernels.activation import eager, kernel
from tempo_kernels.kernel_sums import add_up

# The interpreter computes with NumPy, which warns where exp(-x) is infinite and its reciprocal, the result, is 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning")
SHAPES = [(3, 2, 768), (5, 1000), (9, 33), (1, 1), (2, 2049), (40, 8), (0, 16), (3, 0)]
INPLACE = [name for name, row in TABLE.items() if row.slope_of_output is not None]
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def check(x, bias, grad, activation, form="recompute"):
    y, _ = kernel.forward(x, bias, activation, form)
    assert_as_specified([y], [x, bias], lambda *t: eager.forward(*t, activation, form)[:1], "y")
    if bias is not None and TABLE[activation].rounds_sum and form == "recompute":
        summed, _ = kernel.forward(x + bias, None, activation, form)
        assert torch.equal(y, summed), "the sum is rounded as torch rounds it"
    again = torch.full_like(y, torch.nan)
    assert kernel.forward(x, bias, activation, form, again)[0] is again and torch.equal(again, y)
    check_backward(kernel.backward, eager.backward, [grad, x, bias, None], activation, form)


def check_inplace(x, bias, grad, activation):
    """In place, where each backend's backward is given the same y and bits."""
    y, bits = kernel.forward(x, bias, activation, "inplace")
    specified, expected = eager.forward(x.cpu(), None if bias is None else bias.cpu(), activation, "inplace")
    alone, _ = kernel.forward(x, bias, activation, "recompute")
    assert torch.equal(y, alone) and (bits is None) == (expected is None)
    assert bits is None or torch.equal(bits.cpu(), expected)
    expected = None if expected is None else expected.to(DEVICE)
    kept = [specified.to(DEVICE), None, expected]
    check_backward(kernel.backward, eager.backward, [grad, *kept], activation, "inplace")


def random_input(shape, dtype, form="recompute"):
    """x, twice as wide where it is gated, bias and grad."""
    *rows, width = shape
    x = (torch.rand(*rows, width * (1 + (form == "gated")), device=DEVICE) * 16 - 8).to(dtype)
    # Not all in the left tail, where GELU' is below what an erf in float32 is off by, here 0 and there 6e-8.
    x.view(-1)[:1] = 1.5
    return x, *(torch.randn(size, device=DEVICE).to(dtype) for size in (x.size(-1), shape))


@kernel_test
@parametrize_covering(each={"dtype": DTYPES, "activation": ACTIVATIONS.keys()}, form=["recompute", "gated"])
def test_an_activation_does_over_the_range_what_is_specified(dtype, activation, form):
    x = over_the_range(101, 40, is_gated=form == "gated").to(DEVICE, dtype)
    check(x, None, torch.randn(101, 40, device=DEVICE).to(dtype), activation, form)


@kernel_test
@parametrize_covering(
    each={"shape": SHAPES, "activation": ACTIVATIONS.keys()}, dtype=DTYPES, form=["recompute", "gated"]
)
def test_an_activation_does_what_is_specified_for_any_shape(shape, dtype, activation, form):
    x, bias, grad = random_input(shape, dtype, form)
    check(x, bias, grad, activation, form)
    check(x, None, grad, activation, form)


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
    grad, inplace = torch.randn(x.numel(), device=DEVICE).to(dtype), (None, None, "squared_relu", "inplace", False)
    y, _ = kernel.forward(x, None, "squared_relu", "recompute")
    assert torch.equal(y.cpu(), eager.forward(x.cpu(), None, "squared_relu", "recompute")[0])
    found, _ = kernel.backward(grad, y, *inplace)
    assert torch.equal(found, kernel.backward(grad, x, None, None, "squared_relu", "recompute", False)[0])
    assert torch.equal(found.cpu(), eager.backward(grad.cpu(), y.cpu(), *inplace)[0])


@kernel_test
def test_strides_and_alignment_do_not_matter():
    x, bias, grad = strided(DEVICE)
    for activation in ACTIVATIONS:
        check(x, bias, grad, activation)
        check(*(misaligned(shape, DEVICE) for shape in ((3, 64), (64,), (3, 64))), activation)
    check(x, bias, grad[:, ::2], "silu", "gated")
    check(*(misaligned(shape, DEVICE) for shape in ((3, 64), (64,), (3, 32))), "gelu", "gated")
    for activation in INPLACE:
        check_inplace(x, bias, grad, activation)
        check_inplace(misaligned((3, 64), DEVICE), None, misaligned((3, 64), DEVICE), activation)


@kernel_test
@every_activation
def test_an_activation_passes_nan_and_is_relu_far_from_zero(activation):
    far = torch.tensor([-3e38, -1e30, -1e4, -100.0, 100.0, 1e4, 1e9], device=DEVICE)
    power = 2 if activation == "squared_relu" else 1
    value, slope = far.clamp_min(0) ** power, power * far.clamp_min(0) ** (power - 1) * (far > 0)
    plain, gated = ((None, activation, form) for form in ("recompute", "gated"))
    torch.testing.assert_close(kernel.forward(far, *plain)[0], value)
    one = torch.ones_like(far)
    torch.testing.assert_close(kernel.backward(one, far, None, *plain, False)[0], slope)
    nan = torch.full((9,), torch.nan, device=DEVICE)
    assert kernel.forward(nan, *plain)[0].isnan().all()
    assert activation == "relu" or kernel.backward(nan, nan, None, *plain, False)[0].isnan().all()

    x = torch.stack([far, one], dim=1)
    torch.testing.assert_close(kernel.forward(x, *gated)[0][:, 0], value)
    grad_x, _ = kernel.backward(one[:, None], x, None, *gated, True)
    torch.testing.assert_close(grad_x, torch.stack([slope, value], dim=1))
    nan = torch.tensor([[torch.nan, 1.0], [1.0, torch.nan]], device=DEVICE)
    assert kernel.forward(nan, *gated)[0].isnan().all()
    assert kernel.backward(one[:2, None], nan, None, *gated, False)[0][[0, 1], [1, 0]].isnan().all()


@kernel_test
def test_squared_relu_passes_infinity_and_nan():
    x = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), -1.0], device=DEVICE)
    (y, _), (expected, _) = (
        module.forward(t, None, "squared_relu", "inplace") for module, t in ((kernel, x), (eager, x.cpu()))
    )
    torch.testing.assert_close(y.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    found = kernel.backward(torch.ones_like(x), y, None, None, "squared_relu", "inplace", False)[0]
    assert found[2] == torch.inf and found[4].isnan() and not found[[0, 1, 3, 5]].any()


@kernel_test
@pytest.mark.parametrize("form", ["recompute", "gated", "inplace"])
def test_a_bias_gradient_sums_many_tiles_in_a_fixed_order(form, monkeypatch):
    def grad_bias_of(x, bias, grad):
        y, bits = kernel.forward(x, bias, "gelu", form)
        kept = (y, None, bits) if form == "inplace" else (x, bias, None)
        return kernel.backward(grad, *kept, "gelu", form, True)[1]

    check_form = check_inplace if form == "inplace" else partial(check, form=form)
    inputs = random_input((70, 264), torch.float32, form)
    check_many_tiles(monkeypatch, partial(check_form, activation="gelu"), inputs, grad_bias_of)


@kernel_test
def test_what_kernels_do_not_compute_is_refused():
    with pytest.raises(ValueError, match="x is torch.float64; expected float32, float16 or bfloat16"):
        kernel.forward(torch.ones(8, dtype=torch.float64, device=DEVICE), None, "gelu", "recompute")
    long = torch.empty(1, 1 << 30, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match="a row of y has 1073741824 elements; expected fewer .*; divide each row"):
        kernel.forward(long, long[0], "gelu", "recompute")


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_gelus_left_tail_is_rounded_as_the_exact_one_to_one_unit(dtype):
    x = torch.linspace(-5.5, 0, 4001).to(dtype)
    exact = torch.nn.functional.gelu(x.double())
    y = kernel.forward(x.to(DEVICE), None, "gelu", "recompute")[0].cpu().double()
    # A quarter of a unit more than rounding alone, and float16's subnormal numbers are all one unit apart.
    limits = torch.finfo(dtype)
    unit = torch.ldexp(torch.full_like(exact, limits.eps), torch.frexp(exact)[1] - 1)
    unit = unit.clamp_min(limits.tiny * limits.eps)
    assert ((y - exact).abs() <= 0.76 * unit).all()
    infinite = torch.tensor([-torch.inf, torch.inf], dtype=dtype, device=DEVICE)
    assert kernel.forward(infinite, None, "gelu", "recompute")[0].tolist() == [0, torch.inf]


@kernel_test
@pytest.mark.parametrize("form", FORMS)
def test_gelus_derivative_of_16_bits_is_the_exact_one_rounded_once(form):
    x = torch.linspace(-4, 4, 2001).half()
    operands = torch.ones_like(x, device=DEVICE), x.to(DEVICE), None, None
    found, _ = kernel.backward(*operands, ACTIVATION[form], "recompute", False)
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
        check_inplace(x, bias, torch.ones_like(x), ACTIVATION[form])


@kernel_test
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelus_gradient_is_at_the_floor_that_the_computed_output_sets(dtype, form):
    x = inputs(form, dtype)[::7]
    y, bits = kernel.forward(x.to(DEVICE), None, ACTIVATION[form], "inplace")
    grad_x, _ = kernel.backward(torch.ones_like(y), y, None, bits, ACTIVATION[form], "inplace", False)
    error = (grad_x.cpu().double() - exact_derivative(x, form)).abs().max()
    assert error <= 1.2 * floor_of(x.double(), y.cpu(), form)


@kernel_test
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_is_right_at_zeros_infinity_nan_and_far_away(dtype, form):
    x = torch.tensor([0.0, -0.0, float("inf"), 30.0, 1e4, -30.0, -1e4, float("nan")], dtype=dtype, device=DEVICE)
    y, bits = kernel.forward(x, None, ACTIVATION[form], "inplace")
    far = torch.tensor([0.0, -0.0, float("inf"), 30.0, 1e4, -0.0, -0.0, float("nan")], dtype=dtype)
    assert torch.equal(y.cpu().nan_to_num(7.0), far.nan_to_num(7.0)) and torch.equal(y.cpu().isnan(), far.isnan())
    grad_x, _ = kernel.backward(torch.ones_like(y), y, None, bits, ACTIVATION[form], "inplace", False)
    expected = torch.tensor([0.5, 0.5, 1.0, 1.0, 1.0, 0.0, 0.0, float("nan")], dtype=dtype)
    torch.testing.assert_close(grad_x.cpu(), expected, rtol=0, atol=1e-5, equal_nan=True)


@kernel_test
@pytest.mark.parametrize("shape", [(1, 1, 64), (1, 7, 100), (2, 16, 128), (2, 50, 130)], ids=str)
def test_rows_are_added_up_in_one_order_and_rounded_once(shape):
    partial = torch.randn(shape, device=DEVICE) * torch.logspace(-3, 3, shape[1], device=DEVICE)[:, None]
    found, again, rounded = (add_up(partial, dtype, 1024, 4) for dtype in [torch.float32] * 2 + [torch.bfloat16])
    torch.testing.assert_close(
        found.double(), partial.double().sum(1), rtol=0, atol=1e-6 * partial.abs().sum(1).max().item()
    )
    assert torch.equal(again, found) and torch.equal(rounded, found.bfloat16())

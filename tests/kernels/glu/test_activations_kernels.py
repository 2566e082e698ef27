"""The Triton kernels of activations, gated or not, against their specification: see interpreted.py for where they run.

Of more than 2**31 elements they are held against it in test_large_tensors.py.
"""

from __future__ import annotations

import functools

import pytest
import torch
from covering import parametrize_covering
from gelu_inputs import ACTIVATION, FORMS, exact_derivative, floor_of, inputs, minimum_of
from interpreted import DEVICE, DTYPES, assert_as_specified, check_backward, check_many_tiles, kernel_test
from pointwise_activations import ACTIVATIONS, every_number, misaligned, over_the_range, strided
from witness import ulp

from tempo_kernels.activation import eager, kernel
from tempo_kernels.gelu import eager as gelu_eager
from tempo_kernels.gelu import kernel as gelu_kernel
from tempo_kernels.gelu.inverse import INVERSES
from tempo_kernels.glu import eager as glu_eager
from tempo_kernels.glu import kernel as glu_kernel
from tempo_kernels.squared_relu import eager as square_eager
from tempo_kernels.squared_relu import kernel as square_kernel

# The interpreter computes with NumPy, which warns where exp(-x) is infinite and its reciprocal, the result, is 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning")
SHAPES = [(3, 2, 768), (5, 1000), (9, 33), (1, 1), (2, 2049), (40, 8), (0, 16), (3, 0)]
GATES = ["silu", "gelu", "gelu_tanh", "relu"]
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
every_gate = pytest.mark.parametrize("activation", GATES)


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
    check_backward(kernel, eager, [grad, x, bias], activation)


def check_glu(x, bias, grad, activation):
    y = glu_kernel.forward(x, bias, activation)
    assert_as_specified([y], [x, bias], lambda *t: [glu_eager.forward(*t, activation)], "y")
    again = torch.full_like(y, torch.nan)
    assert glu_kernel.forward(x, bias, activation, again) is again and torch.equal(again, y)
    check_backward(glu_kernel, glu_eager, [grad, x, bias], activation)


def check_root(y, grad):
    """Squared ReLU's backward from its output, a square."""
    check_backward(square_kernel, square_eager, [grad, y])


def forward_gelu(module, x, bias, form):
    """y and the bits that GELU's backward from its output takes."""
    return module.forward_with_bits(x, bias, ACTIVATION[form], INVERSES[form].x_min)


def check_gelu(x, grad, form="none"):
    """GELU's backward from its output, where each backend is given the same y and bits."""
    kept = [t.to(x.device) for t in forward_gelu(eager, x.cpu(), None, form)]
    check_backward(gelu_kernel, gelu_eager, [grad, *kept], form)


def random_input(shape, dtype, is_gated=False):
    """x, twice as wide where it is gated, bias and grad."""
    *rows, width = shape
    x = (torch.rand(*rows, width * (1 + is_gated), device=DEVICE) * 16 - 8).to(dtype)
    # Not all in the left tail, where GELU' is below what an erf in float32 is off by, here 0 and there 6e-8.
    x.view(-1)[:1] = 1.5
    return x, *(torch.randn(size, device=DEVICE).to(dtype) for size in (x.size(-1), shape))


@kernel_test
@parametrize_covering(each={"dtype": DTYPES, "activation": ACTIVATIONS.keys()})
def test_an_activation_does_over_the_range_what_is_specified(dtype, activation):
    x = over_the_range().to(DEVICE, dtype)
    check_activation(x, None, torch.randn(x.shape, device=DEVICE).to(dtype), activation)


@kernel_test
@parametrize_covering(each={"dtype": DTYPES, "activation": GATES})
def test_glu_does_over_the_range_what_is_specified(dtype, activation):
    x = over_the_range(101, 40, is_gated=True).to(DEVICE, dtype)
    check_glu(x, None, torch.randn(101, 40, device=DEVICE).to(dtype), activation)


@kernel_test
@parametrize_covering(each={"shape": SHAPES}, dtype=DTYPES, activation=ACTIVATIONS.keys())
def test_an_activation_does_what_is_specified_for_any_shape(shape, dtype, activation):
    x, bias, grad = random_input(shape, dtype)
    check_activation(x, bias, grad, activation)
    check_activation(x, None, grad, activation)


@kernel_test
@parametrize_covering(each={"shape": SHAPES, "activation": GATES}, dtype=DTYPES)
def test_glu_does_what_is_specified_for_any_shape(shape, dtype, activation):
    x, bias, grad = random_input(shape, dtype, is_gated=True)
    check_glu(x, bias, grad, activation)
    check_glu(x, None, grad, activation)


FROM_OUTPUT = {
    "squared_relu": lambda x, grad: check_root(x.clamp_min(0).square(), grad),
    **{f"gelu {form}": functools.partial(check_gelu, form=form) for form in FORMS},
}


@kernel_test
@parametrize_covering(each={"shape": SHAPES}, dtype=DTYPES, check=FROM_OUTPUT)
def test_a_gradient_from_the_output_is_what_is_specified_for_any_shape(shape, dtype, check):
    x, _, grad = random_input(shape, dtype)
    check(x, grad)


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squared_relus_gradient_from_the_output_is_that_from_the_input_for_every_number(dtype):
    x = every_number(dtype).to(DEVICE)
    y, grad = kernel.forward(x, None, "squared_relu"), torch.randn(x.numel(), device=DEVICE).to(dtype)
    assert torch.equal(y.cpu(), eager.forward(x.cpu(), None, "squared_relu"))
    found = square_kernel.backward(grad, y, False)[0]
    assert torch.equal(found, kernel.backward(grad, x, None, "squared_relu", False)[0])
    assert torch.equal(found.cpu(), square_eager.backward(grad.cpu(), y.cpu(), False)[0])


@kernel_test
def test_strides_and_alignment_do_not_matter():
    x, bias, grad = strided(DEVICE)
    for activation in ACTIVATIONS:
        check_activation(x, bias, grad, activation)
        check_activation(*(misaligned(shape, DEVICE) for shape in ((3, 64), (64,), (3, 64))), activation)
    check_glu(x, bias, grad[:, ::2], "silu")
    check_glu(*(misaligned(shape, DEVICE) for shape in ((3, 64), (64,), (3, 32))), "gelu")
    check_root(x.abs().contiguous(), grad)
    check_root(misaligned((3, 64), DEVICE).abs_(), misaligned((3, 64), DEVICE))
    for form in FORMS:
        check_gelu(x, grad, form)
        check_gelu(misaligned((3, 64), DEVICE), misaligned((3, 64), DEVICE), form)


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
@every_gate
def test_glu_passes_nan_and_is_finite_far_from_zero(activation):
    far = torch.tensor([-3e38, -1e30, -1e4, -100.0, 100.0, 1e4, 1e30], device=DEVICE)
    x, one = torch.stack([far, torch.ones_like(far)], dim=1), torch.ones(7, 1, device=DEVICE)
    torch.testing.assert_close(glu_kernel.forward(x, None, activation)[:, 0], far.clamp(min=0))
    grad_x, _ = glu_kernel.backward(one, x, None, activation, True)
    torch.testing.assert_close(grad_x, torch.stack([(far > 0).float(), far.clamp(min=0)], dim=1))
    nan = torch.tensor([[torch.nan, 1.0], [1.0, torch.nan]], device=DEVICE)
    assert glu_kernel.forward(nan, None, activation).isnan().all()
    assert glu_kernel.backward(one[:2], nan, None, activation, False)[0][[0, 1], [1, 0]].isnan().all()


@kernel_test
def test_squared_relu_passes_infinity_and_nan():
    x = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), -1.0], device=DEVICE)
    y, expected = (module.forward(t, None, "squared_relu") for module, t in ((kernel, x), (eager, x.cpu())))
    torch.testing.assert_close(y.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    found = square_kernel.backward(torch.ones_like(x), y, False)[0]
    assert found[2] == torch.inf and found[4].isnan() and not found[[0, 1, 3, 5]].any()


SUMMED = {
    "gelu": (lambda *t: check_activation(*t, "gelu"), lambda x, b, g: kernel.backward(g, x, b, "gelu", True)[1]),
    "swiglu": (lambda *t: check_glu(*t, "silu"), lambda x, b, g: glu_kernel.backward(g, x, b, "silu", True)[1]),
    "root": (lambda y, _, g: check_root(y * y, g), lambda y, _, g: square_kernel.backward(g, y * y, True)[1]),
    "gelu from its output": (
        lambda x, _, g: check_gelu(x, g),
        lambda x, _, g: gelu_kernel.backward(g, *forward_gelu(kernel, x, None, "none"), "none", True)[1],
    ),
}


@kernel_test
@pytest.mark.parametrize("name", SUMMED)
def test_a_bias_gradient_sums_many_tiles_in_a_fixed_order(name, monkeypatch):
    """Of every kernel that sums one activation: which one makes no difference to the sums."""
    check_many_tiles(
        monkeypatch, SUMMED[name][0], random_input((70, 264), torch.float32, name == "swiglu"), SUMMED[name][1]
    )


@kernel_test
def test_float64_is_refused_where_kernels_run():
    x = torch.ones(8, dtype=torch.float64, device=DEVICE)
    for module, name in ((kernel, "gelu"), (glu_kernel, "silu")):
        with pytest.raises(ValueError, match="x is torch.float64; expected float32, float16 or bfloat16"):
            module.forward(x, None, name)


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
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelus_bits_are_right_at_the_minimum_and_its_neighbours(dtype, form):
    nearest = torch.tensor(minimum_of(form)).to(dtype).double()
    near = nearest + torch.arange(-20, 20) * ulp(nearest, dtype)
    x = torch.cat([near, torch.linspace(-8, 8, 24)]).to(DEVICE, dtype)
    for bias in (None, torch.zeros_like(x)):
        found, expected = (
            forward_gelu(module, t, None if bias is None else bias.to(t.device), form)
            for module, t in ((kernel, x), (eager, x.cpu()))
        )
        assert torch.equal(found[1].cpu(), expected[1])
    check_gelu(x, torch.ones_like(x), form)


@kernel_test
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelus_gradient_is_at_the_floor_that_the_computed_output_sets(dtype, form):
    x = inputs(form, dtype)[::7]
    y, bits = forward_gelu(kernel, x.to(DEVICE), None, form)
    grad_x, _ = gelu_kernel.backward(torch.ones_like(y), y, bits, form, False)
    error = (grad_x.cpu().double() - exact_derivative(x, form)).abs().max()
    assert error <= 1.2 * floor_of(x.double(), y.cpu(), form)


@kernel_test
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_is_right_at_zeros_infinity_nan_and_far_away(dtype, form):
    x = torch.tensor([0.0, -0.0, float("inf"), 30.0, 1e4, -30.0, -1e4, float("nan")], dtype=dtype, device=DEVICE)
    y, bits = forward_gelu(kernel, x, None, form)
    far = torch.tensor([0.0, -0.0, float("inf"), 30.0, 1e4, -0.0, -0.0, float("nan")], dtype=dtype)
    assert torch.equal(y.cpu().nan_to_num(7.0), far.nan_to_num(7.0)) and torch.equal(y.cpu().isnan(), far.isnan())
    grad_x, _ = gelu_kernel.backward(torch.ones_like(y), y, bits, form, False)
    expected = torch.tensor([0.5, 0.5, 1.0, 1.0, 1.0, 0.0, 0.0, float("nan")], dtype=dtype)
    torch.testing.assert_close(grad_x.cpu(), expected, rtol=0, atol=1e-5, equal_nan=True)

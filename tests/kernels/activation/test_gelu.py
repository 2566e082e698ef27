from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gelu_inputs import ACTIVATION, DTYPES, FORMS, exact_derivative, floor_of, inputs, minimum_of
from gelu_inverse_fit import fit
from torch import Tensor
from witness import kept_storages, outputs_and_gradients, ulp

from tempo_kernels.activation import cpu, inverse
from tempo_kernels.gelu import gelu

# Largest error of GELU' over [-8, 8] where an exact inverse is given y rounded to the dtype: what no method can better.
FLOORS = {
    ("none", torch.float32): 4.78e-5,
    ("none", torch.float16): 6.6e-3,
    ("none", torch.bfloat16): 1.56e-2,
    ("tanh", torch.float32): 5.14e-5,
    ("tanh", torch.float16): 7.1e-3,
    ("tanh", torch.bfloat16): 1.33e-2,
}


def packed(flags: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(flags.numpy()))


def slopes(y: Tensor, bits: Tensor, form: str) -> Tensor:
    return cpu.backward(torch.ones_like(y), y, None, bits, ACTIVATION[form], "inplace", False)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_derivative_from_a_rounded_or_computed_output_is_at_the_floor_of_an_exact_inverse(form, dtype, nan_poison):
    x = inputs(form)
    y = F.gelu(x, approximate=form).to(dtype)
    floor = floor_of(x, y, form)
    torch.testing.assert_close(floor.item(), FLOORS[form, dtype], rtol=0.02, atol=0)
    found = slopes(y, packed(x >= minimum_of(form)), form)
    assert (found.double() - exact_derivative(x, form)).abs().max() <= 1.2 * floor
    x = inputs(form, dtype)
    y, grad_x = outputs_and_gradients(lambda t: gelu(t, None, form), [x], torch.ones_like(x), dtype)
    assert (grad_x.double() - exact_derivative(x, form)).abs().max() <= 1.2 * floor_of(x.double(), y, form)


@pytest.mark.parametrize("form", FORMS)
def test_formula_errs_away_from_the_minimum_by_no_more_than_is_recorded(form):
    x = inputs(form)
    x = x[(x - minimum_of(form)).abs() > 0.05]
    y = F.gelu(x, approximate=form).float()
    found = slopes(y, packed(x >= minimum_of(form)), form)
    assert (found.double() - exact_derivative(x, form)).abs().max() <= inverse.INVERSES[
        ACTIVATION[form]
    ].fit_error + 2e-6


@pytest.mark.parametrize("form", FORMS)
def test_a_fresh_fit_is_no_better_than_the_coefficients_in_use(form):
    fresh, used = fit(ACTIVATION[form]), inverse.INVERSES[ACTIVATION[form]]
    assert fresh.x_min == pytest.approx(minimum_of(form), abs=1e-15)
    assert (fresh.x_min, fresh.y_min, fresh.root_zero) == (used.x_min, used.y_min, used.root_zero)
    assert fresh.y_min_low == pytest.approx(used.y_min_low, rel=1e-6)
    assert used.fit_error <= 1.1 * fresh.fit_error


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_bits_say_which_inputs_are_at_or_right_of_the_minimum(form, dtype):
    x_min = torch.tensor(minimum_of(form))
    nearest = x_min.to(dtype).double()
    steps = torch.arange(-20, 21) * ulp(nearest, dtype)
    x = torch.cat([(nearest + steps).to(dtype), torch.randn(90).to(dtype)])
    _, bits = cpu.forward(x, None, ACTIVATION[form], "inplace")
    unpacked = torch.from_numpy(np.unpackbits(bits.numpy()))
    assert torch.equal(unpacked[: x.numel()] == 1, x.double() >= minimum_of(form))
    assert bits.numel() == (x.numel() + 7) // 8 and not unpacked[x.numel() :].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_gradient_is_right_at_the_minimum_zeros_infinity_and_far_away(form, dtype):
    nearest = torch.tensor(minimum_of(form)).to(dtype).double()
    near = (nearest + torch.tensor([-1.0, 0.0, 1.0]) * ulp(nearest, dtype)).tolist()
    x = torch.tensor([*near, 0.0, -0.0, float("inf"), 30.0, 1e4, -30.0, -1e4, float("nan")], dtype=dtype)
    y, grad = outputs_and_gradients(lambda t: gelu(t, None, form), [x], torch.ones_like(x), dtype)
    torch.testing.assert_close(y, F.gelu(x, approximate=form), rtol=0, atol=0, equal_nan=True)
    floor = max(FLOORS[form, dtype], floor_of(x[:3].double(), y[:3], form).item())
    assert (grad[:3].double() - exact_derivative(x[:3], form)).abs().max() <= 1.2 * floor
    expected = torch.tensor([0.5, 0.5, 1.0, 1.0, 1.0, 0.0, 0.0, float("nan")], dtype=dtype)
    expected[y[3:].isnan()] = float("nan")  # torch's own GELU of inf is nan on some processors
    torch.testing.assert_close(grad[3:], expected, rtol=0, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_extreme_outputs_give_finite_gradients_and_nan_stays(form, dtype):
    tiny = torch.finfo(dtype).smallest_normal
    below = -0.5  # no GELU is as low: a rounded minimum must not give nan either
    right = torch.tensor([float("inf"), 1e4, 0.0, -0.0, below, float("nan"), tiny, -float("nan")], dtype=dtype)
    left = torch.tensor([0.0, -0.0, -tiny, below, float("nan"), -tiny, -tiny, -tiny], dtype=dtype)
    found = torch.stack([slopes(y, packed(torch.full((8,), y is right)), form) for y in (right, left)])
    expected = torch.tensor(
        [[1, 1, 0.5, 0.5, 0, float("nan"), 0.5, float("nan")], [0, 0, 0, 0, float("nan"), 0, 0, 0]], dtype=dtype
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3 if dtype == torch.float16 else 3e-5, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
def test_float64_is_exact_away_from_the_minimum(form):
    x = torch.cat([torch.linspace(-6, -0.9, 20), torch.linspace(-0.6, 6, 20)]).double().requires_grad_()
    (grad_x,) = torch.autograd.grad(gelu(x, None, form).sum(), x)
    torch.testing.assert_close(grad_x, exact_derivative(x, form), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 17), (64, 128)], ids=str)
def test_keeps_the_output_that_the_next_linear_keeps_and_one_bit_per_element(shape, dtype):
    x = torch.randn(shape).to(dtype).requires_grad_()
    bias = torch.randn(shape[-1]).to(dtype).requires_grad_()
    for form in FORMS:
        outputs = []
        kept = kept_storages(lambda form=form, outputs=outputs: outputs.append(gelu(x, bias, form)) or outputs[0])
        assert kept.pop(outputs[0].data_ptr()) == x.nbytes and list(kept.values()) == [(x.numel() + 7) // 8]
    with torch.no_grad():
        assert kept_storages(lambda: gelu(x, bias)) == {}


def test_a_changed_output_is_refused():
    y = gelu(torch.randn(6, requires_grad=True))
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()

"""Gated linear units' Triton kernels against their specification: see interpreted.py for where they run."""

from __future__ import annotations

import pytest
import torch
from glu_inputs import ACTIVATIONS, over_the_range
from interpreted import DEVICE, DTYPES, assert_as_specified, kernel_test, round_sums
from pointwise_activations import misaligned, strided

from tempo_kernels.glu import eager, kernel
from tempo_kernels.pointwise import kernel_sums

# The interpreter computes with NumPy, which warns where x**2 is infinite and exp(-x**2), the result, is 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning")


def check_glu(x, bias, grad, activation):
    y = kernel.forward(x, bias, activation)
    assert_as_specified([y], [x, bias], lambda *t: [eager.forward(*t, activation)], "y")
    again = torch.full_like(y, torch.nan)
    assert kernel.forward(x, bias, activation, again) is again and torch.equal(again, y)
    tensors = [grad, x, bias]
    found = kernel.backward(*tensors, activation, True)
    assert_as_specified(
        found, tensors, lambda *t: round_sums(eager.backward(*t, activation, True)), "grad_x", "grad_bias"
    )
    alone, nothing = kernel.backward(*tensors, activation, False)
    assert torch.equal(alone, found[0]) and nothing is None


def random_input(shape, dtype):
    x = (torch.rand(shape, device=DEVICE) * 16 - 8).to(dtype)
    grad = torch.randn(*shape[:-1], shape[-1] // 2, device=DEVICE).to(dtype)
    return x, torch.randn(shape[-1], device=DEVICE).to(dtype), grad


@kernel_test
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_glu_of_ups_of_one_is_as_exact_as_torchs_activation(activation):
    gate = torch.linspace(-8, 8, 30_000, device=DEVICE).view(-1, 200)
    x = torch.cat([gate, torch.ones_like(gate)], dim=1)
    assert_as_specified([kernel.forward(x, None, activation)], [x], lambda t: [eager.forward(t, None, activation)], "y")


@kernel_test
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_glu_does_over_the_range_what_is_specified(dtype, activation):
    x = over_the_range(40).to(DEVICE, dtype)
    check_glu(x, None, torch.randn(101, 40, device=DEVICE).to(dtype), activation)


@kernel_test
@pytest.mark.parametrize(
    ("shape", "dtype", "activation"),
    [
        ((3, 2, 1536), torch.bfloat16, "silu"),
        ((5, 2000), torch.float16, "gelu"),
        ((9, 66), torch.float32, "gelu_tanh"),
        ((1, 2), torch.bfloat16, "relu"),
        ((2, 4098), torch.float16, "silu"),
        ((300, 16), torch.float32, "silu"),
        ((0, 16), torch.bfloat16, "silu"),
        ((3, 0), torch.bfloat16, "relu"),
    ],
    ids=str,
)
def test_glu_does_what_is_specified_for_any_shape(shape, dtype, activation):
    x, bias, grad = random_input(shape, dtype)
    check_glu(x, bias, grad, activation)
    check_glu(x, None, grad, activation)


@kernel_test
def test_glu_takes_any_strides_and_alignment():
    x, bias, grad = strided(DEVICE)
    check_glu(x, bias, grad[:, ::2], "silu")
    check_glu(*(misaligned(shape, DEVICE) for shape in ((3, 64), (64,), (3, 32))), "gelu")


@kernel_test
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_glu_passes_nan_and_is_finite_far_from_zero(activation):
    far = torch.tensor([-3e38, -1e30, -1e4, -100.0, 100.0, 1e4, 1e30], device=DEVICE)
    x = torch.stack([far, torch.ones_like(far)], dim=1)
    y, (grad_x, _) = (
        kernel.forward(x, None, activation),
        kernel.backward(far[:, None] * 0 + 1, x, None, activation, True),
    )
    torch.testing.assert_close(y[:, 0], far.clamp(min=0))
    torch.testing.assert_close(grad_x, torch.stack([(far > 0).float(), far.clamp(min=0)], dim=1))
    nan = torch.tensor([[torch.nan, 1.0], [1.0, torch.nan]], device=DEVICE)
    assert kernel.forward(nan, None, activation).isnan().all()
    assert (
        kernel.backward(torch.ones(2, 1, device=DEVICE), nan, None, activation, False)[0][[0, 1], [1, 0]].isnan().all()
    )


@kernel_test
def test_glus_bias_gradient_sums_many_tiles_in_a_fixed_order(monkeypatch):
    monkeypatch.setattr(kernel_sums, "count_multiprocessors", lambda device: 1)
    x, bias, grad = random_input((70, 528), torch.float32)
    check_glu(x, bias, grad, "silu")
    assert torch.equal(*(kernel.backward(grad, x, bias, "silu", True)[1] for _ in range(2)))


@pytest.mark.gpu
def test_glu_addresses_more_than_two_billion_elements():
    x = torch.zeros(2**31 // 4096 + 9, 4096, dtype=torch.bfloat16, device="cuda")
    x[-9:] = torch.randn(9, 4096)
    y = kernel.forward(x, None, "silu")
    assert torch.equal(y[-9:], kernel.forward(x[-9:].clone(), None, "silu")) and not y[:-9].any()
    grad_x, _ = kernel.backward(torch.ones_like(y), x, None, "silu", False)
    last = kernel.backward(torch.ones_like(y[-9:]), x[-9:].clone(), None, "silu", False)
    assert torch.equal(grad_x[-9:], last[0]) and not grad_x[:-9].any()


@kernel_test
def test_glu_refuses_float64_where_kernels_run():
    with pytest.raises(ValueError, match="x is torch.float64; expected float32, float16 or bfloat16"):
        kernel.forward(torch.ones(8, dtype=torch.float64, device=DEVICE), None, "silu")

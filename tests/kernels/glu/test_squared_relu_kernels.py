"""Squared ReLU's Triton kernels against their specification: see interpreted.py for where they run."""

from __future__ import annotations

import pytest
import torch
from covering import parametrize_covering
from interpreted import DEVICE, DTYPES, assert_as_specified, kernel_test, round_sums
from pointwise_activations import misaligned, strided
from squared_relu_inputs import every_number

from tempo_kernels.pointwise import eager as pointwise_eager
from tempo_kernels.pointwise import kernel as pointwise_kernel
from tempo_kernels.pointwise import kernel_sums
from tempo_kernels.squared_relu import eager, kernel

SHAPES = [(3, 2, 768), (5, 1000), (9, 33), (1, 1), (2, 2049), (40, 8), (0, 16), (3, 0)]


def forward(x):
    return pointwise_kernel.forward(x, None, "squared_relu")


def check_squared_relu(y, grad):
    found = kernel.backward(grad, y, True)
    assert_as_specified(found, [grad, y], lambda *t: round_sums(eager.backward(*t, True)), "grad_x", "grad_bias")
    alone, nothing = kernel.backward(grad, y, False)
    assert torch.equal(alone, found[0]) and nothing is None


def random_input(shape, dtype):
    x, grad = ((torch.rand(shape, device=DEVICE) * 16 - 8).to(dtype) for _ in range(2))
    return x.clamp_min(0).square(), grad


@kernel_test
@parametrize_covering(each={"shape": SHAPES}, dtype=DTYPES)
def test_squared_relu_does_what_is_specified_for_any_shape(shape, dtype):
    check_squared_relu(*random_input(shape, dtype))


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squared_relus_gradient_from_the_output_is_that_from_the_input_for_every_number(dtype):
    x = every_number(dtype).to(DEVICE)
    y, grad = forward(x), torch.randn(x.numel(), device=DEVICE).to(dtype)
    assert torch.equal(y.cpu(), pointwise_eager.forward(x.cpu(), None, "squared_relu"))
    found = kernel.backward(grad, y, False)[0]
    assert torch.equal(found, pointwise_kernel.backward(grad, x, None, "squared_relu", False)[0])
    assert torch.equal(found.cpu(), eager.backward(grad.cpu(), y.cpu(), False)[0])


@kernel_test
def test_squared_relu_takes_any_strides_and_alignment():
    y, _, grad = strided(DEVICE)
    check_squared_relu(y.abs().contiguous(), grad)
    check_squared_relu(misaligned((3, 64), DEVICE).abs_(), misaligned((3, 64), DEVICE))


@kernel_test
def test_squared_relu_passes_infinity_and_nan():
    x = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), -1.0], device=DEVICE)
    y = forward(x)
    expected = pointwise_eager.forward(x.cpu(), None, "squared_relu")
    torch.testing.assert_close(y.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    found = kernel.backward(torch.ones_like(x), y, False)[0]
    assert found[2] == torch.inf and found[4].isnan() and not found[[0, 1, 3, 5]].any()


@kernel_test
def test_squared_relus_bias_gradient_sums_many_tiles_in_a_fixed_order(monkeypatch):
    monkeypatch.setattr(kernel_sums, "count_multiprocessors", lambda device: 1)
    y, grad = random_input((70, 264), torch.float32)
    check_squared_relu(y, grad)
    assert torch.equal(*(kernel.backward(grad, y, True)[1] for _ in range(2)))


@pytest.mark.gpu
def test_squared_relu_addresses_more_than_two_billion_elements():
    x = torch.zeros(2**31 // 4096 + 9, 4096, dtype=torch.bfloat16, device="cuda")
    x[-9:] = torch.randn(9, 4096)
    y = forward(x)
    assert torch.equal(y[-9:].cpu(), pointwise_eager.forward(x[-9:].cpu(), None, "squared_relu")) and not y[:-9].any()
    grad_x, _ = kernel.backward(torch.ones_like(y), y, False)
    assert torch.equal(grad_x[-9:], 2 * x[-9:].clamp_min(0))

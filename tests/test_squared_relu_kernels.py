"""Squared ReLU's Triton kernels against their specification: see interpreted.py for where they run."""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, DTYPES, assert_as_specified, kernel_test
from squared_relu_inputs import every_number

from tempo_kernels.pointwise import kernel_tiles
from tempo_kernels.squared_relu import eager, kernel


def check_squared_relu(x, bias, grad):
    y = kernel.forward(x, bias)
    assert_as_specified([y], [x, bias], lambda *t: [eager.forward(*t)], "y")
    again = torch.full_like(y, torch.nan)
    assert kernel.forward(x, bias, again) is again and torch.equal(again, y)
    for has_grad_bias, names in ((False, ["grad_x"]), (True, ["grad_x", "grad_bias"])):
        for name, tensors in (("backward", [grad, y]), ("backward_from_input", [grad, x, bias])):

            def results(module, tensors, name=name, names=names, wanted=has_grad_bias):
                return getattr(module, name)(*tensors, wanted)[: len(names)]

            found = results(kernel, tensors)
            assert_as_specified(found, tensors, lambda *t: results(eager, t), *names)
        assert has_grad_bias or kernel.backward(grad, y, False)[1] is None


def random_input(shape, dtype):
    x, grad = ((torch.rand(shape, device=DEVICE) * 16 - 8).to(dtype) for _ in range(2))
    return x, torch.randn(shape[-1], device=DEVICE).to(dtype), grad


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(3, 2, 768), (5, 1000), (9, 33), (1, 1), (2, 2049), (40, 8), (0, 16), (3, 0)], ids=str
)
def test_squared_relu_does_what_is_specified_for_any_shape(shape, dtype):
    x, bias, grad = random_input(shape, dtype)
    check_squared_relu(x, bias, grad)
    check_squared_relu(x, None, grad)


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squared_relus_gradient_from_the_output_is_that_from_the_input_for_every_number(dtype):
    x = every_number(dtype).to(DEVICE)
    y, grad = kernel.forward(x, None), torch.randn(x.numel(), device=DEVICE).to(dtype)
    assert torch.equal(y.cpu(), eager.forward(x.cpu(), None))
    found = kernel.backward(grad, y, False)[0]
    assert torch.equal(found, kernel.backward_from_input(grad, x, None, False)[0])
    assert torch.equal(found.cpu(), eager.backward_from_input(grad.cpu(), x.cpu(), None, False)[0])


@kernel_test
def test_squared_relu_takes_any_strides_and_alignment():
    x, bias = torch.randn(24, 10, device=DEVICE).t(), torch.randn(48, device=DEVICE)[::2]
    check_squared_relu(x, bias, torch.randn(24, device=DEVICE).expand(10, 24))
    x, grad = (torch.randn(193, device=DEVICE).bfloat16()[1:].view(3, 64) for _ in range(2))
    check_squared_relu(x, torch.randn(65, device=DEVICE).bfloat16()[1:], grad)


@kernel_test
def test_squared_relu_passes_infinity_and_nan():
    x = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), -1.0], device=DEVICE)
    y = kernel.forward(x, None)
    torch.testing.assert_close(y.cpu(), eager.forward(x.cpu(), None), rtol=0, atol=0, equal_nan=True)
    for found in (kernel.backward(torch.ones_like(x), y, False)[0], kernel.backward_from_input(y, x, None, False)[0]):
        assert found[2] == torch.inf and found[4].isnan() and not found[[0, 1, 3, 5]].any()


@kernel_test
def test_squared_relus_bias_gradient_sums_many_tiles_in_a_fixed_order(monkeypatch):
    monkeypatch.setattr(kernel_tiles, "BACKWARD_PROGRAMS", 3)
    x, bias, grad = random_input((70, 264), torch.float32)
    check_squared_relu(x, bias, grad)
    assert torch.equal(*(kernel.backward(grad, x.abs(), True)[1] for _ in range(2)))


@pytest.mark.gpu
def test_squared_relu_addresses_more_than_two_billion_elements():
    x = torch.zeros(2**31 // 4096 + 9, 4096, dtype=torch.bfloat16, device="cuda")
    x[-9:] = torch.randn(9, 4096)
    y = kernel.forward(x, None)
    assert torch.equal(y[-9:].cpu(), eager.forward(x[-9:].cpu(), None)) and not y[:-9].any()
    grad_x, _ = kernel.backward(torch.ones_like(y), y, False)
    assert torch.equal(grad_x[-9:], 2 * x[-9:].clamp_min(0))


@kernel_test
def test_squared_relu_refuses_float64_where_kernels_run():
    with pytest.raises(ValueError, match="x is torch.float64; expected float32, float16 or bfloat16"):
        kernel.forward(torch.ones(8, dtype=torch.float64, device=DEVICE), None)

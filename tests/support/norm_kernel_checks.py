"""A norm's kernels run beside their specification, in both forms."""

from __future__ import annotations

import torch
from interpreted import DEVICE, assert_as_specified
from norm_inputs import PARAMETERS

from tempo_kernels.norm import eager as norm_eager
from tempo_kernels.norm import kernel as norm_kernel
from tempo_kernels.norm.operands import Norm


def norm_of(weight, bias, zero_centered=False):
    """A norm without a bias is an RMSNorm."""
    return Norm(weight, bias, 1e-5, subtracts_mean=bias is not None, zero_centered=zero_centered)


def norm_forward_and_backward(module, x, weight, bias, grad, zero_centered=False):
    """y, grad_x, grad_weight and, where there is a bias, grad_bias."""
    norm = norm_of(weight, bias, zero_centered)
    y, kept = module.forward(x, norm)
    return [y, *cast_sums(norm, *module.backward(grad, y, kept, norm.subtracts_mean, x.dtype, norm.sums_dtype))]


def cast_sums(norm, grad_x, sums):
    """grad_x, and each sum in the dtype of its parameter."""
    parameters = [norm.weight] if norm.bias is None else [norm.weight, norm.bias]
    return [grad_x, *(total.to(parameter.dtype) for total, parameter in zip(sums, parameters, strict=True))]


def norm_from_input(module, x, weight, bias, grad, zero_centered=False):
    """The same with keep="input"; y is also filled in again."""
    norm = norm_of(weight, bias, zero_centered)
    y, statistics = module.forward_from_input(x, norm)
    refilled = torch.full_like(y, float("nan"))
    module.refill(refilled, x, norm, statistics)
    assert torch.equal(refilled.nan_to_num(), y.nan_to_num()) and torch.equal(refilled.isnan(), y.isnan())
    return [y, *cast_sums(norm, *module.backward_from_input(grad, x, norm, statistics))]


def check_norm(x, weight, bias, grad, forms=(norm_forward_and_backward,), zero_centered=False):
    inputs = [x, weight, bias, grad]
    for run in forms:
        found = run(norm_kernel, *inputs, zero_centered)
        names = ["y", "grad_x", "grad_weight", "grad_bias"][: len(found)]
        assert_as_specified(found, inputs, lambda *t: run(norm_eager, *t, zero_centered), *names)  # noqa: B023


def check_both_forms(x, weight, bias, grad, zero_centered=False):
    check_norm(x, weight, bias, grad, (norm_forward_and_backward, norm_from_input), zero_centered)


def random_norm(name, shape, dtype):
    """x, weight, bias and grad of `dtype`, for the parameters that go by `name`."""
    weight, bias = PARAMETERS[name](shape[-1])
    tensors = [torch.randn(shape) * 3 + 1, weight, bias, torch.randn(shape)]
    return [t.to(device=DEVICE, dtype=dtype) for t in tensors]

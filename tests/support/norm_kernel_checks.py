"""A norm's kernels run against their specification, in both forms."""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, assert_as_specified
from norm_inputs import PARAMETERS

from tempo_kernels.norm import eager as norm_eager
from tempo_kernels.norm import kernel as norm_kernel
from tempo_kernels.norm.settings import Blocks, Norm, get_reserve_size

LONG_ROWS = Blocks(forward_row_bytes=64, backward_row_bytes=64, row_columns=32, strip_columns=64, elements=256)


def norm_of(weight, bias, zero_centered=False):
    """A norm without a bias is an RMSNorm."""
    return Norm(weight, bias, 1e-5, subtracts_mean=bias is not None, zero_centered=zero_centered)


def norm_forward_and_backward(module, x, weight, bias, grad, zero_centered=False, **more):
    """y, grad_x, grad_weight and, where there is a bias, grad_bias."""
    norm = norm_of(weight, bias, zero_centered)
    y, kept = module.forward(x, norm, **more)
    found = module.backward(grad, y, kept, norm.subtracts_mean, x.dtype, norm.sums_dtype, **more)
    return [y, *cast_sums(norm, *found)]


def cast_sums(norm, grad_x, sums):
    """grad_x, and each sum in the dtype of its parameter."""
    parameters = [norm.weight] if norm.bias is None else [norm.weight, norm.bias]
    return [grad_x, *(total.to(parameter.dtype) for total, parameter in zip(sums, parameters, strict=True))]


def norm_from_input(module, x, weight, bias, grad, zero_centered=False, **more):
    """The same with keep="recompute"; y is also filled in again."""
    norm = norm_of(weight, bias, zero_centered)
    y, statistics = module.forward_from_input(x, norm, **more)
    refilled = torch.full_like(y, float("nan"))
    module.refill(refilled, x, norm, statistics, **more)
    assert torch.equal(refilled.nan_to_num(), y.nan_to_num()) and torch.equal(refilled.isnan(), y.isnan())
    return [y, *cast_sums(norm, *module.backward_from_input(grad, x, norm, statistics, **more))]


def check_norm(run, x, weight, bias, grad, zero_centered=False, **more):
    inputs = [x, weight, bias, grad]
    found = run(norm_kernel, *inputs, zero_centered, **more)
    names = ["y", "grad_x", "grad_weight", "grad_bias"][: len(found)]
    assert_as_specified(found, inputs, lambda *t: run(norm_eager, *t, zero_centered), *names)


def check_both_forms(x, weight, bias, grad, zero_centered=False, **more):
    """Where more channels are lost than the reserve has columns, the form in place has to say so."""
    check_norm(norm_from_input, x, weight, bias, grad, zero_centered, **more)
    dtype = weight.dtype if x.dtype == torch.float32 else x.dtype
    lost = norm_eager.get_lost_channels(norm_of(weight, bias, zero_centered).compute_affine(x.dtype), dtype)
    if len(lost) <= get_reserve_size(x.size(-1)) or not x.numel():
        check_norm(norm_forward_and_backward, x, weight, bias, grad, zero_centered, **more)
    else:
        with pytest.raises(RuntimeError, match='keep="recompute", in Megatron tempo.norm "recompute"'):
            norm_forward_and_backward(norm_kernel, x, weight, bias, grad, zero_centered, **more)


def random_norm(name, shape, dtype):
    """x, weight, bias and grad of `dtype`, for the parameters that go by `name`."""
    weight, bias = PARAMETERS[name](shape[-1])
    tensors = [torch.randn(shape) * 3 + 1, weight, bias, torch.randn(shape)]
    return [t.to(device=DEVICE, dtype=dtype) for t in tensors]

"""The norms of a float32 x beside 16-bit parameters, as under Megatron's --fp32-residual-connection."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from norm_inputs import NAMES, PARAMETERS, results
from torch.nn import functional as F
from witness import assert_within_rule

from tempo_kernels.norm import layer_norm, rms_norm

DTYPES = [torch.bfloat16, torch.float16]


def torchs_norm(x, weight, bias=None):
    """torch's in x's dtype with the parameters cast; the output has weight's dtype."""
    shape, gamma = x.shape[-1:], weight.to(x.dtype)
    y = F.rms_norm(x, shape, gamma, 1e-5) if bias is None else F.layer_norm(x, shape, gamma, bias.to(x.dtype), 1e-5)
    return y.to(weight.dtype)


def inputs(name, shape, dtype, norm):
    """x in float32, the parameters of `norm` in dtype, and the gradient of y in dtype."""
    weight, bias = PARAMETERS[name](shape[-1])
    parameters = [weight.to(dtype), bias.to(dtype)][: 2 if norm is layer_norm else 1]
    return [torch.randn(shape) * 3 + 1, *parameters], torch.randn(shape).to(dtype)


def witnesses(norm, tensors, grad):
    """(name, ours, torch's, exact) of every result."""
    exact = results(torchs_norm, [t.double() for t in tensors], grad.double())
    return list(zip(NAMES, results(norm, tensors, grad), results(torchs_norm, tensors, grad), exact, strict=False))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
@pytest.mark.parametrize("name", PARAMETERS)
def test_what_keeps_its_input_obeys_the_rule(name, norm, dtype, nan_poison):
    for shape in ((64, 3, 256), (7, 33), (0, 16), (5, 1)):
        for witness in witnesses(partial(norm, keep="recompute"), *inputs(name, shape, dtype, norm)):
            assert_within_rule(*witness)


def assert_as_exact_as_its_output(norm, tensors, grad):
    """By the rule, but for grad_x: 16 bits of y say no more of a float32 x than 16 bits of x would."""
    for name, *found in witnesses(norm, tensors, grad):
        ours, torchs, exact = found
        if name == "grad_x":
            assert ours.dtype == torch.float32
            ours, torchs = ours.to(grad.dtype), torchs.to(grad.dtype)
        assert_within_rule(name, ours, torchs, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
@pytest.mark.parametrize("name", ["initial", "trained", "one in a hundred gamma 0", "gamma 0 and beta 0"])
def test_what_keeps_its_output_is_as_exact_as_its_output(name, norm, dtype, nan_poison):
    compiled = [(800, 3, 256)] if name == "trained" else []
    for shape in ((64, 3, 256), (0, 16), *compiled):
        assert_as_exact_as_its_output(norm, *inputs(name, shape, dtype, norm))


@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_the_output_given_again_has_the_same_bits(norm):
    y = norm(*(t.requires_grad_() for t in inputs("initial", (24, 64), torch.bfloat16, norm)[0]), keep="recompute")
    y.grad_fn.refill(y.grad_fn, out := torch.full_like(y, torch.nan, requires_grad=False))
    assert torch.equal(out, y)

"""What 16 bits of a norm's output can say of its normalised input, and what only its input can; of a float32 x too."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from norm_inputs import NAMES, PARAMETERS, float32_layer_norm, float32_rms_norm, results
from torch import Tensor
from torch.nn import functional as F
from witness import assert_within_rule, ulp

from tempo_kernels.norm import layer_norm, rms_norm

ROWS, HIDDEN, EPS = 256, 512, 1e-5
DTYPES = [torch.bfloat16, torch.float16]


FAR_MEAN = "a mean far above the standard deviation"
# x, and the parameters, which have its dtype unless the case says otherwise.
HARD = {
    "float32 parameters": lambda x, weight, bias: [x, weight, bias],
    "a gradient along the output": lambda x, weight, bias: [x, torch.ones(HIDDEN)],
    "rows of a variance far below eps": lambda x, weight, bias: [(x.float() * 1e-4).to(x.dtype), weight, bias],
    "an outlier channel": lambda x, weight, bias: [x + 200 * (torch.arange(HIDDEN) == 7), weight, bias],
    "one channel": lambda x, weight, bias: [x[:, :1], weight[:1], bias[:1]],
    "one channel without a mean": lambda x, weight, bias: [x[:, :1], weight[:1]],
}
CASES = {
    "ordinary": lambda x, weight, bias: [x, weight, bias],
    FAR_MEAN: lambda x, weight, bias: [(x.float() + 1e4).to(x.dtype), weight, bias],
    **HARD,
}


def inputs(case, dtype) -> tuple[list[Tensor], Tensor]:
    """x, weight and perhaps bias, and the gradient of y."""
    weight, bias = PARAMETERS["trained"](HIDDEN)
    # Of no channel a column of its own is kept.
    x, *parameters = CASES[case]((torch.randn(ROWS, HIDDEN) * 3).to(dtype), weight.clamp(min=0.5), bias)
    if case != "float32 parameters":
        parameters = [t.to(dtype) for t in parameters]
    grad = float32_rms_norm(x, *parameters) if case == "a gradient along the output" else torch.randn(x.shape)
    return [x, *parameters], grad.to(dtype)


def witnesses(tensors, grad) -> tuple[list[Tensor], list[Tensor]]:
    """In the same dtype as GPUs compute, with sums in float32; and exact."""
    plain = float32_layer_norm if len(tensors) == 3 else float32_rms_norm
    return results(plain, tensors, grad), results(plain, [t.double() for t in tensors], grad)


def lost_of_mean(mean, rstd) -> Tensor:
    """What float32 loses of the normalised input where the mean is taken off after the scale, as by torch on a CPU."""
    return 4 * torch.finfo(torch.float32).eps * mean.abs() * rstd


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mean_far_above_the_standard_deviation_costs_y_what_is_documented_and_gradients_of_the_input_nothing(dtype):
    tensors, grad = inputs(FAR_MEAN, dtype)
    y, *found = results(partial(layer_norm, keep="recompute"), tensors, grad)
    same, exact = witnesses(tensors, grad)
    x, weight = (t.double() for t in tensors[:2])
    mean = x.mean(-1, keepdim=True)
    rstd = ((x - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
    limit = lost_of_mean(mean, rstd) * weight + torch.finfo(dtype).eps / 2 * (1.01 * y.double()).abs() + 1e-6
    assert ((y.double() - exact[0]).abs() <= limit).all()
    for name, *three in zip(NAMES[1:], found, same[1:], exact[1:], strict=True):
        assert_within_rule(name, *three)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("case", "keep"), [("ordinary", "inplace"), *((case, "recompute") for case in ("ordinary", *HARD))]
)
def test_the_rule_holds_with_sums_in_float32_in_place_where_the_gradient_does_not_follow_the_output(case, keep, dtype):
    tensors, grad = inputs(case, dtype)
    for given in (tensors, tensors[:2])[: 1 + (case == "ordinary")]:
        found = results(partial(layer_norm if len(given) == 3 else rms_norm, keep=keep), given, grad)
        for name, *three in zip(NAMES, found, *witnesses(given, grad), strict=False):
            assert_within_rule(name, *three)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*HARD, FAR_MEAN])
def test_what_keeps_its_output_is_off_by_what_rounding_the_output_loses_and_by_no_more(case, dtype):
    tensors, grad = inputs(case, dtype)
    norm = layer_norm if len(tensors) == 3 else rms_norm
    y, *found = results(norm, tensors, grad)
    same, exact = witnesses(tensors, grad)
    x, weight, *bias = (t.double() for t in tensors)
    # The gradients, exactly, of the normalised input that the rounded y still carries.
    xhat = (y.double() - (bias[0] if bias else 0)) / weight
    true_xhat = (exact[0] - (bias[0] if bias else 0)) / weight
    mean = x.mean(-1, keepdim=True) if bias else torch.zeros(())
    centred = x - mean
    rstd = (centred.square().mean(-1, keepdim=True) + EPS).rsqrt()
    rounding = torch.finfo(dtype).eps / 2 * (1.01 * y.double() / weight).abs()
    assert ((xhat - true_xhat).abs() <= rounding + lost_of_mean(mean, rstd) + 1e-6).all()
    g = grad.double() * weight
    grad_x = g - xhat * (g * xhat).mean(-1, keepdim=True) - (g.mean(-1, keepdim=True) if bias else 0)
    grad_x *= rstd
    carried = [grad_x, (grad.double() * xhat).sum(0), grad.double().sum(0)]
    for name, ours, theirs, truth, limit in zip(NAMES[1:], found, same[1:], exact[1:], carried, strict=False):
        # What torch's own arithmetic loses, and, where gradients cancel, float32's rounding of what they cancel from.
        allowed = 2 * (theirs.double() - truth).abs().max() + ulp(limit.abs().max(), ours.dtype)
        assert (ours.double() - limit).abs().max() <= allowed + 1e-5 * grad.double().abs().max(), name
    if case == "a gradient along the output":
        assert (found[0].double() - exact[1]).abs().max() > 0.5 * exact[1].abs().max(), "for which the input is kept"


def torchs_norm(x, weight, bias=None):
    """torch's in x's dtype with the parameters cast; the output has weight's dtype."""
    shape, gamma = x.shape[-1:], weight.to(x.dtype)
    y = F.rms_norm(x, shape, gamma, EPS) if bias is None else F.layer_norm(x, shape, gamma, bias.to(x.dtype), EPS)
    return y.to(weight.dtype)


def float32_residual(name, shape, dtype, norm):
    """As under Megatron's --fp32-residual-connection: x in float32, the parameters and the gradient of y in dtype."""
    parameters = [t.to(dtype) for t in PARAMETERS[name](shape[-1])][: 2 if norm is layer_norm else 1]
    return [torch.randn(shape) * 3 + 1, *parameters], torch.randn(shape).to(dtype)


IN_PLACE = ["initial", "trained", "one in a hundred gamma 0", "gamma 0 and beta 0"]
# One of them is compiled.
SHAPES = {"recompute": [(64, 3, 256), (7, 33), (0, 16), (5, 1)], "inplace": [(64, 3, 256), (0, 16), (800, 3, 256)]}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
@pytest.mark.parametrize(
    ("name", "keep"), [*((name, "recompute") for name in PARAMETERS), *((name, "inplace") for name in IN_PLACE)]
)
def test_norms_of_a_float32_residual_obey_the_rule_and_in_place_as_exactly_as_16_bits_say(
    name, keep, norm, dtype, nan_poison
):
    for shape in SHAPES[keep]:
        tensors, grad = float32_residual(name, shape, dtype, norm)
        found, same = (results(each, tensors, grad) for each in (partial(norm, keep=keep), torchs_norm))
        exact = results(torchs_norm, [t.double() for t in tensors], grad.double())
        for result, ours, theirs, truth in zip(NAMES, found, same, exact, strict=False):
            if (keep, result) == ("inplace", "grad_x"):
                # 16 bits of y say no more of a float32 x than 16 bits of x would.
                assert ours.dtype == torch.float32
                ours, theirs = ours.to(dtype), theirs.to(dtype)
            assert_within_rule(result, ours, theirs, truth)


@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_the_output_of_a_float32_residual_is_given_again_bit_for_bit(norm):
    leaves, _ = float32_residual("initial", (24, 64), torch.bfloat16, norm)
    y = norm(*(t.requires_grad_() for t in leaves), keep="recompute")
    y.grad_fn.refill(y.grad_fn, out := torch.full_like(y, torch.nan, requires_grad=False))
    assert torch.equal(out, y)

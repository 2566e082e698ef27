from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from covering import compiles, exhaustive, parametrize_covering
from norm_inputs import (
    DTYPES,
    FORMS,
    PARAMETERS,
    reference_layer_norm,
    reference_rms_norm,
    results,
    zero_centered_layer_norm,
)  # fmt: skip
from torch.nn import functional as F
from witness import assert_three_witnesses, kept_storages

from tempo_kernels.norm import cpu, layer_norm, rms_norm


@parametrize_covering(
    parameters=PARAMETERS, dtype=DTYPES, keep=FORMS, zero_centered=[False, True], shape=[(64, 3, 768), (7, 33)]
)
def test_layer_norm_obeys_the_rule_for_any_gamma_and_beta(parameters, dtype, keep, zero_centered, shape, nan_poison):
    x, grad, (weight, bias) = torch.randn(shape) * 3 + 1, torch.randn(shape), parameters(shape[-1])
    ours = partial(layer_norm, keep=keep, zero_centered=zero_centered)
    reference = zero_centered_layer_norm if zero_centered else reference_layer_norm
    assert_three_witnesses(ours, reference, [x, weight - 1 if zero_centered else weight, bias], grad, dtype)


@pytest.mark.parametrize("keep", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["initial", "one in a hundred gamma 0", "tiny gamma", "gamma 0 and beta 0"])
def test_rms_norm_obeys_the_rule(name, dtype, keep, nan_poison):
    x, grad = torch.randn(65, 257), torch.randn(65, 257)
    ours = partial(rms_norm, keep=keep)
    assert_three_witnesses(ours, reference_rms_norm, [x, PARAMETERS[name](257)[0]], grad, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_small_zero_centered_weight_of_16_bits_is_not_rounded_away(dtype):
    x, weight, bias = torch.randn(4, 32), torch.full((32,), 2.0**-12), torch.zeros(32)
    ours = layer_norm(x.to(dtype), weight.to(dtype), bias.to(dtype), zero_centered=True)
    expected = F.layer_norm(x.to(dtype).double(), (32,), (weight + 1).double(), bias.double(), 1e-5)
    assert torch.equal(ours, expected.to(dtype))


SHAPES = [(0, 16), (1, 1), (5, 1), (3, 0, 8), (4, 0), (1, 65), (12,)]


@parametrize_covering(keep=FORMS, dtype=DTYPES, each={"shape": [*SHAPES, "a row of one value", "grad along y"]})
def test_odd_shapes_rows_of_one_value_and_gradients_along_the_output_obey_the_rule(shape, dtype, keep):
    x = torch.randn((32, 512) if isinstance(shape, str) else shape)
    if shape == "a row of one value":
        x[0] = 3.0
    grad = F.layer_norm(x, x.shape[-1:]) if shape == "grad along y" and keep == "inplace" else torch.randn(x.shape)
    inputs = [x, *PARAMETERS["trained"](x.size(-1))]
    assert_three_witnesses(partial(layer_norm, keep=keep), reference_layer_norm, inputs, grad, dtype)


@pytest.mark.parametrize("keep", FORMS)
def test_a_row_with_inf_or_nan_is_nan_as_torchs_and_leaves_other_rows_alone(keep):
    x = torch.randn(3, 32)
    x[0, 3], x[1, 4] = float("inf"), float("nan")
    nan = []
    for function in (partial(layer_norm, keep=keep), reference_layer_norm):
        leaves = [t.clone().requires_grad_() for t in (x, *PARAMETERS["initial"](32))]
        y = function(*leaves)
        y.sum().backward()
        nan.append([t.isnan() for t in (y, *(leaf.grad for leaf in leaves))])
        assert y[2].isfinite().all() and leaves[0].grad[2].isfinite().all()
    assert all(torch.equal(ours, torchs) for ours, torchs in zip(*nan, strict=True))
    assert nan[0][0][:2].all() and nan[0][1][:2].all()


MIXED = [(torch.float32, torch.bfloat16), (torch.float32, torch.float16)]


@pytest.mark.parametrize(("dtype", "of_parameters"), [*zip(DTYPES, DTYPES, strict=True), *MIXED])
@pytest.mark.parametrize("function", [layer_norm, rms_norm])
def test_keeps_the_output_rstd_the_calls_parameters_and_of_each_lost_channel_a_column(function, dtype, of_parameters):
    parameters = [t.to(of_parameters) for t in PARAMETERS["initial"](128)][: 2 if function is layer_norm else 1]
    leaves = [t.requires_grad_() for t in (torch.randn(64, 128).to(dtype), *parameters)]
    for num_lost in (0, 3):
        parameters[0].data[:num_lost] = 0
        outputs = []
        kept = kept_storages(lambda *t, outputs=outputs: outputs.append(function(*t)) or outputs[0], *leaves)
        assert kept.pop(outputs[0].data_ptr()) == 64 * 128 * of_parameters.itemsize
        of_channels = [64 * num_lost * of_parameters.itemsize, 8 * num_lost] if num_lost else []
        assert sorted(kept.values()) == sorted([64 * 4, 4 * 128 * len(parameters), *of_channels])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [layer_norm, rms_norm])
def test_what_keeps_its_input_keeps_that_and_one_or_two_numbers_a_row(function, dtype):
    x = torch.randn(64, 128).to(dtype).requires_grad_()
    parameters = [t.to(dtype).requires_grad_() for t in PARAMETERS["gamma 0 and beta 0"](128)]
    parameters = parameters[: 2 if function is layer_norm else 1]
    kept = kept_storages(partial(function, keep="recompute"), x, *parameters)
    for tensor in (x, *parameters):
        del kept[tensor.data_ptr()]
    assert list(kept.values()) == [64 * 4] * len(parameters)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [layer_norm, rms_norm])
def test_what_keeps_its_input_alone_makes_its_numbers_again_and_gives_the_same_bits(function, dtype):
    x, grad = torch.randn(2, 16, 2, 4, 33).to(dtype)
    parameters = [t.to(dtype).requires_grad_() for t in PARAMETERS["one in a hundred gamma 0"](33)]
    leaves = [x.requires_grad_(), *parameters[: 2 if function is layer_norm else 1]]
    kept = kept_storages(partial(function, keep="recompute statistics"), *leaves)
    assert sorted(kept) == sorted(tensor.data_ptr() for tensor in leaves)
    alone, both = (
        results(partial(function, keep=keep), leaves, grad) for keep in ("recompute statistics", "recompute")
    )
    assert all(torch.equal(a, b) for a, b in zip(alone, both, strict=True))
    # A slice, as queries are of a projection's output.
    y = function(x[..., 1:, :], *leaves[1:], keep="recompute statistics")
    y.grad_fn.refill(y.grad_fn, out := torch.full_like(y, torch.nan))
    assert torch.equal(out, y)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("change", ["fused AdamW", "in place", ".data"])
def test_gradients_are_those_of_the_parameters_of_the_forward_though_they_changed_since(change, dtype):
    x, grad = torch.randn(2, 32, 64).to(dtype)
    leaves = [t.to(dtype).requires_grad_() for t in (x, *PARAMETERS["one in a hundred gamma 0"](64))]
    expected = torch.autograd.grad(layer_norm(*leaves), leaves, grad)
    y = layer_norm(*leaves)
    for leaf in leaves[1:]:
        leaf.grad = torch.ones_like(leaf)
    with torch.no_grad():
        if change == "fused AdamW":
            torch.optim.AdamW(leaves[1:], lr=0.5, fused=True).step()
        elif change == "in place":
            leaves[1].zero_()
        else:
            leaves[1].data += 7
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(y, leaves, grad), expected, strict=True))


LARGE = (1024, 512)  # compiled on a CPU


@pytest.mark.parametrize(
    ("shape", "keep"), [*product([(4, 8)], FORMS), (LARGE, "inplace"), *exhaustive((LARGE, "recompute"))]
)
def test_what_ran_in_inference_mode_first_can_be_trained(shape, keep):
    leaves = [torch.randn(shape), *PARAMETERS["trained"](shape[-1])]
    with torch.inference_mode():
        layer_norm(*leaves, keep=keep), rms_norm(*leaves[:2], keep=keep)
    leaves = [t.requires_grad_() for t in leaves]
    (layer_norm(*leaves, keep=keep) + rms_norm(*leaves[:2], keep=keep)).sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [layer_norm, rms_norm])
def test_an_output_may_be_changed_in_place_where_backward_does_not_read_it(function, dtype):
    x, *parameters = (t.to(dtype) for t in (torch.randn(6, 2, 16), *PARAMETERS["trained"](16)))
    parameters = parameters[: 2 if function is layer_norm else 1]

    def find(change, keep):
        leaves = [t.clone().requires_grad_() for t in (x, *parameters)]
        y = change(function(*leaves, keep=keep))
        return [y, *torch.autograd.grad(y.square().sum(), leaves)]

    expected = find(lambda y: y * 2, "recompute")
    assert all(torch.equal(*pair) for pair in zip(find(lambda y: y.mul_(2), "recompute"), expected, strict=True))
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        find(lambda y: y.mul_(2), "inplace")


@compiles
@parametrize_covering(
    keep=["inplace", "recompute"],
    norm=["layer_norm", "rms_norm"],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    width=[37, 40, 128],
)
def test_compiled_norms_obey_the_rule(width, keep, norm, dtype, monkeypatch):
    monkeypatch.setattr(cpu, "differentiate", lambda *_: pytest.fail("not compiled"))
    rows = (cpu.MIN_COMPILED_ELEMENTS // width // 3 // 32 + 1) * 32 + 4  # in chunks of four
    x, grad = torch.randn(rows, 3, width) * 2 + 1, torch.randn(rows, 3, width)
    gamma, beta = torch.rand(width) + 0.5, torch.randn(width) * 0.3
    gamma[3], beta[3] = -0.5, 0.99  # all that y can carry
    ours = partial({"layer_norm": layer_norm, "rms_norm": rms_norm}[norm], keep=keep)
    inputs = [x.mT.contiguous().mT, gamma, beta]
    if norm == "rms_norm":
        assert_three_witnesses(ours, lambda x, w: F.rms_norm(x, (width,), w, 1e-5), inputs[:2], grad, dtype)
    else:
        assert_three_witnesses(ours, lambda x, w, b: F.layer_norm(x, (width,), w, b), inputs, grad, dtype)


@compiles
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_compiled_norm_refills_its_output_bit_for_bit(dtype):
    y = rms_norm(torch.randn(7000, 40).to(dtype).requires_grad_(), torch.rand(40).to(dtype), keep="recompute")
    out = torch.full_like(y, float("nan"), requires_grad=False)
    y.grad_fn.refill(y.grad_fn, out)
    assert torch.equal(out, y)


def test_a_large_norm_with_lost_channels_obeys_the_rule():
    gamma, beta = torch.rand(40) + 0.5, torch.randn(40) * 0.3
    gamma[::10], beta[3] = 0, 100
    inputs, grad = [torch.randn(14000, 40) * 2 + 1, gamma, beta], torch.randn(14000, 40)
    assert_three_witnesses(layer_norm, lambda x, w, b: F.layer_norm(x, (40,), w, b), inputs, grad, torch.bfloat16)


X, ONES = torch.ones(2, 8), torch.ones(8)
HALF, BRAIN = ONES.half(), ONES.bfloat16()
REFUSED = {
    "integers": (X.long(), ONES, ONES, {}, "floating-point"),
    "weight size": (X, torch.ones(7), ONES, {}, r"weight has shape \[7\]"),
    "bias of 16 bits alone": (X, ONES, HALF, {}, "bias is torch.float16; expected torch.float32, beside"),
    "weight of 16 bits alone": (X, HALF, ONES, {}, "bias is torch.float32; expected torch.float16, beside"),
    "two dtypes of 16 bits": (
        X, BRAIN, HALF, {}, "bias is torch.float16; expected torch.bfloat16, beside x's torch.float32; cast it",
    ),
    "float64 x": (
        X.double(), BRAIN, ONES, {}, "weight is torch.bfloat16; expected torch.float64 or torch.float32, beside x's",
    ),
    "other 16-bit weight dtype": (
        X.half(), BRAIN, ONES, {}, "weight is torch.bfloat16; expected torch.float16 or torch.float32, beside x's",
    ),
    "unknown form": (X, ONES, ONES, {"keep": "both"}, 'keep is "both".*expected "inplace", "recompute"'),
}  # fmt: skip


@pytest.mark.parametrize(("x", "weight", "bias", "form", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(x, weight, bias, form, message):
    with pytest.raises(ValueError, match=message):
        layer_norm(x, weight, bias, **form)

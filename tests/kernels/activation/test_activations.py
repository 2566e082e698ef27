"""Activations, gated or not, against torch's own: what they compute, what they keep, and their output given again.

All keep their input, but for squared ReLU in place, which keeps its output. In-place GELU is in test_gelu.py; that
none has a second derivative is in test_every_operation.py.
"""

from __future__ import annotations

import pytest
import torch
from activation_cases import (
    DTYPES,
    GATED,
    IN_PLACE,
    KEEPS_OUTPUT,
    OPERATIONS,
    SHAPES,
    every_number,
    over_the_range,
)  # fmt: skip
from covering import parametrize_covering
from witness import assert_three_witnesses, kept_storages, outputs_and_gradients

from tempo_kernels.activation import activate
from tempo_kernels.gelu import gelu
from tempo_kernels.glu import geglu, reglu, swiglu
from tempo_kernels.squared_relu import squared_relu

NAN, INF = float("nan"), float("inf")
every_operation = pytest.mark.parametrize("name", OPERATIONS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def results(name, inputs, grad, dtype):
    """Outputs and gradients, ours and torch's."""
    return zip(*(outputs_and_gradients(f, inputs, grad, dtype) for f in OPERATIONS[name]), strict=True)


@every_operation
@every_dtype
def test_output_and_gradients_over_the_whole_range_are_as_good_as_torchs(dtype, name, nan_poison):
    x, grad = over_the_range(is_gated=name in GATED), torch.randn(150, 200)
    for inputs in ([x], [x, torch.randn(x.size(1)) * 0.1]):
        assert_three_witnesses(*OPERATIONS[name], inputs, grad, dtype)


@parametrize_covering(each={"shape": SHAPES}, dtype=[*DTYPES, torch.float64], name=OPERATIONS.keys())
def test_odd_and_empty_shapes_give_torchs_output_and_gradients(shape, dtype, name, nan_poison):
    *rows, width = shape
    width *= 2 if name in GATED else 1
    x, bias, grad = torch.randn(*rows, width), torch.randn(width), torch.randn(shape)
    assert_three_witnesses(*OPERATIONS[name], [x], grad, dtype)
    assert_three_witnesses(*OPERATIONS[name], [x, bias], grad, dtype)


@pytest.mark.parametrize("name", [name for name in (*OPERATIONS, *IN_PLACE) if name not in GATED])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_output_is_torchs_bit_for_bit(dtype, name):
    x, bias = (torch.randn(33, 97) * 3).to(dtype), torch.randn(97).to(dtype)
    for inputs in ((x,), (x, bias)):
        ours, theirs = (function(*inputs) for function in (OPERATIONS | IN_PLACE)[name])
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@every_operation
def test_zeros_infinity_and_nan_are_torchs(name):
    x = [0.0, -0.0, INF, NAN, -1.0, 30.0, -30.0, 1e4, -1e4, *([-INF] if "relu" in name else [])]
    if name in GATED:
        x = [*([gate, 2.0] for gate in x), [3.0, NAN], [1.0, -INF]]
    x = torch.tensor(x)
    for ours, theirs in results(name, [x], torch.ones_like(x[..., :1] if name in GATED else x), x.dtype):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7, equal_nan=True)


@every_operation
@every_dtype
def test_keeps_its_input_and_bias_only_or_its_output_only(dtype, name):
    x, bias = torch.randn(33, 24).to(dtype).requires_grad_(), torch.randn(24).to(dtype).requires_grad_()
    for inputs in ((x, bias), (x,)):
        outputs = []
        kept = kept_storages(lambda *t, outputs=outputs: outputs.append(OPERATIONS[name][0](*t)) or outputs[0], *inputs)
        assert set(kept) == {t.data_ptr() for t in (outputs if name == KEEPS_OUTPUT else inputs)}


def test_the_gate_comes_first_and_the_sum_of_x_and_bias_is_not_rounded():
    assert torch.equal(reglu(torch.tensor([-1.0, 2.0, 3.0, 4.0])), torch.tensor([0.0, 8.0]))
    bias = torch.tensor([0.0, 1.0]).bfloat16()
    for gate, expected in ((1.0, 257.0), (3.0, 771.0)):
        assert reglu(torch.tensor([gate, 256.0]).bfloat16(), bias).item() == torch.tensor(expected).bfloat16().item()


@pytest.mark.parametrize("name", ["squared_relu", KEEPS_OUTPUT])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_squared_relu_has_torchs_gradient_bit_for_bit_of_every_16_bit_number_and_of_random_ones(dtype, name):
    x = every_number(dtype) if dtype.itemsize == 2 else torch.randn(100_001, dtype=dtype) * 10
    # A float64 root has no wider type to be taken in.
    tolerance = 2 * torch.finfo(dtype).eps if dtype == torch.float64 and name == KEEPS_OUTPUT else 0
    for ours, theirs in results(name, [x], torch.randn(x.numel()).to(dtype), dtype):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0)


def test_no_root_of_a_million_float32_squares_is_rounded_to_its_neighbour_and_small_float16_lose_what_is_documented():
    x = torch.randn(1_000_003).abs()
    _, grad_x = outputs_and_gradients(squared_relu, [x], torch.ones_like(x), torch.float32)
    assert torch.equal(grad_x, 2 * x)
    x = torch.rand(100_000).half() * 0.008
    _, grad_x = outputs_and_gradients(squared_relu, [x], torch.ones_like(x), torch.float16)
    assert 3.4e-4 < (grad_x.double() - 2 * x.double()).abs().max() < 3.5e-4


FOUR, SHORT, HALF = torch.ones(2, 4), torch.ones(2), torch.ones(4).half()
REFUSED = {
    "integers": (lambda: activate(torch.arange(4), None, "relu"), "relu: x is torch.int64; expected float32, bfloat16"),
    "a short bias": (lambda: activate(FOUR, SHORT, "gelu"), r"gelu: bias is torch.float32 of shape \[2\]"),
    "a bias of two dimensions": (lambda: activate(FOUR, FOUR, "gelu"), r"bias is torch.float32 of shape \[2, 4\]"),
    "a bias of a scalar": (lambda: activate(SHORT[0], SHORT[:1], "gelu"), r"of shape \[1\] and x .* of shape \[\]"),
    "a bias of 16 bits": (lambda: activate(FOUR, HALF, "gelu"), r"bias is torch.float16 of shape \[4\] and x torch.f"),
    "an unknown name": (lambda: activate(FOUR, None, "swish"), "activation is 'swish'; expected one of silu, gelu, ge"),
    "gated integers": (lambda: swiglu(torch.arange(4)), "swiglu: x is torch.int64; expected float32"),
    "an odd width": (lambda: reglu(torch.ones(2, 5)), r"reglu: x has shape \[2, 5\]; expected \[..., 2f\]"),
    "no width": (lambda: swiglu(torch.tensor(1.0)), r"swiglu: x has shape \[\]"),
    "an unknown form": (lambda: geglu(FOUR, None, "fast"), 'approximate is \'fast\'; expected "none" .erf. or "tanh"'),
    "an unknown form of GELU": (lambda: gelu(FOUR, None, "fast"), "gelu: approximate is 'fast'; expected"),
    "what to keep": (lambda: squared_relu(FOUR, keep="both"), 'keep is \'both\'; expected "inplace" or "recompute"'),
    "an output without a slope": (lambda: activate(FOUR, None, "silu", keep="inplace"), "output of silu gives no sl"),
    "a gated output": (
        lambda: activate(FOUR, None, "gelu", keep="inplace", is_gated=True, operation="swap"),
        'swap: keep is "inplace", and the output of gated gelu gives no slope; use "recompute"',
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()

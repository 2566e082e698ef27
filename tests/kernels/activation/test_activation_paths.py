"""What is fast on a CPU (cpu.py), in chunks or compiled, against its specification (eager.py), all at once."""

from __future__ import annotations

import pytest
import torch
from covering import compiles, parametrize_covering
from witness import assert_same, assert_within_rule

from tempo_kernels.activation import ACTIVATIONS, cpu, eager
from tempo_kernels.activation.inverse import INVERSES, derivative_float64

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SHAPES = [(37, 3, 48), (5, 33), (1, 1), (0, 16), (3, 0), (1024,)]
INPLACE = [name for name, row in ACTIVATIONS.items() if row.slope_of_output is not None]
COMPILED = {"compiled_elements": 64}


@pytest.fixture
def not_in_chunks(monkeypatch):
    monkeypatch.setattr(cpu, "_add_in_chunks", lambda *_: pytest.fail("not compiled"))
    monkeypatch.setattr(cpu, "compute_slope", lambda *_: pytest.fail("not compiled"))


@parametrize_covering(
    each={"shape": SHAPES},
    dtype=DTYPES,
    case=[*((name, "recompute") for name in ACTIVATIONS), *((name, "inplace") for name in INPLACE)],
)
def test_an_activation_in_chunks_is_the_specification_bit_for_bit(shape, dtype, case):
    torch.manual_seed(0)
    x, grad = (torch.rand(shape) * 16 - 8).to(dtype), torch.randn(shape).to(dtype)
    for bias in (None, torch.randn(shape[-1]).to(dtype)):
        y, bits = eager.forward(x, bias, *case)
        found = cpu.forward(x, bias, *case, chunk_elements=128)
        assert_same(found, (y, bits), check_stride=True)
        operands = (grad, x, bias, None) if case[1] == "recompute" else (grad, y, None, bits)
        found = cpu.backward(*operands, *case, True, chunk_elements=128)
        assert_same(found, eager.backward(*operands, *case, True), check_stride=True)
        if case[1] == "recompute":
            out = torch.empty_like(y)
            assert cpu.forward(x, bias, *case, out, chunk_elements=128)[0] is out
            assert_same([out], [y])


def results(module, tensors, dtype, activation, form, **path):
    """y of gated units, which alone are compiled forward, and the gradients of x and bias."""
    grad, x, bias = (None if t is None else t.to(dtype) for t in tensors)
    y = [module.forward(x, bias, activation, form, **path)[0]] if form == "gated" else []
    return [
        *y,
        *module.backward(grad, x, bias, None, activation, form, bias is not None, **path)[: 1 + (bias is not None)],
    ]


def assert_right(tensors, dtype, activation, form, **path):
    found, (same, exact) = (
        results(cpu, tensors, dtype, activation, form, **path),
        (results(eager, tensors, each, activation, form) for each in (dtype, torch.float64)),
    )
    for name, *witnesses in zip(("y", "grad_x", "grad_bias")[form != "gated" :], found, same, exact, strict=False):
        if dtype == torch.float64:
            torch.testing.assert_close(*witnesses[:2], rtol=1e-12, atol=1e-12)
        else:
            assert_within_rule(name, *witnesses)


@parametrize_covering(
    each={"shape": [(37, 3, 48), (5, 34), (1, 2), (0, 16), (3, 0), (1024,)]},
    dtype=DTYPES,
    activation=ACTIVATIONS.keys(),
)
def test_gated_units_in_chunks_are_the_specification(shape, dtype, activation):
    torch.manual_seed(0)
    x, grad = torch.rand(shape) * 16 - 8, torch.randn(*shape[:-1], shape[-1] // 2)
    for bias in (None, torch.randn(shape[-1])):
        tensors = [None if t is None else t.to(dtype) for t in (grad, x, bias)]
        assert_right(tensors, dtype, activation, "gated", chunk_elements=128)


@compiles
@parametrize_covering(
    each={
        "case": [
            *((name, "gated") for name in ("silu", "gelu", "relu")),
            *((name, "recompute") for name in ("gelu", "squared_relu", "gelu_tanh")),
        ],
        "has_bias": [True, False],
        "dtype": [torch.float32, torch.bfloat16],
    }
)
def test_what_is_one_compiled_pass_obeys_the_rule(case, has_bias, dtype, not_in_chunks):
    activation, form = case
    if dtype == torch.bfloat16 and form == "recompute" and activation != "gelu_tanh":
        return  # its sum is rounded on the way, which Inductor leaves out
    has_bias = has_bias or form == "recompute"
    x, bias = torch.rand(50, 3, 40) * 16 - 8, torch.randn(40) if has_bias else None
    assert_right([torch.randn(50, 3, 20 if form == "gated" else 40), x, bias], dtype, activation, form, **COMPILED)


@compiles
@parametrize_covering(each={"dtype": DTYPES[:3], "activation": INVERSES.keys()})
def test_the_compiled_gelu_backward_is_as_exact_as_the_specification(dtype, activation, not_in_chunks):
    x = torch.cat([torch.linspace(-8, 8, 1 << 16), torch.linspace(-0.76, -0.74, 1 << 14), torch.zeros(3)]).to(dtype)
    y, bits = eager.forward(x, None, activation, "inplace")
    exact = derivative_float64(y.double(), x.double() >= INVERSES[activation].x_min, activation)
    operands = torch.ones_like(y), y, None, bits, activation, "inplace", False
    found, specified = cpu.backward(*operands, **COMPILED), eager.backward(*operands)
    errors = [(grad_x.double() - exact).abs().max() for grad_x, _ in (found, specified)]
    assert errors[0] <= 1.05 * errors[1]
    special = torch.tensor([float("nan"), float("inf"), -0.0, 0.0], dtype=dtype).repeat(32)
    bits, one = torch.full((16,), 255, dtype=torch.uint8), torch.ones_like(special)
    ours, _ = cpu.backward(one, special, None, bits, activation, "inplace", False, **COMPILED)
    assert torch.equal(ours.isnan(), special.isnan()) and ours[~special.isnan()].isfinite().all()


@compiles
def test_the_compiled_backward_of_squared_relu_is_the_specification_bit_for_bit(not_in_chunks):
    y, grad = torch.relu(torch.randn(300, 1000)).square(), torch.randn(300, 1000)
    y[0, :3] = torch.tensor([torch.inf, torch.nan, 1e-42])
    operands = grad.mT.contiguous().mT, y, None, None, "squared_relu", "inplace", True
    assert_same(cpu.backward(*operands, **COMPILED), eager.backward(*operands), equal_nan=True, check_stride=True)

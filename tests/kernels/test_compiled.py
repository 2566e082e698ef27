from __future__ import annotations

from functools import partial

import pytest
import torch
from covering import parametrize_covering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from witness import assert_three_witnesses, assert_within_rule

from tempo_kernels import compiled
from tempo_kernels.activation import cpu as activation_cpu
from tempo_kernels.activation import eager as activation_eager
from tempo_kernels.activation.inverse import INVERSES, derivative_float64
from tempo_kernels.norm import cpu as cpu_norm
from tempo_kernels.norm import layer_norm, rms_norm


def compiles(test):
    skip = pytest.mark.skipif(compiled.find_compiler() is None, reason="no C++ compiler is installed; none is needed")
    return pytest.mark.slow(skip(test))


def test_tensors_that_are_not_real_run_the_function_itself():
    function = compiled.Compiled(lambda x: x + 1)
    with FakeTensorMode():
        assert function(torch.ones(3)).shape == (3,)
    assert not function._compiled


def test_the_compiler_is_the_one_that_the_environment_names(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    assert compiled.find_compiler() is None


@pytest.fixture
def not_in_chunks(monkeypatch):
    monkeypatch.setattr(activation_cpu, "_add_in_chunks", lambda *_: pytest.fail("not compiled"))
    monkeypatch.setattr(activation_cpu, "_compute_slope", lambda *_: pytest.fail("not compiled"))


@compiles
@parametrize_covering(each={"dtype": [torch.float32, torch.float16, torch.bfloat16], "activation": INVERSES.keys()})
def test_the_compiled_gelu_backward_is_as_exact_as_the_specification(dtype, activation, not_in_chunks):
    x = torch.cat([torch.linspace(-8, 8, 1 << 16), torch.linspace(-0.76, -0.74, 1 << 14), torch.zeros(3)]).to(dtype)
    y, bits = activation_eager.forward(x, None, activation, "inplace")
    exact = derivative_float64(y.double(), x.double() >= INVERSES[activation].x_min, activation)
    operands = torch.ones_like(y), y, None, bits, activation, "inplace", False
    found, specified = (activation_cpu.backward(*operands, compiled_elements=64), activation_eager.backward(*operands))
    errors = [(grad_x.double() - exact).abs().max() for grad_x, _ in (found, specified)]
    assert errors[0] <= 1.05 * errors[1]
    special = torch.tensor([float("nan"), float("inf"), -0.0, 0.0], dtype=dtype).repeat(32)
    bits, one = torch.full((16,), 255, dtype=torch.uint8), torch.ones_like(special)
    ours, _ = activation_cpu.backward(one, special, None, bits, activation, "inplace", False, compiled_elements=64)
    assert torch.equal(ours.isnan(), special.isnan()) and ours[~special.isnan()].isfinite().all()


@compiles
def test_the_compiled_backward_of_squared_relu_is_the_specification_bit_for_bit(not_in_chunks):
    y, grad = torch.relu(torch.randn(300, 1000)).square(), torch.randn(300, 1000)
    y[0, :3] = torch.tensor([torch.inf, torch.nan, 1e-42])
    found, expected = (
        module.backward(grad.mT.contiguous().mT, y, None, None, "squared_relu", "inplace", True, **compiled)
        for module, compiled in ((activation_cpu, {"compiled_elements": 64}), (activation_eager, {}))
    )
    for ours, specified in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, specified, rtol=0, atol=0, equal_nan=True)


@compiles
@parametrize_covering(
    each={"activation": ["silu", "gelu", "relu"], "has_bias": [True, False], "dtype": [torch.float32, torch.bfloat16]}
)
def test_gated_units_in_one_pass_obey_the_rule(activation, has_bias, dtype, not_in_chunks):
    x, bias, grad = torch.rand(50, 3, 40) * 16 - 8, torch.randn(40) if has_bias else None, torch.randn(50, 3, 20)

    def results(module, dtype, **compiled):
        grad_y, x_, bias_ = (None if t is None else t.to(dtype) for t in (grad, x, bias))
        y, _ = module.forward(x_, bias_, activation, "gated", **compiled)
        operands = grad_y, x_, bias_, None, activation, "gated", has_bias
        return y, *module.backward(*operands, **compiled)[: 1 + has_bias]

    found, exact = results(activation_cpu, dtype, compiled_elements=64), results(activation_eager, torch.float64)
    for name, *witnesses in zip("y x bias".split(), found, results(activation_eager, dtype), exact, strict=False):
        assert_within_rule(name, *witnesses)


@compiles
@pytest.mark.parametrize(
    ("activation", "dtype"),
    [("gelu", torch.float32), ("squared_relu", torch.float32), ("gelu_tanh", torch.bfloat16)],
)
def test_derivatives_from_the_input_in_one_pass_obey_the_rule(activation, dtype, not_in_chunks):
    x, bias, grad = torch.rand(50, 3, 40) * 16 - 8, torch.randn(40), torch.randn(50, 3, 40)

    def results(module, dtype, **compiled):
        tensors = (t.to(dtype) for t in (grad, x, bias))
        return module.backward(*tensors, None, activation, "recompute", True, **compiled)

    found, exact = results(activation_cpu, dtype, compiled_elements=64), results(activation_eager, torch.float64)
    for name, *witnesses in zip(["x", "bias"], found, results(activation_eager, dtype), exact, strict=True):
        assert_within_rule(name, *witnesses)


@compiles
@parametrize_covering(
    keep=["inplace", "recompute"],
    norm=["layer_norm", "rms_norm"],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    width=[37, 40, 128],
)
def test_compiled_norms_obey_the_rule(width, keep, norm, dtype, monkeypatch):
    monkeypatch.setattr(cpu_norm, "differentiate", lambda *_: pytest.fail("not compiled"))
    rows = (cpu_norm.MIN_COMPILED_ELEMENTS // width // 3 // 32 + 1) * 32 + 4  # in chunks of four
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


@pytest.mark.parametrize(("width", "lanes"), [(1, 1), (2, 1), (7, 1), (40, 8), (64, 32), (768, 64), (65536, 64)])
def test_columns_are_split_into_more_than_one_group_of_a_power_of_two(width, lanes):
    x, bias = torch.randn(3, 2, width), torch.randn(width)
    found = compiled.split_columns(width, x, bias)
    assert [t.shape[-1] for t in found] == [lanes, lanes] and found[1].shape == (width // lanes, lanes)
    assert torch.equal(found[0].flatten(-2), x) and torch.equal(found[1].flatten(), bias)


@compiles
def test_only_the_lanes_are_compiled_in():
    function = compiled.Compiled(lambda x: x + 1, has_lanes=True)
    for shape in ((3, 5, 64), (7, 2, 64), (9, 4, 64)):
        x = torch.randn(shape)
        assert torch.equal(function(x), x + 1)
        if shape == (3, 5, 64):
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs

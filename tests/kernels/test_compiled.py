from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from covering import exhaustive, parametrize_covering
from gelu_inputs import ACTIVATION
from pointwise_activations import GATED
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from witness import assert_three_witnesses, assert_within_rule

from tempo_kernels import compiled
from tempo_kernels.activation import cpu as cpu_pointwise
from tempo_kernels.activation import eager as eager_pointwise
from tempo_kernels.activation import forward_with_bits
from tempo_kernels.gelu import cpu as gelu
from tempo_kernels.gelu.inverse import INVERSES, derivative_float64
from tempo_kernels.glu import cpu as cpu_glu
from tempo_kernels.norm import cpu as cpu_norm
from tempo_kernels.norm import cpu_compiled, layer_norm, rms_norm
from tempo_kernels.squared_relu import cpu as cpu_squared_relu
from tempo_kernels.squared_relu import eager as eager_squared_relu


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


@compiles
@parametrize_covering(each={"dtype": [torch.float32, torch.float16, torch.bfloat16], "form": ["none", "tanh"]})
def test_the_compiled_gelu_backward_is_as_exact_as_the_one_in_chunks(dtype, form):
    x = torch.cat([torch.linspace(-8, 8, 1 << 16), torch.linspace(-0.76, -0.74, 1 << 14), torch.zeros(3)]).to(dtype)
    y, bits = forward_with_bits(x, None, ACTIVATION[form], INVERSES[form].x_min)
    exact = derivative_float64(y.double(), x.double() >= INVERSES[form].x_min, form)
    errors = [
        (backward(torch.ones_like(y), y, bits, form).double() - exact).abs().max()
        for backward in (gelu._differentiate_compiled, gelu._differentiate_in_chunks)
    ]
    assert errors[0] <= 1.05 * errors[1]
    special = torch.tensor([float("nan"), float("inf"), -0.0, 0.0], dtype=dtype).repeat(8)
    ours = gelu._differentiate_compiled(
        torch.ones_like(special), special, torch.full((4,), 255, dtype=torch.uint8), form
    )
    assert torch.equal(ours.isnan(), special.isnan()) and ours[~special.isnan()].isfinite().all()


def test_large_tensors_take_the_differentiate_compiled(monkeypatch):
    used = []
    monkeypatch.setattr(gelu, "COMPILED_ELEMENTS", 64)
    monkeypatch.setattr(gelu, "_differentiate_compiled", lambda grad_y, *_: used.append(grad_y.numel()) or grad_y)
    for size in (63, 64):
        y, bits = forward_with_bits(torch.randn(size), None, "gelu", -0.75)
        gelu.backward(torch.ones(size), y, bits, "none", False)
    assert used == [64]


# Every pair of the first two.
IN_ONE_PASS = [
    ("output", layer_norm, torch.bfloat16, 37),
    ("output", layer_norm, torch.float32, 40),
    ("output", rms_norm, torch.bfloat16, 40),
    ("input", layer_norm, torch.float32, 128),
    ("input", rms_norm, torch.float32, 37),
]
ALL = itertools.product(["output", "input"], [layer_norm, rms_norm], [torch.float32, torch.bfloat16], [40, 128, 37])


@compiles
@pytest.mark.parametrize(
    ("keep", "norm", "dtype", "width"), [*IN_ONE_PASS, *exhaustive(*(case for case in ALL if case not in IN_ONE_PASS))]
)
def test_norms_in_one_pass_obey_the_rule(width, keep, norm, dtype, monkeypatch):
    monkeypatch.setattr(cpu_compiled, "MIN_ELEMENTS", 64)
    monkeypatch.setattr(cpu_compiled, "BLOCK_ELEMENTS", 64 * 40)  # several blocks, of which the last is small
    monkeypatch.setattr(cpu_norm, "_blocks", lambda rows: pytest.fail("not compiled"))
    x, grad = torch.randn(48, 3, width) * 2 + 1, torch.randn(48, 3, width)
    gamma, beta = torch.rand(width) + 0.5, torch.randn(width) * 0.3
    gamma[3], beta[3] = -0.5, 0.99  # all that y can carry
    ours, inputs = partial(norm, keep=keep), [x.mT.contiguous().mT, gamma, beta]
    if norm is rms_norm:
        assert_three_witnesses(ours, lambda x, w: F.rms_norm(x, (width,), w, 1e-5), inputs[:2], grad, dtype)
    else:
        assert_three_witnesses(ours, lambda x, w, b: F.layer_norm(x, (width,), w, b), inputs, grad, dtype)


@compiles
@pytest.mark.parametrize("dtype", [torch.bfloat16, *exhaustive([torch.float32])])
def test_a_compiled_norm_refills_its_output_bit_for_bit_though_its_blocks_are_small(dtype, monkeypatch):
    monkeypatch.setattr(cpu_compiled, "MIN_ELEMENTS", 48 * 40)
    monkeypatch.setattr(cpu_norm, "BLOCK_ELEMENTS", 3 * 40)
    y = rms_norm(torch.randn(48, 40).to(dtype).requires_grad_(), torch.rand(40).to(dtype), keep="input")
    out = torch.full_like(y, float("nan"), requires_grad=False)
    y.grad_fn.refill(y.grad_fn, out)
    assert torch.equal(out, y)


@pytest.mark.parametrize(("rows", "calls"), [(48, 1), (51, 17)])
def test_a_float32_layer_norm_from_its_output_in_one_call_and_in_blocks_obeys_the_rule(rows, calls, monkeypatch):
    counted, differentiate = [], cpu_norm._differentiate_layer_norm
    monkeypatch.setattr(cpu_norm, "BLOCK_ELEMENTS", 3 * 40)
    monkeypatch.setattr(cpu_norm, "_differentiate_layer_norm", lambda *a: counted.append(1) or differentiate(*a))
    inputs, grad = [torch.randn(rows, 40) * 2 + 1, torch.rand(40) + 0.5, torch.randn(40) * 0.3], torch.randn(rows, 40)
    layer_norm(*(t.requires_grad_() for t in inputs)).backward(grad)
    assert len(counted) == calls
    inputs = [t.detach() for t in inputs]
    assert_three_witnesses(layer_norm, lambda x, w, b: F.layer_norm(x, (40,), w, b), inputs, grad, torch.float32)


def test_a_large_norm_with_lost_channels_obeys_the_rule_uncompiled(monkeypatch):
    monkeypatch.setattr(cpu_compiled, "MIN_ELEMENTS", 64)
    monkeypatch.setattr(cpu_compiled, "backward", lambda *_: pytest.fail("a lost channel is not restored"))
    gamma, beta = torch.rand(40) + 0.5, torch.randn(40) * 0.3
    gamma[::10], beta[3] = 0, 100
    inputs, grad = [torch.randn(48, 40) * 2 + 1, gamma, beta], torch.randn(48, 40)
    assert_three_witnesses(layer_norm, lambda x, w, b: F.layer_norm(x, (40,), w, b), inputs, grad, torch.bfloat16)


@compiles
@pytest.mark.parametrize("dtype", [torch.bfloat16, *exhaustive([torch.float32])])
def test_the_compiled_backward_of_the_tanh_gelu_from_its_input_obeys_the_rule(dtype, monkeypatch):
    monkeypatch.setattr(cpu_pointwise, "COMPILED_ELEMENTS", 64)
    monkeypatch.setattr(cpu_pointwise, "_add_in_chunks", lambda *_: pytest.fail("in chunks"))
    x, bias, grad = torch.rand(50, 3, 40) * 16 - 8, torch.randn(40), torch.randn(50, 3, 40)
    inputs = [t.to(dtype) for t in (x, bias, grad)]

    def differentiate(module, dtype):
        tensors = [t.to(dtype) for t in inputs]
        return module.backward(tensors[2], *tensors[:2], "gelu_tanh", True)

    exact = differentiate(eager_pointwise, torch.float64)
    for name, *found in zip(("x", "bias"), differentiate(cpu_pointwise, dtype), differentiate(eager_pointwise, dtype),
                            exact, strict=True):  # fmt: skip
        assert_within_rule(name, *found)


@compiles
def test_the_compiled_backward_of_squared_relu_is_the_specification_bit_for_bit(monkeypatch):
    y, grad = torch.relu(torch.randn(300, 1000)).square(), torch.randn(300, 1000)
    y[0, :3] = torch.tensor([torch.inf, torch.nan, 1e-42])
    expected = eager_squared_relu.backward(grad, y, True)
    monkeypatch.setattr(cpu_squared_relu, "COMPILED_ELEMENTS", 64)
    monkeypatch.setattr(cpu_squared_relu, "take_root", lambda _: pytest.fail("not compiled"))
    for found, like in zip(cpu_squared_relu.backward(grad.mT.contiguous().mT, y, True), expected, strict=True):
        torch.testing.assert_close(found, like, rtol=0, atol=0, equal_nan=True)


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


@compiles
@parametrize_covering(
    each={
        "operation": {name: GATED[name] for name in ("swiglu", "geglu", "reglu")},
        "has_bias": [True, False],
        "dtype": [torch.float32, torch.bfloat16],
    }
)
def test_gated_units_in_one_pass_obey_the_rule(operation, has_bias, dtype, monkeypatch):
    used = []
    monkeypatch.setattr(cpu_glu, "COMPILED_ELEMENTS", 64)
    monkeypatch.setattr(cpu_glu, "_add_in_blocks", lambda *_: used.append(1) or [])
    x, bias, grad = torch.rand(50, 3, 40) * 16 - 8, torch.randn(40) if has_bias else None, torch.randn(50, 3, 20)
    assert_three_witnesses(*operation, [x, bias], grad, dtype)
    assert not used

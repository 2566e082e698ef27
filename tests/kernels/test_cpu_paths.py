"""What is fast on a CPU (cpu.py) against its specification (eager.py), whole tensors at once, in the same room."""

from __future__ import annotations

import torch
from covering import parametrize_covering
from witness import assert_within_rule

from tempo_kernels.activation import ACTIVATIONS
from tempo_kernels.activation import cpu as activation_cpu
from tempo_kernels.activation import eager as activation_eager

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SHAPES = [(37, 3, 48), (5, 33), (1, 1), (0, 16), (3, 0), (1024,)]


def assert_same(found, expected):
    assert (found is None) == (expected is None)
    if found is not None:
        assert found.dtype == expected.dtype and found.is_contiguous() and expected.is_contiguous()
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@parametrize_covering(each={"shape": SHAPES}, dtype=DTYPES, activation=ACTIVATIONS.keys())
def test_an_activation_in_chunks_is_the_specification_bit_for_bit(shape, dtype, activation):
    torch.manual_seed(0)
    x, grad = (torch.rand(shape) * 16 - 8).to(dtype), torch.randn(shape).to(dtype)
    small = {"chunk_elements": 128}
    for bias in (None, torch.randn(shape[-1]).to(dtype)):
        y, _ = activation_eager.forward(x, bias, activation, "recompute")
        assert_same(activation_cpu.forward(x, bias, activation, "recompute", **small)[0], y)
        out = torch.empty_like(y)
        assert activation_cpu.forward(x, bias, activation, "recompute", out, **small)[0] is out
        assert_same(out, y)
        operands = grad, x, bias, None, activation, "recompute", True
        found = activation_cpu.backward(*operands, **small)
        for ours, theirs in zip(found, activation_eager.backward(*operands), strict=True):
            assert_same(ours, theirs)


@parametrize_covering(
    each={"shape": SHAPES},
    dtype=DTYPES,
    activation=[name for name, row in ACTIVATIONS.items() if row.slope_of_output is not None],
)
def test_an_activation_in_place_in_chunks_is_the_specification_bit_for_bit(shape, dtype, activation):
    torch.manual_seed(0)
    x, grad = (torch.rand(shape) * 16 - 8).to(dtype), torch.randn(shape).to(dtype)
    for bias in (None, torch.randn(shape[-1]).to(dtype)):
        y, bits = activation_eager.forward(x, bias, activation, "inplace")
        operands = grad, y, None, bits, activation, "inplace", True
        found = activation_cpu.forward(x, bias, activation, "inplace", chunk_elements=128)
        found += activation_cpu.backward(*operands, chunk_elements=128)
        expected = y, bits, *activation_eager.backward(*operands)
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours, theirs)


@parametrize_covering(
    each={"shape": [(37, 3, 48), (5, 34), (1, 2), (0, 16), (3, 0), (1024,)]},
    dtype=DTYPES,
    activation=ACTIVATIONS.keys(),
)
def test_gated_units_in_chunks_are_the_specification(shape, dtype, activation):
    torch.manual_seed(0)
    x = (torch.rand(shape) * 16 - 8).to(dtype)
    grad = torch.randn(*shape[:-1], shape[-1] // 2).to(dtype)
    for bias in (None, torch.randn(shape[-1]).to(dtype)):

        def results(module, dtype, bias=bias, **small):
            grad_y, x_, bias_ = (None if t is None else t.to(dtype) for t in (grad, x, bias))
            y, _ = module.forward(x_, bias_, activation, "gated", **small)
            return y, *module.backward(grad_y, x_, bias_, None, activation, "gated", True, **small)

        exact = results(activation_eager, torch.float64)
        found = results(activation_cpu, dtype, chunk_elements=128)
        for name, *witnesses in zip(
            ("y", "grad_x", "grad_bias"), found, results(activation_eager, dtype), exact, strict=True
        ):
            if dtype == torch.float64:
                torch.testing.assert_close(*witnesses[:2], rtol=1e-12, atol=1e-12)
            else:
                assert_within_rule(name, *witnesses)

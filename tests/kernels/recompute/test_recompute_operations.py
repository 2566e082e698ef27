"""Operations of this package that keep their input, dropped without anybody's hooks in place."""

from __future__ import annotations

import pytest
import torch
from covering import parametrize_covering
from dropped import assert_close, assert_same, leaves, linear_of
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from tempo_kernels.gelu import gelu
from tempo_kernels.glu import geglu, reglu, swiglu
from tempo_kernels.norm import layer_norm, rms_norm
from tempo_kernels.recompute import drop
from tempo_kernels.squared_relu import squared_relu

OPERATIONS = {
    "gelu": lambda x, bias: gelu(x, bias, keep="input"),
    "squared_relu": lambda x, bias: squared_relu(x, bias, keep="input"),
    "layer_norm": lambda x, bias: layer_norm(x, bias, bias, keep="input"),
    "rms_norm": lambda x, bias: rms_norm(x, bias, keep="input"),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_two_users_of_an_operation_of_this_package_have_it_made_again_once(operation):
    inputs, linears, refilled = leaves(), [linear_of(1), linear_of(2)], []
    y = operation(*inputs)
    refill = y.grad_fn.refill

    def count(node, out):
        refilled.append(StorageWeakRef(out.untyped_storage()))
        refill(node, out)

    y.grad_fn.refill = count
    outs = [linear(y) for linear in linears]
    drop(y, after=outs)
    memory = StorageWeakRef(y.untyped_storage())
    del y
    assert memory.expired()
    middle = operation(*inputs)
    expected = [linear(middle).square().sum() for linear in linears]
    assert_same(torch.autograd.grad(outs[0].square().sum() + outs[1].square().sum(), inputs, retain_graph=True),
                torch.autograd.grad(expected[0] + expected[1], inputs))  # fmt: skip
    assert [one.expired() for one in refilled] == [True]


def test_norm_and_gelu_with_their_linears_between_are_dropped_together():
    x, gamma = leaves()
    first, second = nn.Linear(24, 24), linear_of()

    def block(keep):
        y = layer_norm(x, gamma, gamma, keep=keep)
        hidden = first(y)
        a = gelu(hidden, keep=keep)
        out = second(a)
        if keep == "input":
            drop(a, after=out)
            drop(y, after=out)
        return out, [StorageWeakRef(t.untyped_storage()) for t in (y, a)]

    leaf_tensors = [x, gamma, *first.parameters(), *second.parameters()]
    out, memories = block("input")
    assert [memory.expired() for memory in memories] == [True, True]
    y = F.gelu(first(layer_norm(x, gamma, gamma, keep="input")))
    assert_close(
        torch.autograd.grad(out.square().sum(), leaf_tensors),
        torch.autograd.grad(second(y).square().sum(), leaf_tensors),
    )


@parametrize_covering(
    each={"operation": {each.__name__: each for each in (swiglu, geglu, reglu)}, "num_elements": [2**10, 2**20 + 4]}
)
def test_a_gated_activation_is_dropped_at_any_size(operation, num_elements):
    """Large ones are compiled on a CPU and come as a view of what the compiled function gave."""
    x = torch.randn(2, num_elements // 2, requires_grad=True)
    y = operation(x)
    out = y * y
    expected = torch.autograd.grad(out.sum(), x, retain_graph=True)
    drop(y, after=out)
    memory = StorageWeakRef(y.untyped_storage())
    del y
    assert memory.expired()
    assert_same(torch.autograd.grad(out.sum(), x), expected)

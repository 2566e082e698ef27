"""Launches by plans: one plan for equal arguments, the tensors' device, and no number that compiles a kernel again."""

from __future__ import annotations

import contextlib
import os
import shutil
from functools import partial

import pytest
import torch

from tempo_kernels.attention import attention
from tempo_kernels.dropout_add import bias_dropout_add
from tempo_kernels.gelu import gelu
from tempo_kernels.kernel_launch import Plan, cache_plans, forget_plans, launch
from tempo_kernels.linear_cross_entropy import linear_cross_entropy
from tempo_kernels.norm import layer_norm


def test_equal_arguments_give_the_same_plan_until_plans_are_forgotten():
    @cache_plans
    def plan(size, flag):
        return Plan((size,), HAS_Y=flag)

    first = plan(5, True)
    assert plan(5, True) is first
    assert plan(5, 1) is not first and plan(6, True) is not first
    forget_plans()
    assert plan(5, True) is not first


def test_a_kernel_gets_its_arguments_in_order_on_the_device_of_its_first_tensor(monkeypatch):
    current, seen = [0], []

    @contextlib.contextmanager
    def device(number):
        current.append(number)
        yield
        current.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda *tensors, **named: seen.append((current[-1], grid, tensors, named))

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    plan, x = Plan((5, 2), ("shift",), size=16, num_warps=1), torch.zeros(16)
    for number in (-1, 0, 1):  # a CPU's, the current one, another
        monkeypatch.setattr(torch.Tensor, "get_device", lambda _, number=number: number)
        launch(Kernel(), plan, (x, None), (3,))
    named = {"shift": 3, "size": 16, "num_warps": 1}
    assert seen == [(where, (5, 2), (x, None), named) for where in (0, 0, 1)] and current == [0]
    with pytest.raises(ValueError, match="shorter"):
        launch(Kernel(), plan, (x, None))


def leaves(*shapes):
    return [torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]


def run_attention(q, k, v, key):
    return attention(q, k, v, causal=True, softmax_scale=0.125, dropout_p=0.1, dropout_key=key)


LABELS = torch.zeros(2, 4, dtype=torch.int64)
OPERATIONS = {
    "gelu": (lambda x, bias, key: gelu(x, bias), leaves((4, 2, 64), (64,))),
    "layer_norm": (lambda *x, key: layer_norm(*x, keep="recompute"), leaves((4, 2, 64), (64,), (64,))),
    "bias_dropout_add": (partial(bias_dropout_add, p=0.1), leaves((4, 2, 64), (64,), (4, 2, 64))),
    "attention": (run_attention, leaves(*[(8, 2, 1, 64)] * 3)),
    "linear_cross_entropy": (
        lambda x, weight, key: linear_cross_entropy(x, weight, labels=LABELS),
        leaves((4, 2, 64), (32, 64)),
    ),
}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter launches nothing")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the faked driver is compiled by gcc, which is not found")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the faked driver stands where there is no GPU")
@pytest.mark.parametrize(("operation", "inputs"), OPERATIONS.values(), ids=OPERATIONS)
def test_no_number_of_a_call_compiles_a_kernel_again(monkeypatch, operation, inputs):
    triton = pytest.importorskip("triton", reason="triton is not installed; it is part of the `test` extra")
    if not hasattr(triton, "knobs"):
        pytest.skip("triton 3.3 has no hook that tells of what is compiled")
    from fake_gpu import fake_gpu

    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **what: compiled.append(what["repr"]) and None)
    forget_plans()
    with fake_gpu() as count_launches:
        operation(*inputs, key=1 << 40).sum().backward()
        num_launches = count_launches()
        compiled.clear()
        for key in (0, 1, 16, 1 << 63):
            operation(*inputs, key=key).sum().backward()
        assert count_launches() > num_launches and not compiled
    forget_plans()

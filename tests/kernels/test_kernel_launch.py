"""Launches by plans: one plan for equal arguments, and the tensors' device."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tempo_kernels.kernel_launch import Plan, cache_plans, forget_plans, launch


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

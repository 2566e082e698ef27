"""drop with `make`: tensors of any operation go, and one run of `make` in backward brings all of them back."""

from __future__ import annotations

import pytest
import torch
from dropped import assert_same, bias_gelu, leaves, linear_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from tempo_kernels import recompute as room
from tempo_kernels.recompute import drop, hold, recompute


class Linear:
    """x W, which counts its runs."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.randn(24, 24, generator=torch.Generator().manual_seed(3)))
        self.num_runs = 0

    def __call__(self, x):
        self.num_runs += 1
        return x @ self.weight


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def split(mixed):
    """q, k and v: views of one memory, as Megatron makes them."""
    return [part.transpose(0, 1) for part in mixed.chunk(3, -1)]


@pytest.mark.parametrize("num_backwards", [1, 2])
def test_one_run_brings_back_all_views_of_one_memory(num_backwards):
    (x, _), linear, last = leaves(), Linear(), linear_of(1)
    mixed = linear(x)
    parts = split(mixed)
    context = attend(*parts)
    held = hold(x)
    drop((mixed, *parts), after=context, make=lambda: (again := linear(held()), *split(again)))
    memory = StorageWeakRef(mixed.untyped_storage())
    del mixed, parts
    assert memory.expired() and linear.num_runs == 1
    found = [torch.autograd.grad(context.square().sum(), [x, linear.weight], retain_graph=True)]
    found += [torch.autograd.grad(context.square().sum(), [x, linear.weight]) for _ in range(num_backwards - 1)]
    assert linear.num_runs == 1 + num_backwards
    del last
    expected = torch.autograd.grad(attend(*split(linear(x))).square().sum(), [x, linear.weight])
    for each in found:
        assert_same(each, expected)


def test_a_chain_makes_each_tensor_once(monkeypatch):
    """The first linear's input was dropped too: it is made for the repetition, and once for both."""
    inputs, first, last = leaves(), Linear(), linear_of()
    refills = []
    refill = room.function._refill
    monkeypatch.setattr(room.function, "_refill", lambda ctx, out: (refills.append(out.shape), refill(ctx, out))[1])

    def run(again):
        x = recompute(bias_gelu, *inputs)
        held = hold(x) if again else None
        a = first(x)
        drop(x, after=a)
        y = recompute(torch.sigmoid, a)
        out = last(y)
        drop(y, after=out)
        if again:
            drop(a, after=y, make=lambda: (first(held()),))
        memory = [StorageWeakRef(t.untyped_storage()) for t in (x, a, y)]
        del x, a, y
        assert [each.expired() for each in memory] == [True, again, True]
        return torch.autograd.grad(out.square().sum(), [*inputs, first.weight, *last.parameters()])

    expected = run(False)
    num_runs, num_refills = first.num_runs, len(refills)
    assert_same(run(True), expected)
    assert first.num_runs == num_runs + 2 and len(refills) == 2 * num_refills


@pytest.mark.filterwarnings("ignore:saved_tensors_hooks")
def test_where_nothing_is_kept_nothing_is_dropped_and_nothing_made():
    (x, _), linear = leaves(), Linear()
    with torch.no_grad():
        y = linear(x)
        drop(y, after=y.sigmoid(), make=lambda: pytest.fail("nobody asks"))
    with torch.autograd.graph.save_on_cpu():
        y = linear(x)
        out = y.sigmoid() * y
        drop(y, after=out, make=lambda: pytest.fail("nobody asks"))
    out.sum().backward()


def test_what_lies_in_memory_in_another_way_is_no_answer():
    (x, _), linear = leaves(), Linear()
    y = linear(x)
    out = y.square()
    drop(y, after=out, make=lambda: (linear(x).transpose(0, 1).contiguous().transpose(0, 1),))
    with pytest.raises(AssertionError):
        out.sum().backward()


def test_hold_gives_what_nobody_can_make_again_as_it_is():
    (x, _) = leaves()
    assert hold(x)().data_ptr() == x.data_ptr() and not hold(x)().requires_grad

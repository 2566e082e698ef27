"""drop: memory goes when its last holder goes, comes back for backward, and nobody ever reads what is gone."""

from __future__ import annotations

import gc

import pytest
import torch
from dropped import Counted, assert_same, bias_gelu, dropping, gradients_of, leaves, linear_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tempo_kernels.recompute import drop, recompute


def plain_swiglu(x, bias):
    gate, up = (x + torch.cat([bias, bias])).chunk(2, -1)
    return F.silu(gate) * up


def scaled_exponential(x, bias):
    return torch.exp(x) * bias


PRODUCERS = {"bias and gelu": (bias_gelu, 24), "swiglu": (plain_swiglu, 48), "exponential": (scaled_exponential, 24)}


@pytest.mark.parametrize(("function", "width"), PRODUCERS.values(), ids=PRODUCERS)
def test_outputs_and_gradients_are_those_of_the_plain_function_bit_for_bit(function, width):
    inputs, linear = leaves(width), linear_of()
    out, _ = dropping(function, linear)(*inputs)
    expected = linear(function(*inputs))
    assert torch.equal(out, expected)
    assert_same(gradients_of(out, inputs, linear), gradients_of(expected, inputs, linear))


def test_the_output_takes_no_memory_between_forward_and_backward_and_none_after():
    function, inputs, linear = Counted(), leaves(), linear_of()
    out, _ = dropping(function, linear)(*inputs)
    assert function.alive == [False]
    in_backward = []
    linear.weight.register_hook(lambda _: in_backward.append(function.alive))
    gradients_of(out, inputs, linear)
    assert in_backward == [[False, True]]
    assert function.alive == [False, False]


def test_a_backward_that_stops_at_the_weight_keeps_nothing_for_a_gradient_that_nobody_asked_for():
    function, inputs, linear = Counted(), leaves(), linear_of()
    out, _ = dropping(function, linear)(*inputs)
    torch.autograd.grad(out.sum(), linear.weight, retain_graph=True)
    assert function.alive == [False, False]


def test_a_retained_graph_runs_backward_any_number_of_times():
    function, inputs, linear = Counted(), leaves(), linear_of()
    out, _ = dropping(function, linear)(*inputs)
    leaf_tensors = [*inputs, *linear.parameters()]
    first, second = (torch.autograd.grad(out.sum(), leaf_tensors, retain_graph=True) for _ in range(2))
    assert_same(first, second)
    assert function.alive == [False, False, False]


def test_no_reference_cycle_holds_an_unused_graph():
    x, bias = leaves()
    inputs, linear = [x * 1, bias], linear_of()
    memory = StorageWeakRef(inputs[0].untyped_storage())
    gc.collect()
    gc.disable()
    try:
        y = recompute(bias_gelu, *inputs)
        outs = [linear(y), y.exp(), y * y]  # one of them keeps its own output
        drop(y, after=outs)
        del y, outs, inputs
        assert memory.expired()
    finally:
        gc.enable()


def test_two_linears_may_use_one_output_and_share_one_more_run():
    function, inputs, linears = Counted(), leaves(), [linear_of(1), linear_of(2)]
    y = recompute(function, *inputs)
    outs = [linear(y) for linear in linears]
    drop(y, after=outs)
    del y
    assert function.alive == [False]
    middle = bias_gelu(*inputs)
    expected = [linear(middle) for linear in linears]
    leaf_tensors = [*inputs, *(p for linear in linears for p in linear.parameters())]
    found = torch.autograd.grad(outs[0].sum() + outs[1].square().sum(), leaf_tensors, retain_graph=True)
    assert_same(
        found, torch.autograd.grad(expected[0].sum() + expected[1].square().sum(), leaf_tensors, retain_graph=True)
    )
    assert function.alive == [False, False]
    # One of them alone, too.
    assert_same(torch.autograd.grad(outs[1].sum(), inputs), torch.autograd.grad(expected[1].sum(), inputs))


def test_an_output_may_be_used_twice_by_one_operation():
    inputs = leaves()
    y = recompute(bias_gelu, *inputs)
    out = y * y
    drop(y, after=out)
    memory = StorageWeakRef(y.untyped_storage())
    del y
    assert memory.expired()
    assert_same(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad((bias_gelu(*inputs) ** 2).sum(), inputs))


def test_an_operation_that_keeps_a_part_gets_that_part_again():
    inputs = leaves()
    y = recompute(lambda x, bias: bias_gelu(x, bias).transpose(0, 1), *inputs)
    outs = [y[1].square(), y.permute(2, 1, 0)[3:7, ::2].square()]
    drop(y, after=outs)
    memory = StorageWeakRef(y.untyped_storage())
    del y
    assert memory.expired()
    y = bias_gelu(*inputs).transpose(0, 1)
    expected = y[1].square().sum() + y.permute(2, 1, 0)[3:7, ::2].square().sum()
    assert_same(torch.autograd.grad(outs[0].sum() + outs[1].sum(), inputs), torch.autograd.grad(expected, inputs))


def test_micro_batches_may_be_in_flight_together_and_gradients_accumulate():
    linear, batches = linear_of(), [leaves(seed=seed) for seed in range(3)]
    outs = [dropping(bias_gelu, linear)(*inputs)[0] for inputs in batches]
    for out in (outs[1], outs[2], outs[0]):
        out.square().sum().backward()
    found = [linear.weight.grad.clone(), *(t.grad for inputs in batches for t in inputs)]
    linear.zero_grad()
    for inputs in batches:
        for t in inputs:
            t.grad = None
    for index in (1, 2, 0):
        linear(bias_gelu(*batches[index])).square().sum().backward()
    assert_same(found, [linear.weight.grad, *(t.grad for inputs in batches for t in inputs)])


def test_without_gradients_nothing_is_dropped():
    inputs, linear = leaves(), linear_of()
    with torch.no_grad():
        out, _ = dropping(bias_gelu, linear)(*inputs)
    assert torch.equal(out, linear(bias_gelu(*inputs)))


def test_a_frozen_linear_passes_the_gradient_on():
    inputs, linear = leaves(), linear_of().requires_grad_(False)
    out, _ = dropping(bias_gelu, linear)(*inputs)
    assert_same(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(linear(bias_gelu(*inputs)).sum(), inputs))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_region_gives_the_same_gradients(use_reentrant):
    inputs, linear = leaves(), linear_of()

    def block(*tensors):
        return dropping(bias_gelu, linear)(*tensors)[0].square()

    out = checkpoint(block, *inputs, use_reentrant=use_reentrant)
    out.sum().backward()
    found = [*(t.grad for t in inputs), linear.weight.grad]
    expected = linear(bias_gelu(*inputs)).square().sum()
    assert_same(found, torch.autograd.grad(expected, [*inputs, linear.weight]))


def test_an_exception_in_backward_leaves_a_graph_that_can_run_again():
    inputs, linear = leaves(), linear_of()
    y = recompute(bias_gelu, *inputs)
    out = linear(y)
    drop(y, after=out)
    failures = iter([True, False])

    def fail(_):
        if next(failures, False):
            raise RuntimeError("interrupted")

    y.register_hook(fail)
    with pytest.raises(RuntimeError, match="interrupted"):
        out.sum().backward(retain_graph=True)
    assert_same(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(linear(bias_gelu(*inputs)).sum(), inputs))


def test_an_empty_output_is_left_alone():
    x, bias = torch.randn(0, 2, 24, requires_grad=True), torch.randn(24, requires_grad=True)
    out, _ = dropping(bias_gelu, linear_of())(x, bias)
    out.sum().backward()
    assert x.grad.shape == x.shape

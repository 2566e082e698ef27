from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from witness import kept_storages

from tempo_kernels.recompute import drop, recompute


def bias_gelu(x, bias):
    return F.gelu(x + bias)


def swiglu(x, bias):
    gate, up = (x + torch.cat([bias, bias])).chunk(2, -1)
    return F.silu(gate) * up


def scaled_exponential(x, bias):
    return torch.exp(x) * bias


PRODUCERS = {"bias and gelu": (bias_gelu, 24), "swiglu": (swiglu, 48), "exponential": (scaled_exponential, 24)}


def leaves(width=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, requires_grad=True) for shape in [(6, 2, width), (24,)]]


def linear_of(seed=1):
    torch.manual_seed(seed)
    return nn.Linear(24, 16)


def dropping(function, linear):
    """linear(function(...)) whose middle is dropped, and the middle."""

    def run(*inputs):
        y = recompute(function, *inputs)
        out = linear(y)
        drop(y, after=out)
        return out, y

    return run


def gradients_of(out, inputs, linear):
    return torch.autograd.grad(out.square().sum(), [*inputs, *linear.parameters()])


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("function", "width"), PRODUCERS.values(), ids=PRODUCERS)
def test_outputs_and_gradients_are_those_of_the_plain_function_bit_for_bit(function, width):
    inputs, linear = leaves(width), linear_of()
    out, _ = dropping(function, linear)(*inputs)
    expected = linear(function(*inputs))
    assert torch.equal(out, expected)
    assert_same(gradients_of(out, inputs, linear), gradients_of(expected, inputs, linear))


def test_the_output_takes_no_memory_between_forward_and_backward_and_none_after():
    inputs, linear = leaves(), linear_of()
    out, y = dropping(bias_gelu, linear)(*inputs)
    assert y.untyped_storage().nbytes() == 0
    sizes = []
    out.register_hook(lambda _: sizes.append(y.untyped_storage().nbytes()))
    gradients_of(out, inputs, linear)
    assert sizes == [y.numel() * 4]
    assert y.untyped_storage().nbytes() == 0


def test_what_is_kept_are_the_inputs_and_the_weight():
    inputs, linear = leaves(), linear_of()
    kept = kept_storages(lambda *tensors: dropping(bias_gelu, linear)(*tensors)[0], *inputs)
    # The recorder sees every tensor when it is kept; the dropped one is among them, as y was alive then.
    allowed = {t.untyped_storage().data_ptr() for t in (*inputs, linear.weight)}
    assert sum(1 for pointer in kept if pointer not in allowed) == 1


def test_a_retained_graph_runs_backward_any_number_of_times():
    inputs, linear = leaves(), linear_of()
    out, y = dropping(bias_gelu, linear)(*inputs)
    wanted = [*inputs, *linear.parameters()]
    first, second = (torch.autograd.grad(out.sum(), wanted, retain_graph=True) for _ in range(2))
    assert_same(first, second)
    assert y.untyped_storage().nbytes() == 0


def test_two_linears_may_use_one_output():
    inputs, linears = leaves(), [linear_of(1), linear_of(2)]
    y = recompute(bias_gelu, *inputs)
    outs = [linear(y) for linear in linears]
    drop(y, after=outs)
    middle = bias_gelu(*inputs)
    expected = [linear(middle) for linear in linears]
    wanted = [*inputs, *(p for linear in linears for p in linear.parameters())]
    found = torch.autograd.grad(outs[0].sum() + outs[1].square().sum(), wanted, retain_graph=True)
    assert_same(found, torch.autograd.grad(expected[0].sum() + expected[1].square().sum(), wanted, retain_graph=True))
    # One of them alone, too.
    assert_same(torch.autograd.grad(outs[1].sum(), inputs), torch.autograd.grad(expected[1].sum(), inputs))


def test_an_output_may_be_used_twice_by_one_operation():
    inputs = leaves()
    y = recompute(bias_gelu, *inputs)
    out = y * y
    drop(y, after=out)
    assert_same(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad((bias_gelu(*inputs) ** 2).sum(), inputs))


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
        out, y = dropping(bias_gelu, linear)(*inputs)
    assert torch.equal(out, linear(y))


def test_a_frozen_linear_passes_the_gradient_on():
    inputs, linear = leaves(), linear_of().requires_grad_(False)
    out, _ = dropping(bias_gelu, linear)(*inputs)
    assert_same(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(linear(bias_gelu(*inputs)).sum(), inputs))


def test_inputs_without_gradient_and_other_arguments_pass_through():
    x, bias = leaves()
    linear = linear_of()
    run = dropping(lambda x, bias, scale: F.gelu(x + bias) * scale, linear)
    out, _ = run(x, bias.detach(), 0.5)
    expected = linear(F.gelu(x + bias.detach()) * 0.5)
    assert_same(torch.autograd.grad(out.sum(), x), torch.autograd.grad(expected.sum(), x))


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


def test_tensors_kept_in_other_memory_by_somebodys_hooks_do_not_mind():
    inputs, linear = leaves(), linear_of()
    with torch.autograd.graph.save_on_cpu():
        out, _ = dropping(bias_gelu, linear)(*inputs)
    assert_same(gradients_of(out, inputs, linear), gradients_of(linear(bias_gelu(*inputs)), inputs, linear))


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


def test_a_refill_that_fails_leaves_nothing_half_filled():
    failing = [False]

    def function(x, bias):
        if failing[0]:
            raise RuntimeError("out of memory")
        return bias_gelu(x, bias)

    inputs, linear = leaves(), linear_of()
    out, y = dropping(function, linear)(*inputs)
    failing[0] = True
    with pytest.raises(RuntimeError, match="out of memory"):
        out.sum().backward(retain_graph=True)
    assert y.untyped_storage().nbytes() == 0
    failing[0] = False
    assert_same(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(linear(bias_gelu(*inputs)).sum(), inputs))


def test_no_state_of_a_random_generator_is_asked_for_or_changed(monkeypatch):
    def refuse(*_):
        raise AssertionError("the random state was touched")

    inputs, linear = leaves(), linear_of()
    before = torch.get_rng_state()
    for name in ("get_rng_state", "set_rng_state", "fork_rng"):
        monkeypatch.setattr(torch.random, name, refuse)
    out, _ = dropping(bias_gelu, linear)(*inputs)
    out.sum().backward()
    monkeypatch.undo()
    assert torch.equal(before, torch.get_rng_state())


def made_with(use):
    """What `use(y, linear)` gives to drop as (y, after)."""
    y = recompute(bias_gelu, *leaves())
    return use(y, linear_of())


def second_user(y, linear):
    made_with.alive = y.square()  # keeps y, and is not named
    return y, linear(y)


def view_of_it(y, linear):
    made_with.alive = y.view(-1)
    return y, linear(y)


def detached(y, linear):
    made_with.alive = y.detach()
    return y, linear(y)


REFUSED = {
    "another operation keeps it": (second_user, "shared by 1 other"),
    "a view is alive": (view_of_it, "shared by 2 other"),
    "a detached tensor is alive": (detached, "shared by 1 other"),
    "after is a view of it": (lambda y, linear: (y, y.view(-1)), "`after` is y or a view"),
    "it is a slice": (lambda y, linear: (y[:2], linear(y[:2])), "cannot make it again"),
    "it was made by torch": (lambda y, linear: ((z := y * 2), linear(z)), "MulBackward0, which cannot make it again"),
}


@pytest.mark.parametrize(("use", "message"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_read_after_it_is_gone_is_refused_and_nothing_is_lost(use, message):
    y, after = made_with(use)
    with pytest.raises(ValueError, match=message):
        drop(y, after=after)
    assert y.untyped_storage().nbytes() > 0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x, "one of its inputs"),
        (lambda x: x.view(-1), "one of its inputs"),
        (lambda x: x.exp().mT, "not contiguous"),
    ],
    ids=["input", "view", "strided"],
)
def test_a_producer_without_memory_of_its_own_is_refused(function, message):
    with pytest.raises(ValueError, match=message):
        recompute(function, torch.randn(4, 6, requires_grad=True))


def test_a_second_derivative_raises():
    x, bias = leaves()
    (grad,) = torch.autograd.grad(recompute(bias_gelu, x, bias).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_an_empty_output_is_left_alone():
    x, bias = torch.randn(0, 2, 24, requires_grad=True), torch.randn(24, requires_grad=True)
    out, _ = dropping(bias_gelu, linear_of())(x, bias)
    out.sum().backward()
    assert x.grad.shape == x.shape

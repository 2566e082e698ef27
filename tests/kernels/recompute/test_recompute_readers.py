"""Whoever reads a dropped tensor, or keeps saved tensors in a way of their own, finds what was there."""

from __future__ import annotations

import pytest
import torch
from dropped import Counted, assert_same, bias_gelu, dropping, leaves, linear_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from tempo_kernels.gelu import gelu
from tempo_kernels.norm import layer_norm, rms_norm
from tempo_kernels.recompute import drop, graph, hold, recompute
from tempo_kernels.silu import silu
from tempo_kernels.squared_relu import squared_relu


def dropped():
    inputs, linear = leaves(), linear_of()
    y = recompute(bias_gelu, *inputs)
    return inputs, linear, y


READERS = {
    "another operation keeps it": lambda y: y.square(),
    "a view of it": lambda y: y.view(-1).exp(),
    "a detached tensor": lambda y: y.detach().square() + y,
    "the linear once more": lambda y: y * y.sigmoid(),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_second_reader_that_nobody_named_reads_what_was_there(read, when):
    inputs, linear, y = dropped()
    other = read(y) if when == "before" else None
    out = linear(y)
    drop(y, after=out)
    other = read(y) if other is None else other
    del y
    middle = bias_gelu(*inputs)
    # In the same order, as sums of gradients are taken in it.
    read_first = read(middle) if when == "before" else None
    expected = linear(middle).square().sum()
    expected = expected + (read(middle) if read_first is None else read_first).sum()
    assert_same(
        torch.autograd.grad(out.square().sum() + other.sum(), inputs),
        torch.autograd.grad(expected, inputs),
    )


def test_a_view_or_the_tensor_itself_given_as_after_changes_nothing():
    inputs, linear, y = dropped()
    drop(y, after=y.view(-1))
    drop(y, after=y)
    assert_same(
        torch.autograd.grad(linear(y).sum(), inputs), torch.autograd.grad(linear(bias_gelu(*inputs)).sum(), inputs)
    )


def test_what_torch_made_is_refused():
    _, linear, y = dropped()
    for tensor, name in ((y[:2], "SliceBackward0"), (y * 2, "MulBackward0")):
        with pytest.raises(ValueError, match=f"y was made by {name}, which cannot make it again"):
            drop(tensor, after=linear(tensor))


OPERATIONS = {
    "recompute": lambda x, bias: recompute(bias_gelu, x, bias),
    "silu": silu,
    "gelu": lambda x, bias: gelu(x, bias, keep="recompute"),
    "squared_relu": lambda x, bias: squared_relu(x, bias, keep="recompute"),
    "layer_norm": lambda x, bias: layer_norm(x, bias, bias, keep="recompute"),
    "rms_norm": lambda x, bias: rms_norm(x, bias, keep="recompute"),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("use", [lambda y, out: drop(y, after=out), lambda y, _: hold(y)], ids=["drop", "hold"])
def test_a_y_that_was_written_to_unseen_by_the_graph_is_refused(operation, use):
    inputs, linear = leaves(), linear_of()
    y = operation(*inputs)
    use(y, linear(y))
    y = operation(*inputs)
    with torch.no_grad():
        y.view(-1)[:4] = 3.0
    with pytest.raises(ValueError, match=r"y of shape \[6, 2, 24\] was written to in place .* return another tensor"):
        use(y, linear(y))


def test_a_y_that_was_written_to_is_no_matter_where_nothing_keeps_it():
    _, linear, y = dropped()
    linear.weight.requires_grad_(False)
    with torch.no_grad():
        y[0] = 3.0
    drop(y, after=linear(y))


def test_a_held_tensor_that_was_written_to_since_is_refused_when_it_is_taken():
    (x, _) = leaves()
    take = hold(x)
    with torch.no_grad():
        x[0] = 3.0
    with pytest.raises(
        RuntimeError, match=r"shape \[6, 2, 24\], from which a dropped tensor is made again, was written"
    ):
        take()


@pytest.mark.parametrize("hooks", [
    lambda: torch.autograd.graph.save_on_cpu(), lambda: torch.autograd.graph.saved_tensors_hooks(*[lambda t: t] * 2),
], ids=["save_on_cpu", "hooks that only look"])  # fmt: skip
def test_under_somebodys_hooks_what_they_keep_is_theirs_and_right_which_one_warning_says(hooks):
    inputs, linear, _ = dropped()
    graph._warn_of_hooks_from.cache_clear()
    with hooks():
        y = recompute(bias_gelu, *inputs)
        other = y.square()
        out = linear(y)
        with pytest.warns(RuntimeWarning, match="under them Tempo drops nothing") as found:
            drop(y, after=out)
            drop(y, after=out)
        assert len(found) == 1
        del y
    middle = bias_gelu(*inputs)
    assert_same(
        torch.autograd.grad(out.sum() + other.sum(), inputs),
        torch.autograd.grad(linear(middle).sum() + middle.square().sum(), inputs),
    )


class Linear(torch.autograd.Function):
    """As Megatron's linear: its backward looks at attributes of the very parameter that it was given."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        weight.has_grad = True
        return grad @ weight.T, x.flatten(0, -2).T @ grad.flatten(0, -2)


def test_the_linears_backward_finds_the_very_parameter_that_it_was_given():
    inputs, weight = leaves(), torch.nn.Parameter(torch.randn(24, 8))
    out, memory = dropping(bias_gelu, lambda y: Linear.apply(y, weight))(*inputs)
    assert memory.expired()
    found = torch.autograd.grad(out.square().sum(), [*inputs, weight])
    assert weight.has_grad
    expected = (bias_gelu(*inputs) @ weight).square().sum()
    for ours, theirs in zip(found, torch.autograd.grad(expected, [*inputs, weight]), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("is_weight", [True, False], ids=["weight", "input"])
def test_what_is_written_to_before_backward_is_autograds_own_error(is_weight):
    inputs, linear = leaves(), linear_of()
    out, _ = dropping(bias_gelu, linear)(*inputs)
    with torch.no_grad():
        (linear.weight if is_weight else inputs[0]).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_derivative_of_the_weights_gradient_is_that_of_the_plain_function():
    """It comes through the dropped tensor, which is connected to its graph as if it had been kept."""
    inputs, linear = leaves(), linear_of()
    out, memory = dropping(bias_gelu, linear)(*inputs)
    assert memory.expired()
    found = penalty_of(out, inputs, linear)
    assert_same(found, penalty_of(linear(bias_gelu(*inputs)), inputs, linear))
    assert found[0].abs().max() > 0


def penalty_of(out, inputs, linear):
    (grad,) = torch.autograd.grad(out.sum(), linear.weight, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), inputs)


@pytest.mark.parametrize("where", ["in the second run", "behind it"])
def test_a_backward_that_fails_leaves_a_graph_that_can_run_again(where):
    failing = []

    def fail(*_):
        if failing:
            raise RuntimeError("interrupted")

    def function(x, bias):
        if where == "in the second run":
            fail()
        return bias_gelu(x, bias)

    inputs, linear = leaves(), linear_of()
    y = recompute(function, *inputs)
    out = linear(y)
    drop(y, after=out)
    if where == "behind it":
        y.register_hook(fail)
    failing.append(True)
    with pytest.raises(RuntimeError, match="interrupted"):
        out.sum().backward(retain_graph=True)
    failing.clear()
    assert_same(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(linear(bias_gelu(*inputs)).sum(), inputs))


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_tensors_without_data_are_dropped_and_made_again_as_such(kind):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    function = Counted()
    with mode if kind == "fake" else torch.device("meta"):
        x, bias, weight = torch.empty(6, 2, 24), torch.empty(24), torch.empty(16, 24)
    inputs = [t.requires_grad_() for t in (x, bias, weight)]
    y = recompute(function, *inputs[:2])
    out = F.linear(y, inputs[2])
    drop(y, after=out)
    memory = StorageWeakRef(y.untyped_storage())
    del y
    assert memory.expired()
    grads = torch.autograd.grad(out.sum(), inputs)
    assert [grad.shape for grad in grads] == [t.shape for t in inputs]
    assert len(function.made) == 2

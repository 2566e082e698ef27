"""drop: memory goes when its last holder goes and comes back for backward; whoever reads finds what was there."""

from __future__ import annotations

import gc

import pytest
import torch
from covering import parametrize_covering
from dropped import Counted, bias_gelu, gradients_of, leaves, linear_of, run_dropped
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from witness import assert_same

from tempo_kernels.gelu import gelu
from tempo_kernels.glu import geglu, reglu, swiglu
from tempo_kernels.norm import layer_norm, rms_norm
from tempo_kernels.recompute import drop, hold, recompute
from tempo_kernels.silu import silu
from tempo_kernels.squared_relu import squared_relu


def test_the_output_takes_no_memory_between_forward_and_backward_and_none_after():
    function, inputs, linear = Counted(), leaves(), linear_of()
    out = run_dropped(linear, recompute, function, *inputs)
    assert function.alive == [False]
    in_backward = []
    linear.weight.register_hook(lambda _: in_backward.append(function.alive))
    gradients_of(out, inputs, linear)
    assert in_backward == [[False, True]]
    assert function.alive == [False, False]


def test_a_backward_that_stops_at_the_weight_keeps_nothing_for_a_gradient_that_nobody_asked_for():
    function, inputs, linear = Counted(), leaves(), linear_of()
    out = run_dropped(linear, recompute, function, *inputs)
    torch.autograd.grad(out.sum(), linear.weight, retain_graph=True)
    assert function.alive == [False, False]


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


def test_an_operation_that_keeps_a_part_gets_that_part_again():
    def square_parts(y):
        # Parts without elements hold the memory too: those of an expert without tokens.
        return [part.square() for part in (y[1], y.permute(2, 1, 0)[3:7, ::2], y[:0], y[len(y) :])]

    inputs = leaves()
    outs = run_dropped(square_parts, recompute, lambda x, bias: bias_gelu(x, bias).transpose(0, 1), *inputs)
    expected = square_parts(bias_gelu(*inputs).transpose(0, 1))
    found, expected = (torch.autograd.grad(sum(out.sum() for out in each), inputs) for each in (outs, expected))
    assert_same(found, expected)


def test_a_frozen_linear_passes_the_gradient_on():
    inputs, linear = leaves(), linear_of().requires_grad_(False)
    out = run_dropped(linear, recompute, bias_gelu, *inputs)
    assert_same(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(linear(bias_gelu(*inputs)).sum(), inputs))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_region_gives_the_same_gradients_without_a_warning(use_reentrant):
    inputs, linear = leaves(), linear_of()  # a warning would be an error

    def block(*tensors):
        y = recompute(bias_gelu, *tensors)
        out = linear(y)
        drop(y, after=out)
        return out.square()

    checkpoint(block, *inputs, use_reentrant=use_reentrant).sum().backward()
    expected = linear(bias_gelu(*inputs)).square().sum()
    found = [*(t.grad for t in inputs), linear.weight.grad]
    assert_same(found, torch.autograd.grad(expected, [*inputs, linear.weight]))


# Operations that keep their input.
OPERATIONS = {
    "recompute": lambda x, bias: recompute(bias_gelu, x, bias),
    "silu": silu,
    "gelu": lambda x, bias: gelu(x, bias, keep="recompute"),
    "squared_relu": lambda x, bias: squared_relu(x, bias, keep="recompute"),
    "layer_norm": lambda x, bias: layer_norm(x, bias, bias, keep="recompute"),
    "rms_norm": lambda x, bias: rms_norm(x, bias, keep="recompute"),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_two_linears_may_use_one_output_which_is_made_again_once(operation):
    inputs, linears, refilled = leaves(), [linear_of(1), linear_of(2)], []

    def make_counted():
        y = operation(*inputs)
        refill = y.grad_fn.refill
        y.grad_fn.refill = lambda node, out: (
            refill(node, out),
            refilled.append(StorageWeakRef(out.untyped_storage())),
        )
        return y

    outs = run_dropped(lambda y: [linear(y) for linear in linears], make_counted)
    expected = [linear(middle) for middle in [operation(*inputs)] for linear in linears]
    leaf_tensors = [*inputs, *(p for linear in linears for p in linear.parameters())]
    # Both of them, and one alone.
    for loss in (lambda a, b: a.sum() + b.square().sum(), lambda a, b: b.sum()):
        asked = leaf_tensors if not refilled else inputs
        assert_same(*(torch.autograd.grad(loss(*each), asked, retain_graph=True) for each in (outs, expected)))
        assert all(memory.expired() for memory in refilled)
    assert len(refilled) == 2


@parametrize_covering(
    each={"operation": {each.__name__: each for each in (swiglu, geglu, reglu)}, "num_elements": [2**10, 2**20 + 4]}
)
def test_a_gated_activation_is_dropped_at_any_size(operation, num_elements):
    """Large ones are compiled on a CPU and come as a view of what the compiled function gave."""
    x = torch.randn(2, num_elements // 2, requires_grad=True)
    out = run_dropped(torch.square, operation, x)
    assert_same(torch.autograd.grad(out.sum(), x), torch.autograd.grad(operation(x).square().sum(), x))


# With `make` tensors of any operation go, and one run of `make` in backward brings all of them back.
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
    (x, _), linear = leaves(), Linear()
    mixed = linear(x)
    parts = split(mixed)
    context = attend(*parts)
    held = hold(x)
    drop((mixed, *parts), after=context, make=lambda: (again := linear(held()), *split(again)))
    memory = StorageWeakRef(mixed.untyped_storage())
    del mixed, parts
    assert memory.expired() and linear.num_runs == 1
    loss = context.square().sum()
    found = [torch.autograd.grad(loss, [x, linear.weight], retain_graph=True) for _ in range(num_backwards)]
    assert linear.num_runs == 1 + num_backwards
    expected = torch.autograd.grad(attend(*split(linear(x))).square().sum(), [x, linear.weight])
    for each in found:
        assert_same(each, expected)


def test_a_chain_makes_each_tensor_once():
    """The first linear's input was dropped too: it is made for the repetition, and once for both."""
    inputs, first, last, function = leaves(), Linear(), linear_of(), Counted()

    def run(again):
        x = recompute(function, *inputs)
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
    num_runs = first.num_runs
    assert len(function.made) == 2
    assert_same(run(True), expected)
    assert first.num_runs == num_runs + 2 and len(function.made) == 4


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


def test_hold_gives_what_nobody_can_make_again_as_it_is():
    (x, _) = leaves()
    assert hold(x)().data_ptr() == x.data_ptr() and not hold(x)().requires_grad


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
    inputs, linear, _ = dropped()

    def differentiate(operation, drops):
        # In one order, as sums of gradients are taken in it.
        y = operation(*inputs)
        other = read(y) if when == "before" else None
        out = linear(y)
        if drops:
            drop(y, after=out)
        other = read(y) if other is None else other
        del y
        return torch.autograd.grad(out.square().sum() + other.sum(), inputs)

    assert_same(differentiate(lambda *t: recompute(bias_gelu, *t), True), differentiate(bias_gelu, False))


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


def test_a_held_tensor_that_was_written_to_since_is_refused_when_it_is_taken():
    (x, _) = leaves()
    take = hold(x)
    with torch.no_grad():
        x[0] = 3.0
    with pytest.raises(
        RuntimeError, match=r"shape \[6, 2, 24\], from which a dropped tensor is made again, was written"
    ):
        take()


def look(t):
    return t


look.__module__ = "somebody"  # of whom no other test's hooks are


def test_under_somebodys_hooks_what_they_keep_is_theirs_and_right_which_one_warning_says():
    inputs, linear, _ = dropped()
    with torch.autograd.graph.saved_tensors_hooks(look, look):
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


class MegatronsLinear(torch.autograd.Function):
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
    out = run_dropped(lambda y: MegatronsLinear.apply(y, weight), recompute, bias_gelu, *inputs)
    found = torch.autograd.grad(out.square().sum(), [*inputs, weight])
    assert weight.has_grad
    expected = (bias_gelu(*inputs) @ weight).square().sum()
    for ours, theirs in zip(found, torch.autograd.grad(expected, [*inputs, weight]), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_derivative_of_the_weights_gradient_is_that_of_the_plain_function():
    """It comes through the dropped tensor, which is connected to its graph as if it had been kept."""
    inputs, linear = leaves(), linear_of()
    out = run_dropped(linear, recompute, bias_gelu, *inputs)
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

    def use(y):
        if where == "behind it":
            y.register_hook(fail)
        return linear(y)

    out = run_dropped(use, recompute, function, *inputs)
    failing.append(True)
    with pytest.raises(RuntimeError, match="interrupted"):
        out.sum().backward(retain_graph=True)
    failing.clear()
    assert_same(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(linear(bias_gelu(*inputs)).sum(), inputs))

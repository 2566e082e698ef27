"""recompute differentiates every tensor among its arguments, and refuses what it could not repeat or differentiate."""

from __future__ import annotations

import collections
from typing import Any
from unittest import mock

import pytest
import torch
from dropped import leaves, linear_of, run_dropped
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from witness import assert_same

from tempo_kernels.attention import attention, cpu
from tempo_kernels.offload import Engine, Offload, move_all
from tempo_kernels.recompute import adopt, drop, keep_attention, recompute

Pair = collections.namedtuple("Pair", ["x", "scale"])


ARGUMENTS = {
    "list": (lambda pair: F.gelu(pair[0]) * pair[1], lambda x, scale: (([x, scale],), {})),
    "tuple in a dictionary": (lambda d: F.gelu(d["a"][0]) * d["b"], lambda x, b: (({"a": (x, 1), "b": b},), {})),
    "named tuple": (lambda pair: F.gelu(pair.x) * pair.scale, lambda x, scale: ((Pair(x, scale),), {})),
    "keywords": (lambda x, *, scale, n: F.gelu(x) * scale * n, lambda x, scale: ((x,), {"scale": scale, "n": 2.5})),
    "the same tensor twice": (lambda x, y, scale: F.gelu(x) * y * scale, lambda x, scale: ((x, x, scale), {})),
}  # fmt: skip


@pytest.mark.parametrize(("function", "arrange"), ARGUMENTS.values(), ids=ARGUMENTS)
@pytest.mark.parametrize("needs_grad", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("is_dropped", [True, False])
def test_tensors_wherever_they_are_among_the_arguments_are_differentiated(function, arrange, needs_grad, is_dropped):
    x, scale = (t.requires_grad_(needed) for t, needed in zip(leaves(), needs_grad, strict=True))
    args, kwargs = arrange(x, scale)
    linear = linear_of()
    run = run_dropped if is_dropped else lambda use, operation, *args, **kwargs: use(operation(*args, **kwargs))
    out = run(linear, recompute, function, *args, **kwargs)
    expected = linear(function(*args, **kwargs))
    assert torch.equal(out, expected)
    differentiated = [t for t in (x, scale) if t.requires_grad]
    assert_same(torch.autograd.grad(out.sum(), differentiated), torch.autograd.grad(expected.sum(), differentiated))


def test_a_module_goes_as_a_function_of_its_tensors():
    x, module = leaves()[0], nn.Sequential(nn.PReLU(2), nn.Linear(24, 24))
    expected = torch.autograd.grad(module(x).sin().sum(), [x, *module.parameters()])
    out = run_dropped(torch.sin, recompute, torch.func.functional_call, module, dict(module.named_parameters()), (x,))
    assert_same(torch.autograd.grad(out.sum(), [x, *module.parameters()]), expected)


weight = nn.Parameter(torch.rand(24))
prelu = nn.PReLU()
REACHED_OTHERWISE = {
    "a global parameter": lambda x: x * weight,
    "a module in a closure": lambda x: prelu(x),
    "a bound method": prelu.forward,
    "what was computed outside": (lambda scaled: lambda x: x * scaled)(weight * 2),
    "a default argument": lambda x, w=weight: x * w,
}


@pytest.mark.parametrize("function", REACHED_OTHERWISE.values(), ids=REACHED_OTHERWISE)
@pytest.mark.parametrize("x_needs_grad", [True, False])
def test_a_tensor_that_needs_a_gradient_and_is_no_argument_is_refused(function, x_needs_grad):
    x = leaves()[0].requires_grad_(x_needs_grad)
    with pytest.raises(ValueError, match="needs a gradient and is not an argument; pass it as an argument"):
        recompute(function, x)


def test_a_tensor_in_a_closure_that_needs_no_gradient_is_as_in_the_plain_function():
    x, constant = leaves()[0], torch.rand(24)
    (found,) = torch.autograd.grad(recompute(lambda x: x.exp() * constant, x).sum(), x)
    assert torch.equal(found, torch.autograd.grad((x.exp() * constant).sum(), x)[0])


DRAWING = {"dropout": lambda x: F.dropout(x, 0.5), "rand": lambda x: x + torch.rand(24), "a module": nn.Dropout(0.1)}


@pytest.mark.parametrize("function", DRAWING.values(), ids=DRAWING)
def test_a_function_that_draws_random_numbers_is_refused(function):
    with pytest.raises(ValueError, match="function draws random numbers, and would draw others in its second run"):
        recompute(function, leaves()[0])


def test_no_state_of_a_random_generator_is_changed():
    before = torch.get_rng_state()
    recompute(lambda x: F.dropout(x.exp(), 0.5, training=False), leaves()[0]).sum().backward()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backward_is_inside", [True, False])
def test_the_second_run_has_the_autocast_of_the_first(dtype, backward_is_inside):
    x, scale = leaves()
    w = torch.randn(24, 24, requires_grad=True)
    linear = linear_of()

    def function(x, w, scale):
        return torch.exp(x @ w) * scale

    def run(middle):
        with torch.autocast("cpu", dtype):
            y = middle(x, w, scale)
            out = linear(y)
            drop(y, after=out) if middle is not function else None
            assert out.dtype == dtype
            grads = torch.autograd.grad(out.float().sum(), [x, w, scale]) if backward_is_inside else None
        return grads or torch.autograd.grad(out.float().sum(), [x, w, scale])

    assert_same(run(lambda *inputs: recompute(function, *inputs)), run(function))


def test_the_second_run_is_without_autocast_where_the_first_was():
    x, w = leaves()[0], torch.randn(24, 24, requires_grad=True)
    out, expected = recompute(torch.matmul, x, w).exp(), (x @ w).exp()
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(out.sum(), [x, w])
        assert_same(found, torch.autograd.grad(expected.sum(), [x, w]))


def test_autocast_holds_no_cast_of_an_argument_longer_than_the_function_runs():
    x, w = leaves()[0], torch.randn(24, 24, requires_grad=True)
    is_cached = []

    def function(x, w):
        is_cached.append(torch.is_autocast_cache_enabled())
        return x @ w

    with torch.autocast("cpu", torch.bfloat16):
        recompute(function, x, w).float().sum().backward()
        assert is_cached == [False, False] and torch.is_autocast_cache_enabled()


def test_a_second_derivative_raises():
    x, scale = leaves()
    y = recompute(lambda x, scale: x.exp() * scale, x, scale)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert grad.requires_grad
    with pytest.raises(RuntimeError, match="recompute is not twice differentiable"):
        (y.sum() + grad.square().sum()).backward()


def gradient_inside(x):
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        return x * torch.autograd.grad(z.exp().sum(), z)[0]


REFUSED = {
    "an argument": (lambda x: x, ValueError, "returns one of its arguments or a view of one"),
    "a view": (lambda x: x.view(-1), ValueError, "returns one of its arguments or a view of one"),
    "a tuple": (lambda x: (x.exp(), x), ValueError, "function returns tuple; expected one tensor"),
    "a write to an argument": (lambda x: x.detach().mul_(2) + x, ValueError, "function writes to an argument"),
    "a module with parameters": (nn.PReLU(), ValueError, "PReLU with parameters or buffers; .*functional_call"),
    "a module with buffers": (nn.BatchNorm1d(24, affine=False), ValueError, "BatchNorm1d with parameters or buffers"),
    "a derivative inside": (gradient_inside, RuntimeError, "function differentiates inside itself"),
}


@pytest.mark.parametrize(("function", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_second_run_would_not_repeat_is_refused(function, error, message):
    with pytest.raises(error, match=message):
        recompute(function, torch.randn(6, 24, requires_grad=True))


def test_a_function_without_a_derivative_gives_a_tensor_without_a_graph():
    y = recompute(lambda x: (x > 0).float(), leaves()[0])
    assert not y.requires_grad
    drop(y, after=y * 2)


def test_without_gradients_the_function_just_runs():
    x, _ = leaves()
    with torch.no_grad():
        assert torch.equal(recompute(lambda x: x * weight, x), x * weight)


def test_an_argument_that_the_function_does_not_use_gets_no_gradient():
    x, scale = leaves()
    recompute(lambda x, _: x.exp(), x, scale).sum().backward()
    assert scale.grad is None and torch.equal(x.grad, x.exp())


@pytest.mark.parametrize("is_dropped", [True, False])
def test_an_output_that_others_made_is_differentiated_from_the_arguments(is_dropped):
    x, scale = leaves()
    linear = linear_of()
    function = ARGUMENTS["keywords"][0]
    expected = torch.autograd.grad(
        linear(function(x, scale=scale, n=2.5)).square().sum(), [x, scale, *linear.parameters()]
    )
    y = function(x, scale=scale, n=2.5)
    adopted = adopt(y, function, x, scale=scale, n=2.5)
    assert adopted.data_ptr() == y.data_ptr()
    memory = StorageWeakRef(y.untyped_storage())
    out = linear(adopted)
    if is_dropped:
        drop(adopted, after=out)
    del y, adopted
    assert memory.expired() == is_dropped
    assert_same(torch.autograd.grad(out.square().sum(), [x, scale, *linear.parameters()]), expected)


# A checkpoint that keeps what attention makes.
S, B, A, D = 32, 2, 4, 16


class Layer(nn.Module):
    def __init__(self, p: float | None) -> None:
        super().__init__()
        self.p, self.qkv, self.out = p, nn.Linear(A * D, 3 * A * D), nn.Linear(A * D, A * D)

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (A, D)) for each in self.qkv(hidden_states).chunk(3, -1))
        if self.p is None:
            q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)
        else:
            y = attention(q, k, v, causal=True, softmax_scale=0.25, dropout_p=self.p, dropout_key=7)
        return hidden_states + torch.tanh(self.out(y.flatten(2)))


class Model(nn.Module):
    def __init__(self, p: float | None, more: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.more = nn.ModuleList([Layer(p) for _ in range(3)]), more

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, **self.more)
        return x


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("p", [None, 0.0, 0.1])
def test_attention_runs_once_and_gradients_are_those_of_a_checkpoint(p: float | None, offload: bool) -> None:
    x = torch.randn(S, B, A * D, generator=torch.Generator().manual_seed(1), requires_grad=True)
    found, calls = [], []
    for more in ({}, {"context_fn": keep_attention}):
        model = Model(p, more)
        engine = Engine(num_groups=3)
        if offload and more:
            Offload(model, dict.fromkeys(model.layers, move_all), engine)
        with mock.patch("tempo_kernels.attention.cpu.forward", wraps=cpu.forward) as forward:
            y = model(x)
            y.square().sum().backward()
        calls.append(forward.call_count)
        # Of each layer its input and attention's output; a logsumexp of less than 4 KiB stays.
        assert engine.moved_bytes == (3 * 2 * x.nbytes if offload and more else 0)
        found.append([y, x.grad, *(each.grad for each in model.parameters())])
        x.grad = None
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert calls == ([0, 0] if p is None else [6, 3])

"""No operation has a second derivative, and none says that it is 0: autograd raises instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tempo_kernels.attention import attention
from tempo_kernels.dropout_add import bias_dropout_add
from tempo_kernels.gelu import gelu
from tempo_kernels.glu import geglu, reglu, swiglu
from tempo_kernels.linear_cross_entropy import linear_cross_entropy, linear_log_prob
from tempo_kernels.norm import layer_norm, rms_norm
from tempo_kernels.pointwise import activate
from tempo_kernels.silu import silu
from tempo_kernels.squared_relu import squared_relu


def attend(x: Tensor, form: str) -> Tensor:
    q = x.view(4, 2, 2, 8)
    return attention(q, q, q, causal=True, softmax_scale=0.3, dropout_p=0.1, dropout_key=3, form=form)


def losses(x: Tensor, **more: Tensor) -> Tensor:
    weight = torch.linspace(-1, 1, 5 * 16).view(5, 16)
    found = linear_cross_entropy(x, weight, torch.arange(8).view(2, 4) % 5, **more)
    return found[0] if more else found


def log_probs(x: Tensor, index: int) -> Tensor:
    weight, labels = torch.linspace(-1, 1, 5 * 16).view(5, 16), torch.arange(8).view(2, 4) % 5
    found: Tensor = linear_log_prob(x, weight, labels, 0.7, 5.0, True)[index]
    return found


GAMMA, BETA = torch.ones(16), torch.zeros(16)
# By the name that the message begins with, and how it is called.
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu in place": gelu,
    "gelu of its input, erf": lambda x: gelu(x, keep="input"),
    "gelu of its input": lambda x: gelu(x, approximate="tanh", keep="input"),
    "squared_relu in place": squared_relu,
    "squared_relu of its input": lambda x: squared_relu(x, keep="input"),
    "silu": silu,
    "relu": lambda x: activate(x, None, "relu"),
    "layer_norm": lambda x: layer_norm(x, GAMMA, BETA),
    "layer_norm of its input": lambda x: layer_norm(x, GAMMA, BETA, keep="input"),
    "rms_norm": lambda x: rms_norm(x, GAMMA),
    "rms_norm of its input": lambda x: rms_norm(x, GAMMA, keep="input"),
    "swiglu": swiglu,
    "geglu": geglu,
    "reglu": reglu,
    "attention": lambda x: attend(x, "flash"),
    "attention keeping its softmax": lambda x: attend(x, "softmax"),
    "linear_cross_entropy": losses,
    "linear_cross_entropy with token_weights": lambda x: losses(x, token_weights=torch.full((2, 4), 0.5)),
    "linear_log_prob": lambda x: log_probs(x, 0),
    "linear_log_prob of its entropy": lambda x: log_probs(x, 1),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("ask", ["backward", "grad"])
@pytest.mark.parametrize("is_weighted", [False, True], ids=["sum", "weighted"])
def test_a_penalty_on_the_gradient_raises_instead_of_counting_as_a_constant(
    name: str, ask: str, is_weighted: bool
) -> None:
    x = torch.randn(4, 2, 16, requires_grad=True)
    y = OPERATIONS[name](x)
    weight = torch.ones(y.shape, requires_grad=is_weighted)
    (grad_x,) = torch.autograd.grad((y * weight).sum(), x, create_graph=True)
    assert grad_x.requires_grad
    penalised = y.sum() + grad_x.square().sum()
    # The log-probabilities are no choice of a TempoConfig.
    advice = "use torch's operation instead$" if "log_prob" in name else r"setting tempo\.\w+ to \"off\""
    with pytest.raises(RuntimeError, match=f"{name.split()[0]}.* is not twice differentiable.* {advice}"):
        penalised.backward() if ask == "backward" else torch.autograd.grad(penalised, x)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_graph_of_the_first_derivative_leaves_its_value_as_it_is(name: str) -> None:
    x = torch.randn(4, 2, 16, requires_grad=True)
    (plain,) = torch.autograd.grad(OPERATIONS[name](x).sum(), x)
    (with_graph,) = torch.autograd.grad(OPERATIONS[name](x).sum(), x, create_graph=True)
    assert torch.equal(plain, with_graph)


def test_every_input_of_the_weighted_loss_raises() -> None:
    hidden, weight, bias = torch.randn(4, 2, 16), torch.randn(5, 16), torch.randn(5)
    inputs = [t.requires_grad_() for t in (hidden, weight, bias)]
    labels, token_weights = torch.arange(8).view(2, 4) % 5, torch.rand(2, 4)
    for asked in inputs:
        total, _ = linear_cross_entropy(hidden, weight, labels, bias=bias, token_weights=token_weights)
        grads = torch.autograd.grad(total, inputs, create_graph=True)
        penalised = total + sum(grad.square().sum() for grad in grads)
        with pytest.raises(RuntimeError, match="not twice differentiable"):
            torch.autograd.grad(penalised, asked)


def test_the_link_to_what_the_weighted_loss_does_not_keep_has_no_bytes() -> None:
    hidden, weight = torch.randn(4, 2, 16, requires_grad=True), torch.randn(5, 16, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear_cross_entropy(hidden, weight, torch.zeros(2, 4, dtype=torch.long), token_weights=torch.ones(2, 4))
    bytes_kept = sum(t.untyped_storage().nbytes() for t in kept)
    assert bytes_kept == 4 * (hidden.numel() + weight.numel() + 1)  # two gradients and the weights' unit
    assert not {hidden.data_ptr(), weight.data_ptr()} & {t.data_ptr() for t in kept}


def test_dropout_which_is_linear_counts_as_a_constant_rightly_and_else_raises() -> None:
    x = torch.randn(4, 2, 16, requires_grad=True)
    y = bias_dropout_add(x, None, None, p=0.25, key=5)
    (grad_x,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert not grad_x.requires_grad  # as of torch's own dropout: keep / (1 - p), whatever x is
    y = bias_dropout_add(x, None, None, p=0.25, key=5)
    (grad_x,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r'bias_dropout_add is not twice .* setting tempo.dropout to "off"'):
        grad_x.sum().backward()

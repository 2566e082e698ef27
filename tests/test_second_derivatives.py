"""No operation has a second derivative, and none says that it is 0: autograd raises instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tempo_kernels.squared_relu import squared_relu

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "squared_relu in place": squared_relu,
    "squared_relu of its input": lambda x: squared_relu(x, keep="input"),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("ask", ["backward", "grad"])
def test_a_penalty_on_the_gradient_raises_instead_of_counting_as_a_constant(name: str, ask: str) -> None:
    x = torch.randn(4, 2, 16, requires_grad=True)
    y = OPERATIONS[name](x)
    (grad_x,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert grad_x.requires_grad
    penalised = y.sum() + grad_x.square().sum()
    with pytest.raises(RuntimeError, match=r"not twice differentiable.* setting tempo\.\w+ to \"off\""):
        penalised.backward() if ask == "backward" else torch.autograd.grad(penalised, x)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_graph_of_the_first_derivative_leaves_its_value_as_it_is(name: str) -> None:
    x = torch.randn(4, 2, 16, requires_grad=True)
    (plain,) = torch.autograd.grad(OPERATIONS[name](x).sum(), x)
    (with_graph,) = torch.autograd.grad(OPERATIONS[name](x).sum(), x, create_graph=True)
    assert torch.equal(plain, with_graph)

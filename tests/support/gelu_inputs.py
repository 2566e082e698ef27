"""What the tests of GELU share: inputs about its minimum, its exact derivative, and the floor of any inverse."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMS = ["none", "tanh"]
ACTIVATION = {"none": "gelu", "tanh": "gelu_tanh"}


def exact_derivative(x: Tensor, form: str) -> Tensor:
    x = x.double().detach().requires_grad_()
    return torch.autograd.grad(F.gelu(x, approximate=form).sum(), x)[0]


def bisect(is_below, low: Tensor, high: Tensor) -> Tensor:
    for _ in range(60):
        middle = (low + high) / 2
        below = is_below(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high


def minimum_of(form: str) -> float:
    low, high = torch.tensor([[-1.0], [-0.5]], dtype=torch.float64)
    return bisect(lambda x: exact_derivative(x, form) < 0, low, high).item()


def exact_inverse(y: Tensor, is_right: Tensor, form: str) -> Tensor:
    """The x right or left of the minimum whose exact GELU is y."""
    y, x_min = y.double(), torch.tensor(minimum_of(form), dtype=torch.float64)
    low, high = torch.where(is_right, x_min, -40.0), torch.where(is_right, y.clamp(min=0) + 0.2, x_min)
    return bisect(lambda x: (F.gelu(x, approximate=form) < y) == is_right, low, high)


def inputs(form: str, dtype: torch.dtype = torch.float64) -> Tensor:
    """[-8, 8], dense about the minimum; few enough for one thread."""
    ranges = [(0.0, 8.0), (minimum_of(form), 0.12), (minimum_of(form), 1e-3)]
    return torch.cat([x + torch.linspace(-r, r, 10_001, dtype=torch.float64) for x, r in ranges]).to(dtype)


def floor_of(x: Tensor, y: Tensor, form: str) -> Tensor:
    """The largest error of GELU'(x) if x is found again exactly, but from y."""
    found = exact_inverse(y, x >= minimum_of(form), form)
    return (exact_derivative(found, form) - exact_derivative(x, form)).abs().max()

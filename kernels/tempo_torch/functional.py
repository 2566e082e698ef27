"""Models that call functions where others have modules: F.dropout, and a GELU written out in Python.

Their forward runs with the same code and other globals, in which these names lead to Tempo's functions.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tempo_torch.activation import apply_activation
from tempo_torch.dropout import apply_dropout
from tempo_torch.position import Place
from tempo_torch.replace import Replaced

_running: list[tuple[Place, frozenset[str]]] = []


class RedirectsFunctions(Replaced):
    """A module whose forward calls functions that Tempo has."""

    stock_class: Any
    function_place: Place
    redirected: frozenset[str]
    """"dropout", "activation" or both."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        _running.append((self.function_place, self.redirected))
        try:
            return redirect(self.stock_class)(self, *args, **kwargs)
        finally:
            _running.pop()


def find_functions(stock: type[nn.Module]) -> list[str]:
    """Which of "dropout" and "activation" a class's forward calls as functions."""
    code = getattr(_find_forward(stock), "__code__", None)
    if code is None or stock.__module__.startswith("torch."):
        return []
    found = []
    if "dropout" in code.co_names and ("functional" in code.co_names or "F" in code.co_names):
        found.append("dropout")
    if "gelu" in code.co_names and _is_gelu(_find_forward(stock).__globals__.get("gelu")):
        found.append("activation")
    return found


def find_refusal(stock: type[nn.Module]) -> str | None:
    """Why the functions that a class calls cannot be replaced; None where they can."""
    forward = _find_forward(stock)
    if getattr(forward, "__wrapped__", None) is not None:
        return "its forward is decorated, and calls functions"
    return None


def _find_forward(stock: type[nn.Module]) -> Any:
    """The function of a class's forward; of the decorators, the one for checkpointing of transformers is put on again
    by the class that is derived."""
    forward: Any = stock.forward
    if any(base.__name__ == "GradientCheckpointingLayer" for base in stock.__mro__):
        forward = getattr(forward, "__wrapped__", forward)
    return forward


@functools.cache
def _is_gelu(function: Any) -> bool:
    """Whether a function is GELU by what it computes."""
    if not isinstance(function, types.FunctionType):
        return False
    x = torch.linspace(-4, 4, 41, dtype=torch.float64, device="cpu")
    try:
        return bool(torch.allclose(function(x), F.gelu(x)))
    except Exception:  # what another's function may raise is not ours to list
        return False


_redirected: dict[type, Any] = {}


def redirect(stock: type[nn.Module]) -> Any:
    """The class's forward, with Tempo's functions for those that it names; made once."""
    if stock not in _redirected:
        forward = _find_forward(stock)
        others: dict[str, Any] = {
            name: _Names(forward.__globals__[name]) for name in ("nn", "F") if name in forward.__globals__
        }
        if _is_gelu(forward.__globals__.get("gelu")):
            others["gelu"] = _gelu
        code, names = forward.__code__, {**forward.__globals__, **others}
        made = types.FunctionType(code, names, forward.__name__, forward.__defaults__, forward.__closure__)
        made.__kwdefaults__ = forward.__kwdefaults__
        _redirected[stock] = made
    return _redirected[stock]


class _Names:
    """torch.nn, or its functional, with another dropout."""

    def __init__(self, module: Any) -> None:
        self._module = module
        if module is F:
            self.dropout = _dropout
        elif module is nn:
            self.functional = _Names(F)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    place, redirected = _running[-1]
    if not training or p == 0.0 or p == 1.0 or inplace or "dropout" not in redirected or input.numel() == 0:
        return F.dropout(input, p, training, inplace)
    return apply_dropout(input, p, place)


def _gelu(x: Tensor) -> Tensor:
    if "activation" not in _running[-1][1] or not torch.is_grad_enabled() or not x.requires_grad:
        return F.gelu(x)
    return apply_activation(x, "gelu", "input")

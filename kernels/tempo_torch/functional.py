"""Serves models that call functions where others have modules: F.dropout, F.scaled_dot_product_attention, or a GELU
written out in Python.

Their forward runs with the same code but other globals, in which these names refer to Tempo's functions. The same goes
for the functions of its Python module that forward calls, and for functions that its decorators wrap.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tempo_torch.activation import apply_activation, name_function
from tempo_torch.attention import AttentionPlace, attend_by_position
from tempo_torch.dropout import apply_dropout
from tempo_torch.position import DropoutPlace
from tempo_torch.replace import Replaced


class _Running(threading.local):
    """Of each thread, the modules whose forwards run, the innermost last."""

    def __init__(self) -> None:
        self.modules: list[RedirectsFunctions] = []


_running = _Running()


class RedirectsFunctions(Replaced):
    """A module whose forward calls functions that Tempo has.

    Keeps for backward, of attention with dropout: q, k, v, the output of attention, and 4 bytes per query and head.
    """

    redirected: tuple[str, ...]
    """Of "attention", "dropout" and "activation" those that are Tempo's."""
    function_place: DropoutPlace
    tempo_place: AttentionPlace
    """Where "attention" is among them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the stock module returns."""
        return self._run(redirect(self.stock_class), self, *args, **kwargs)

    def drop(self, x: Tensor, p: float) -> Tensor:
        """Returns F.dropout(x, p) as a forward that runs with Tempo's functions does."""
        return self._run(_dropout, x, p)  # type: ignore[no-any-return]

    def _run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        _running.modules.append(self)
        try:
            return function(*args, **kwargs)
        finally:
            _running.modules.pop()


def list_functions(stock: type[nn.Module]) -> list[str]:
    """Lists which of "attention", "dropout" and "activation" a class's forward calls as functions, directly or
    indirectly."""
    if stock.__module__.startswith("torch."):
        return []
    found = {operation for function in _follow(_get_forward(stock)) for operation in _list_calls(function)}
    return [operation for operation in ("attention", "dropout", "activation") if operation in found]


def _list_calls(function: types.FunctionType) -> Iterator[str]:
    names = function.__code__.co_names
    if "scaled_dot_product_attention" in names:
        yield "attention"
    if "dropout" in names and ("functional" in names or "F" in names):
        yield "dropout"
    gelu = function.__globals__.get("gelu") if "gelu" in names else None
    if isinstance(gelu, types.FunctionType) and name_function(gelu) == "gelu":
        yield "activation"


def _find_callees(function: types.FunctionType) -> dict[str | int, types.FunctionType]:
    """Finds the functions that a function calls: by name in its Python module, and by index in its closure, where a
    decorator holds the function that it wraps. Functions for transformers' attention registry are not called here."""
    names = [name for name in function.__code__.co_names if not name.endswith("attention_forward")]
    found: dict[str | int, types.FunctionType] = {}
    for name in names:
        callee = function.__globals__.get(name)
        if isinstance(callee, types.FunctionType) and callee.__globals__ is function.__globals__:
            found[name] = callee
    for number, cell in enumerate(function.__closure__ or ()):
        if isinstance(cell.cell_contents, types.FunctionType):
            found[number] = cell.cell_contents
    return found


def _follow(function: Any) -> list[types.FunctionType]:
    found = [function] if isinstance(function, types.FunctionType) else []
    for each in found:  # which grows
        found += [callee for callee in _find_callees(each).values() if callee not in found]
    return found


def _get_forward(stock: type[nn.Module]) -> Any:
    """Returns the function of a class's forward, without transformers' decorator for checkpointing, which the derived
    class applies again."""
    forward: Any = stock.forward
    if any(base.__name__ == "GradientCheckpointingLayer" for base in stock.__mro__):
        forward = getattr(forward, "__wrapped__", forward)
    return forward


_redirected: dict[Any, Any] = {}


def redirect(stock: type[nn.Module]) -> Any:
    """Returns the class's forward with Tempo's functions in place of those that it and its callees name; made once."""
    if stock not in _redirected:
        _redirected[stock] = _redirect(_get_forward(stock))
    return _redirected[stock]


def _redirect(function: types.FunctionType) -> types.FunctionType:
    if function in _redirected:
        return _redirected[function]  # type: ignore[no-any-return]
    closure = function.__closure__
    cells = None if closure is None else tuple(types.CellType(cell.cell_contents) for cell in closure)
    # A compiler looks up the globals of a function that has a __name__ in the module of that name.
    names: dict[str, Any] = {name: value for name, value in function.__globals__.items() if name != "__name__"}
    for name, module in (("torch", torch), ("nn", nn), ("F", F)):
        if names.get(name) is module:
            names[name] = _Namespace(module)
    if names.get("scaled_dot_product_attention") is F.scaled_dot_product_attention:
        names["scaled_dot_product_attention"] = _attend
    if "activation" in _list_calls(function):
        names["gelu"] = _gelu
    made = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__, made.__module__ = function.__kwdefaults__, function.__module__
    _redirected[function] = made
    for place, callee in _find_callees(function).items():
        if not any(operation for each in _follow(callee) for operation in _list_calls(each)):
            continue
        if isinstance(place, str):
            names[place] = _redirect(callee)
        else:
            assert cells is not None
            cells[place].cell_contents = _redirect(callee)
    return made


class _Namespace:
    """torch, torch.nn, or its functional, with another dropout and another attention."""

    def __init__(self, module: Any) -> None:
        self._module = module
        if module is F:
            self.dropout, self.scaled_dot_product_attention = _dropout, _attend
        elif module is nn:
            self.functional = _Namespace(F)
        else:
            self.nn = _Namespace(nn)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    module = _running.modules[-1]
    if not training or p == 0.0 or p == 1.0 or inplace or "dropout" not in module.redirected or input.numel() == 0:
        return F.dropout(input, p, training, inplace)
    return apply_dropout(input, p, module.function_place)


def _gelu(x: Tensor) -> Tensor:
    if "activation" not in _running.modules[-1].redirected or not torch.is_grad_enabled() or not x.requires_grad:
        return F.gelu(x)
    return apply_activation(x, "gelu", "recompute")


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Returns F.scaled_dot_product_attention [b, a, sq, dv] of q, k, v [b, a or g, s, d]; Tempo's if it drops."""
    module = _running.modules[-1]
    if "attention" in module.redirected:
        module.tempo_place.note_call()
        if dropout_p > 0.0 and query.numel() > 0:
            why = _get_refusal(query, key, attn_mask, is_causal, enable_gqa)
            if why is None:
                given: dict[str, Any] = {"seen": attn_mask, "causal": is_causal, "scale": scale, "hidden_rows": "zero"}
                return attend_by_position(module, query, key, value, dropout_p, **given).transpose(1, 2)
            module.tempo_place.refuse(module, why)
    more: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return F.scaled_dot_product_attention(query, key, value, attn_mask, **more)


def _get_refusal(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, enable_gqa: bool) -> str | None:
    if query.dim() != 4 or key.dim() != 4 or query.size(0) != key.size(0):
        return "gives attention other tensors than [b, a, s, d]"
    if key.size(1) not in (1, query.size(1)) and not enable_gqa:
        return "gives attention another number of heads in k than in q"
    if is_causal and (mask is not None or query.size(2) != key.size(2)):
        return "asks for causal attention with a mask, or with fewer queries than keys"
    return "adds a tensor to its scores" if mask is not None and mask.dtype != torch.bool else None

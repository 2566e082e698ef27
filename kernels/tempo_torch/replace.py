"""Turns a module into one of Tempo's by changing its class: the object, its parameters, hooks and names stay.

So optimizers, tied weights, state-dict keys and `isinstance` tests (norms get no weight decay) see no difference.
"""

from __future__ import annotations

import inspect
import types
from typing import TYPE_CHECKING, Any

from torch import nn


class Replaced:
    """The base of the classes of replaced modules, which derive from it and from the stock class."""

    stock_class: Any
    mixin_class: type[Replaced]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # what the stock class has

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is made at run time, so pickle cannot find it by name.
        return _make_empty, (self.mixin_class, self.stock_class), self.__dict__


def change_class(module: nn.Module, mixin: type[Replaced], **attributes: Any) -> None:
    """Makes `module` an instance of `mixin` and of its own class, with these attributes."""
    module.__class__ = make_class(mixin, type(module))
    module.__dict__.update(attributes, tempo_attributes=tuple(attributes))


def has_changed_class(module: nn.Module) -> bool:
    """Returns whether something else has changed a replaced module's class since, as FSDP2 does."""
    return isinstance(module, Replaced) and type(module) is not make_class(module.mixin_class, module.stock_class)


def give_class_back(module: nn.Module) -> None:
    """Makes a replaced module stock again."""
    if not isinstance(module, Replaced):
        return
    if has_changed_class(module):
        raise ValueError(
            f"a {type(module).__name__} got another class after tempoize, as from FSDP2; expected a model that nothing "
            "wraps; call restore before"
        )
    for name in (*module.__dict__["tempo_attributes"], "tempo_attributes"):
        module.__dict__.pop(name, None)
    module.__class__ = module.stock_class


_classes: dict[tuple[type, type], type[nn.Module]] = {}


def make_class(mixin: type[Replaced], stock: type[nn.Module]) -> type[nn.Module]:
    """Makes the class of modules of class `stock` that `mixin` replaces."""
    if (mixin, stock) in _classes:
        return _classes[mixin, stock]
    # It keeps the stock name, which configurations save and by which FSDP and others find layers to wrap.
    members = {"stock_class": stock, "mixin_class": mixin, "__module__": stock.__module__, "__doc__": mixin.__doc__}
    forward: Any = mixin.__dict__.get("forward")
    if forward is not None and list(inspect.signature(forward).parameters) == ["self", "args", "kwargs"]:
        # The Trainer drops the columns of a data set that are no arguments of a model's forward.
        members["forward"] = shown = types.FunctionType(
            forward.__code__, forward.__globals__, forward.__name__, closure=forward.__closure__
        )
        shown.__doc__, shown.__signature__ = forward.__doc__, inspect.signature(stock.forward)  # type: ignore[attr-defined]
    made = _classes[mixin, stock] = type(stock.__name__, (mixin, stock), members)
    return made


def _make_empty(mixin: type[Replaced], stock: type[nn.Module]) -> nn.Module:
    made = make_class(mixin, stock)
    return made.__new__(made)

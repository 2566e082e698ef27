"""Reads the content of a slot: in a spec a class, a ModuleSpec or a functools.partial, in a built model a module."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec


def find_class(slot: Any) -> Any:
    """The class that a slot builds or whose module it holds; in a bias-dropout-add's slot the function. None for an
    empty slot."""
    if isinstance(slot, torch.nn.Module):
        return type(slot)
    if isinstance(slot, functools.partial):
        # `partial(MLP.as_mlp_submodule, ...)` is bound to its class, `partial(MoELayer, ...)` is one.
        return getattr(slot.func, "__self__", slot.func)
    return slot.module if isinstance(slot, ModuleSpec) else slot


def find_submodules(slot: Any) -> Any:
    """The submodules of an attention's or MLP's slot; None if it has no slots of its own."""
    if isinstance(slot, functools.partial):
        return slot.keywords.get("submodules")
    return slot if isinstance(slot, torch.nn.Module) else getattr(slot, "submodules", None)


def change_slot(slot: Any, module: Any = None, **changes: Any) -> Any:
    """A slot of a spec with another class, if one is given, and other contents in some slots of its submodules."""
    submodules, module = find_submodules(slot), module or find_class(slot)
    if changes:
        submodules = dataclasses.replace(submodules, **changes)
    if not isinstance(slot, functools.partial):
        return dataclasses.replace(slot, module=module, submodules=submodules)
    build = getattr(module, slot.func.__name__) if hasattr(slot.func, "__self__") else module
    return functools.partial(build, *slot.args, **{**slot.keywords, **({"submodules": submodules} if changes else {})})


def list_fields(submodules: Any) -> dict[str, Any]:
    """Name -> slot of a dataclass of submodules, or of a module; empty for anything else."""
    if isinstance(submodules, torch.nn.Module):
        return dict(submodules.named_children())
    is_known = dataclasses.is_dataclass(submodules) and not isinstance(submodules, type)
    return {field.name: getattr(submodules, field.name) for field in dataclasses.fields(submodules)} if is_known else {}


def is_there(slot: Any) -> bool:
    """Whether a slot holds a module that does something."""
    return find_class(slot) not in (None, IdentityOp, IdentityFuncOp)

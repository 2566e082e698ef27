"""How Megatron writes what a slot of a spec holds (a class, a ModuleSpec, or a partial of a class or of its maker), and
what a slot of a built model holds: a module. Both are read by the same functions."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec


def find_class(slot: Any) -> Any:
    """The class, or in a bias-dropout-add's slot the function, that a slot builds, or that a built module is of; None
    where it holds nothing."""
    if isinstance(slot, torch.nn.Module):
        return type(slot)
    if isinstance(slot, functools.partial):
        # `partial(MLP.as_mlp_submodule, ...)` is bound to its class, `partial(MoELayer, ...)` is one.
        return getattr(slot.func, "__self__", slot.func)
    return slot.module if isinstance(slot, ModuleSpec) else slot


def find_submodules(slot: Any) -> Any:
    """What stands inside of an attention's or MLP's slot; None where it has no slots of its own."""
    if isinstance(slot, functools.partial):
        return slot.keywords.get("submodules")
    return slot if isinstance(slot, torch.nn.Module) else getattr(slot, "submodules", None)


def list_fields(submodules: Any) -> dict[str, Any]:
    """Name -> slot of a dataclass of submodules, or of a module; nothing of anything else."""
    if isinstance(submodules, torch.nn.Module):
        return dict(submodules.named_children())
    is_known = dataclasses.is_dataclass(submodules) and not isinstance(submodules, type)
    return {field.name: getattr(submodules, field.name) for field in dataclasses.fields(submodules)} if is_known else {}


def is_there(slot: Any) -> bool:
    """Whether a slot holds a module that does something."""
    return find_class(slot) not in (None, IdentityOp, IdentityFuncOp)

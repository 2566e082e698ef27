"""Reads the masks of attention once for all layers of a model, which get the same tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

Result = TypeVar("Result")
_read: Any = WeakIdKeyDictionary()
"""Of each mask that came first in a call: how it was read, which masks came with it, and the result."""


def read_once(compute: Callable[..., Result], masks: tuple[Tensor | None, ...], *given: Any) -> Result:
    """Returns compute(*masks, *given), computed again only when one of the masks was written to.

    The result may hold a mask's storage, but neither the mask nor a view that knows it: it would never be freed.
    """
    first, *others = (mask for mask in masks if mask is not None)
    # Writes to tensors are counted neither by a compiler nor in inference mode.
    if torch.compiler.is_compiling() or any(mask.is_inference() for mask in (first, *others)):
        return compute(*masks, *given)
    now = (compute, given, tuple(None if mask is None else mask._version for mask in masks))
    before, partners, result = _read.get(first, (None, (), None))
    if before != now or any(partner() is not mask for partner, mask in zip(partners, others, strict=True)):
        result = compute(*masks, *given)
        _read[first] = now, [weakref.ref(mask) for mask in others], result
    return result  # type: ignore[no-any-return]

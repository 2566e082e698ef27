"""Copies a state to the host's memory, so that it can be written while the training goes on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def copy_to_host(state: Any) -> Any:
    """Returns a copy of a state, its tensors in the host's memory; later changes of the state do not reach it.

    Mappings, lists and tuples are copied at any depth. Tensors that share a storage share its copy, so that torch.save
    writes files of the same size.
    """
    return _copy(state, {})


def _copy(value: Any, storages: dict[tuple[str, int], Any]) -> Any:
    if isinstance(value, Tensor):
        return _copy_tensor(value, storages)
    if isinstance(value, Mapping):
        copied = {key: _copy(inner, storages) for key, inner in value.items()}
        return copied if type(value) is dict else type(value)(copied)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_copy(inner, storages) for inner in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(inner, storages) for inner in value)
    return copy.deepcopy(value)


def _copy_tensor(tensor: Tensor, storages: dict[tuple[str, int], Any]) -> Tensor:
    storage = tensor.untyped_storage()
    place = (str(storage.device), storage.data_ptr())
    if place not in storages or storage.nbytes() == 0:
        storages[place] = torch.UntypedStorage(storage.nbytes()).copy_(storage)
    host = torch.empty(0, dtype=tensor.dtype)
    host.set_(storages[place], tensor.storage_offset(), tensor.size(), tensor.stride())
    return host

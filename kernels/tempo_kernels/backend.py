"""The file of a room that computes: kernel.py on a GPU; elsewhere cpu.py, or eager.py in a room without cpu.py."""

from __future__ import annotations

import functools
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor


def choose_backend(x: Tensor, cpu: ModuleType) -> Any:
    """The kernel.py beside `cpu` where x is on a GPU, else `cpu` itself. Only a tensor on a GPU imports triton."""
    return _import_kernel(cpu.__package__) if x.is_cuda else cpu


@functools.cache
def _import_kernel(package: str | None) -> ModuleType:
    return import_module(f"{package}.kernel")

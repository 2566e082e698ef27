"""The file of a room that computes: kernel.py on a GPU; elsewhere cpu.py, or eager.py in a room without cpu.py."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor


def choose_backend(x: Tensor, cpu: ModuleType) -> Any:
    """The kernel.py beside `cpu` where x is on a GPU, else `cpu` itself. Only a tensor on a GPU imports triton."""
    return import_module(f"{cpu.__package__}.kernel") if x.is_cuda else cpu

"""Chooses which file of an operation's folder computes: kernel.py on a GPU, cpu.py (or eager.py) elsewhere."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor


def choose_backend(x: Tensor, cpu: ModuleType) -> Any:
    """Returns the kernel.py beside `cpu` if x is on a GPU, else `cpu` itself. Only a tensor on a GPU imports triton."""
    return import_module(f"{cpu.__package__}.kernel") if x.is_cuda else cpu

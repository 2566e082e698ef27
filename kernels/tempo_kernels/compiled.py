"""Plain torch functions compiled by Inductor for the CPU, where a C++ compiler is found.

The functions stay the definition: compiled or not, they are the same source. Compiling costs seconds, once per process
and, the first time on a machine, more; so every caller says from when on it pays.
"""

from __future__ import annotations

import functools
import os
import shutil
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@functools.cache
def find_compiler() -> str | None:
    """The C++ compiler that Inductor would use, or None."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


def pays_for(x: Tensor, min_elements: int, *sizes: int) -> bool:
    """Whether compiled functions of float32 arithmetic are for x: on a CPU, large enough to be worth the compiler's
    seconds, and without a 1 among `sizes`, the shape in which it is handed over, which would be compiled in."""
    is_large = x.numel() >= min_elements and all(size > 1 for size in sizes)
    return is_large and x.device.type == "cpu" and x.dtype != torch.float64


class Compiled:
    """A function that runs compiled where its tensors are real and on the CPU and a compiler is there; else as it is.

    Args:
        function: of tensors only, since numbers would be compiled in; nothing is differentiated through it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *tensors: Tensor) -> Any:
        """function(*tensors)."""
        if any(type(t) is not Tensor or t.device.type != "cpu" for t in tensors) or find_compiler() is None:
            return self._function(*tensors)
        if self._compiled is None:
            # dynamic: one compilation serves every shape; dynamic_threads: and every number of threads. Not fullgraph:
            # a function that met more dtypes than torch compiles one for goes on as it is, instead of failing.
            options: dict[str, Any] = {"cpp.dynamic_threads": True}
            self._compiled = torch.compile(_copy(self._function), dynamic=True, options=options)
        # Detached: whether a tensor is somebody's leaf or needs a gradient would be compiled in too.
        return self._compiled(*(t.detach() for t in tensors))


def _copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own: torch counts the compilations of each, and stops at eight."""
    code, scope = function.__code__.replace(), function.__globals__
    return types.FunctionType(code, scope, function.__name__, function.__defaults__, function.__closure__)

"""Compiles plain torch functions, and C++, with Inductor for the CPU, where a C++ compiler is found and works.

A function has one source, compiled or not. Compiling costs seconds in each process, and more the first time on a
machine, so each caller states the size from which it pays. The first tensor of such a size triggers a trial: a small
function is compiled. Nothing else reveals missing Python headers, a CXX that names no compiler, or a cache that cannot
be written. Where the trial fails, one warning says so and plain torch runs block by block. Under
`torch.compiler.set_stance("force_eager")` nothing is tried, and plain torch runs until that is over.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import shutil
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Inductor forbids both in the code that it vectorises itself.
_LIBRARY_FLAGS = ("-ftree-loop-vectorize", "-ffp-contract=fast")
_SHOWN_CHARACTERS = 200
_MAX_LANES = 64

_failure: str | None = None
"""Why compiling failed in this process, once it has."""


def find_compiler() -> str | None:
    """Returns the C++ compiler that Inductor would use, or None."""
    return shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))


class _IsOffError(Exception):
    """torch.compile runs functions uncompiled for now."""


def get_obstacle() -> str | None:
    """Returns why nothing can be compiled here, in a few words, or None if compiling a small function worked."""
    if _failure is None:
        try:
            _try_once()
        except _IsOffError as error:
            return str(error)
    return _failure


@functools.cache
def _get_options() -> dict[str, Any]:
    from torch._inductor.cpu_vec_isa import pick_vec_isa  # here, because importing it takes seconds

    return {
        "cpp.dynamic_threads": True,  # one compilation serves any number of threads
        "cpp.enable_floating_point_contract_flag": "fast",  # allows fused multiply-add
        # What Inductor would choose. Its cache tells processors apart by this option alone (torch 2.13): code with
        # loops for AVX-512, found in a cache by a processor with AVX2, gives wrong numbers.
        "cpp.simdlen": pick_vec_isa().bit_width(),
    }


@functools.cache
def _try_once() -> None:
    try:
        _check_compiler()
        add_one = torch.compile(lambda x: x + int(torch.compiler.is_compiling()), dynamic=True, options=_get_options())
        found = add_one(torch.zeros(16, dtype=torch.float32, device="cpu"))
        is_compiled = bool((found == 1).all())
        if not is_compiled and (torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1"):
            raise RuntimeError("torch.compile is switched off, by TORCHDYNAMO_DISABLE or in torch._dynamo.config")
    except Exception as error:  # of any kind: import, file system, compiler, linker
        _note_failure(error)
        return
    if not is_compiled:
        # @cache keeps no call that raises, so that the next one tries again.
        raise _IsOffError("torch.compiler.set_stance is in force")


def _check_compiler() -> None:
    if find_compiler() is None:
        raise OSError(f"{os.environ.get('CXX', 'g++')} is not found")


def _note_failure(error: Exception) -> None:
    """Keeps one line of the error's message, which may hold a command and the compiler's whole output."""
    global _failure
    error = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    line = next((line for line in lines if "error: " in line), lines[0])
    _failure = line if len(line) <= _SHOWN_CHARACTERS else line[:_SHOWN_CHARACTERS] + "..."


def _works() -> bool:
    """Whether something can be compiled here and now; if it never can, warns once."""
    is_possible = get_obstacle() is None
    if _failure is not None:
        _warn()
    return is_possible


@functools.cache
def _warn() -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    warnings.warn(
        f"tempo_kernels cannot compile for the CPU ({_failure}). Training runs without: large tensors take plain "
        "torch, block by block, which is slower and gives equal results up to rounding. To compile, install a C++ "
        f"compiler with Python's headers (Debian: apt-get install g++ python{version}-dev), or correct CXX or "
        "TORCHINDUCTOR_CACHE_DIR",
        RuntimeWarning,
        stacklevel=2,
    )


def run_cpp(source: str, name: str, *operands: Tensor | int) -> bool:
    """Calls a C++ function, `extern "C"`, which takes the number of threads, then addresses and int64 numbers.

    Inductor compiles its source at the first call, into the cache of its own kernels. No trial is needed before.
    Returns False, having called nothing, if one of the tensors, which are contiguous, is not an ordinary one on the CPU
    or, after one warning, if compiling fails.
    """
    is_real = all(_is_real(operand) for operand in operands if isinstance(operand, Tensor))
    library = _load(source) if is_real and _failure is None else None
    if library is None:
        return False
    addresses = (ctypes.c_void_p(o.data_ptr()) if isinstance(o, Tensor) else ctypes.c_int64(o) for o in operands)
    getattr(library, name)(ctypes.c_int64(torch.get_num_threads()), *addresses)
    return True


@functools.cache
def _load(source: str) -> ctypes.CDLL | None:
    try:
        _check_compiler()
        from torch._inductor.codecache import CppCodeCache  # here, because importing it takes seconds

        library: ctypes.CDLL = CppCodeCache.load(source, extra_flags=_LIBRARY_FLAGS)
        return library
    except Exception as error:  # of any kind: import, file system, compiler, linker
        _note_failure(error)
        _warn()
    return None


def pays_for(x: Tensor, min_elements: int, *sizes: int) -> bool:
    """Whether it pays to run compiled float32 functions on x: compiling works, x is on the CPU, and x is large enough
    to be worth the compiler's seconds. `sizes` is the shape in which x is passed. Dynamo compiles sizes of 1 in as
    constants, so a shape with a 1 does not count."""
    is_large = x.numel() >= min_elements and all(size > 1 for size in sizes)
    return is_large and _is_real(x) and x.dtype != torch.float64 and _works()


def _is_real(x: Tensor) -> bool:
    """Whether x is an ordinary tensor on the CPU. Fake tensors have no numbers, and torch compiles once more for each
    other subclass."""
    return type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu"


def split_columns(width: int, *tensors: Tensor) -> list[Tensor]:
    """Splits the last dimension of contiguous tensors, a multiple of width, into [groups, lanes] for
    Compiled(has_lanes=True). lanes is a power of two that divides width, so that no loop ends inside a register."""
    lanes = math.gcd(width, _MAX_LANES)
    lanes //= 2 if lanes == width > 1 else 1  # at least two groups: a size of 1 would be compiled in
    return [t.view(*t.shape[:-1], -1, lanes) for t in tensors]


class Compiled:
    """A function that runs compiled if its tensors are ordinary CPU tensors and compiling works, else as it is.

    Args:
        function: takes tensors only, because numbers would be compiled in, and writes to none of them. No gradient
            flows through it.
        has_lanes: whether to compile in the last size, which `split_columns` chose, and no other. A loop over a dynamic
            size needs a scalar tail, and finds its start by a division in every iteration.
    """

    def __init__(self, function: Callable[..., Any], has_lanes: bool = False) -> None:
        self._function = function
        self._has_lanes = has_lanes
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *tensors: Tensor) -> Any:
        """Returns function(*tensors)."""
        if not all(map(_is_real, tensors)) or not _works():
            return self._function(*tensors)
        # Detached: Dynamo would compile in whether a tensor is a leaf or needs a gradient.
        tensors = tuple(t.detach() for t in tensors)
        try:
            if self._has_lanes:
                for tensor in tensors:
                    torch._dynamo.mark_static(tensor, tensor.dim() - 1)
            # dynamic: one compilation serves every shape. What is compiled in, dtypes and lanes, has a function each,
            # because torch stops after eight compilations of one. Not fullgraph: it then runs uncompiled.
            key = tuple((t.dtype, t.size(-1) if self._has_lanes else None) for t in tensors)
            if key not in self._compiled:
                self._compiled[key] = torch.compile(_copy(self._function), dynamic=True, options=_get_options())
            return self._compiled[key](*tensors)
        except Exception as error:
            from torch._dynamo.exc import TorchDynamoException  # here, because importing it takes seconds

            # Not of the function itself: a full disk, or no compiler any more.
            if not isinstance(error, (TorchDynamoException, OSError)):
                raise
            _note_failure(error)
            _warn()
        return self._function(*tensors)


def _copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copies a function with a code object of its own: torch stops after eight compilations of one code object."""
    code, scope = function.__code__.replace(), function.__globals__
    return types.FunctionType(code, scope, function.__name__, function.__defaults__, function.__closure__)

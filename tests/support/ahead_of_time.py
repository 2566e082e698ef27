"""Records how a kernel is launched without carrying it out, and reads what Triton compiles that launch to; no GPU."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}
TYPES |= {torch.uint8: "u8"}
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", re.MULTILINE)


class Launch(NamedTuple):
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.kernel.fn.__module__.removeprefix('tempo_kernels.')}.{self.kernel.fn.__name__}"


class Recorder:
    """Stands where a kernel stands and tells `take` how it is launched."""

    def __init__(self, kernel: Any, take: Callable[[Launch], None]) -> None:
        self.kernel, self.take = kernel, take

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **keywords: Any) -> None:
            named = dict(zip(self.kernel.arg_names, args, strict=False)) | keywords
            options = {name: named.pop(name) for name in list(named) if name not in self.kernel.arg_names}
            self.take(Launch(self.kernel, named, options, grid))

        return launch


def record_launches(run: Callable[[], Any], modules: Iterable[ModuleType]) -> list[Launch]:
    """Returns the launches that `run` makes of the kernels of `modules`, none of which is carried out."""
    launches: list[Launch] = []
    with contextlib.ExitStack() as patches:
        for module in modules:
            for name, kernel in list(vars(module).items()):
                if name.endswith("_kernel"):
                    patches.enter_context(mock.patch.object(module, name, Recorder(kernel, launches.append)))
        run()
    return launches


def source_of(launch: Launch) -> ASTSource:
    """Returns what Triton's own launcher would compile: ones are constants, multiples of 16 are known as such."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, one in enumerate(launch.kernel.params):
        value, specialized = launch.arguments[one.name], not one.do_not_specialize
        signature[one.name] = _describe(value, (index,), one.is_constexpr, specialized, constants, attributes)
    return ASTSource(launch.kernel, signature, constants, attributes)


def _describe(
    value: Any,
    path: tuple[int, ...],
    is_constant: bool,
    specialized: bool,
    constants: dict[tuple[int, ...], Any],
    attributes: dict[tuple[int, ...], Any],
) -> Any:
    """Returns the type of an argument, of a tuple a tuple of types, and notes what is known of it."""
    if isinstance(value, tuple) and not is_constant:
        declared = [str(kind).endswith("constexpr") for kind in getattr(type(value), "__annotations__", {}).values()]
        kinds = [
            _describe(one, (*path, place), is_field, specialized, constants, attributes)
            for place, (one, is_field) in enumerate(zip(value, declared or [False] * len(value), strict=True))
        ]
        return type(value)(*kinds) if hasattr(value, "_fields") else tuple(kinds)
    if hasattr(value, "block_shape"):
        return mangle_type(value)
    is_one = specialized and isinstance(value, int) and value == 1
    if is_constant or value is None or is_one or isinstance(value, triton.language.constexpr):
        constants[path] = value
        return "constexpr"
    number = value.data_ptr() if isinstance(value, Tensor) else value
    if specialized and isinstance(number, int) and number % 16 == 0:
        attributes[path] = [["tt.divisibility", 16]]
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def list_parameters(launch: Launch) -> list[Any]:
    """Lists the values of the compiled kernel's parameters in order; constants are none of them."""

    def flatten(value: Any, kind: Any) -> list[Any]:
        if isinstance(kind, tuple):
            return [one for pair in zip(value, kind, strict=True) for one in flatten(*pair)]
        return [] if kind == "constexpr" else [value]

    return [one for name, kind in source_of(launch).signature.items() for one in flatten(launch.arguments[name], kind)]


def compiled(launch: Launch, capability: int) -> Any:
    return triton.compile(source_of(launch), target=GPUTarget("cuda", capability, 32), options=launch.options)


def resources(cubin: bytes) -> dict[str, int]:
    """Returns registers, and bytes of stack, shared and local memory, as the CUDA tools read them."""
    found = dict(re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", read_cubin(cubin, "--dump-resource-usage")))
    return {name: int(number) for name, number in found.items()}


def read_cubin(cubin: bytes, what: str) -> str:
    """Returns what cuobjdump says of machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def list_spills_in_loops(cubin: bytes) -> list[str]:
    """Lists the instructions inside of loops that load or store registers which did not suffice."""
    code = [(int(at, 16), name, operands) for at, name, operands in INSTRUCTION.findall(read_cubin(cubin, "-sass"))]
    # Behind the end lies what runs where a wait takes long; it jumps back and makes no loop.
    end = max(at for at, name, _ in code if name == "EXIT")
    jumps = [(at, re.search(r"0x([0-9a-f]+)$", to)) for at, name, to in code if name.startswith("BRA") and at < end]
    loops = [(int(to[1], 16), at) for at, to in jumps if to and int(to[1], 16) < at]
    spills = [(at, name) for at, name, _ in code if name.startswith(("LDL", "STL"))]
    return [name for at, name in spills if any(first <= at <= last for first, last in loops)]


def count_serialised_products(ptx: str) -> int:
    """Counts the warnings of ptxas that asynchronous products wait for one another (C7515 and its like)."""
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None
    with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
        file.write(ptx)
        file.flush()
        for name in ("ptxas", "ptxas-blackwell"):  # which of them knows this version of PTX depends on Triton's
            command = [TOOLS / name, "-v", f"--gpu-name={target[1]}", file.name, "-o", "/dev/null"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                return (done.stdout + done.stderr).count("serialized")
    raise RuntimeError(f"no ptxas of Triton's compiles its own code: {done.stderr.strip()}")


def narrow_accesses(ptx: str) -> list[str]:
    """Lists global loads and stores, and copies to shared memory, of fewer than 16 bytes."""
    accesses = re.findall(r"\b(?:ld|st)\.global[\w.:]*", ptx)
    narrow = [access for access in accesses if not re.search(r"\.v4\.[bfu]32|\.v2\.[bfu]64|\.v8\.[bfu]32", access)]
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?\], (0x[0-9a-f]+|\d+)", ptx)
    return narrow + [f"copy of {size} bytes" for size in copies if int(size, 0) < 16]

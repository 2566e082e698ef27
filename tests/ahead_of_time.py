"""What the tests of compiled kernels share: how a kernel is launched, recorded and not carried out; what Triton makes
of that launch for a GPU that need not be there; and what the CUDA tools read in it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it is part of this project's `test` extra")

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
CAPABILITIES = [80, 90, 100]
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}
TYPES |= {torch.uint8: "u8"}
OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion", "maxnreg"}

Launch = tuple[Any, dict[str, Any], dict[str, Any]]


class Recorder:
    """Stands where a kernel stands and writes down how it is launched: (kernel, arguments, options)."""

    def __init__(self, kernel: Any, launches: list[Launch]):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **keywords: Any) -> None:
            named = dict(zip(self.kernel.arg_names, args, strict=False)) | keywords
            options = {name: named.pop(name) for name in OPTIONS & named.keys()}
            self.launches.append((self.kernel, named, options))

        return launch


def record_launches(run: Callable[[], Any], modules: Iterable[ModuleType]) -> list[Launch]:
    """The launches that `run` makes of the kernels of `modules`, none of which is carried out."""
    launches: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for name, kernel in list(vars(module).items()):
                if name.endswith("_kernel"):
                    patch.setattr(module, name, Recorder(kernel, launches))
        run()
    return launches


def source_of(launch: Launch) -> ASTSource:
    """What Triton's own launcher would compile: ones are constants, multiples of 16 are known as such."""
    kernel, arguments, _ = launch
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value, specialized = arguments[parameter.name], not parameter.do_not_specialize
        number = value.data_ptr() if isinstance(value, Tensor) else value
        if parameter.is_constexpr or value is None or (specialized and isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        if isinstance(value, Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        if specialized and isinstance(number, int) and number % 16 == 0:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, and bytes of stack, shared and local memory, as the CUDA tools read them from the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = dict(re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", listing))
    return {name: int(number) for name, number in found.items()}


def compiled(launch: Launch, capability: int) -> Any:
    return triton.compile(source_of(launch), target=GPUTarget("cuda", capability, 32), options=launch[2])


def narrow_accesses(ptx: str) -> list[str]:
    """Global loads and stores, and copies to shared memory, of fewer than 16 bytes."""
    accesses = re.findall(r"\b(?:ld|st)\.global[\w.:]*", ptx)
    narrow = [access for access in accesses if not re.search(r"\.v4\.[bfu]32|\.v2\.[bfu]64|\.v8\.[bfu]32", access)]
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?\], (0x[0-9a-f]+|\d+)", ptx)
    return narrow + [f"copy of {size} bytes" for size in copies if int(size, 0) < 16]

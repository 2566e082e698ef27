"""Every Triton kernel compiled ahead of time, with the arguments that its launcher gives it; no GPU is needed.

`PYTHONPATH=benchmarks python tests/kernels/test_kernels_compiled.py` writes to kernel_resources.json what the
installed Triton makes of each kernel: registers and shared memory. Under another Triton its folder stands first in
PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it is part of this project's `test` extra")

import triton
from ahead_of_time import CAPABILITIES, Launch, compiled, narrow_accesses, record_launches, resources, source_of
from covering import exhaustive
from torch import Tensor
from ttir_ranges import find_overflows

from tempo_kernels import kernel_sums
from tempo_kernels.activation import kernel as pointwise
from tempo_kernels.gelu import kernel as gelu
from tempo_kernels.glu import kernel as glu
from tempo_kernels.norm import kernel as norm
from tempo_kernels.norm import kernel_long_rows as norm_long_rows
from tempo_kernels.norm import kernel_lost_channels as norm_lost_channels
from tempo_kernels.norm import kernel_whole_rows as norm_whole_rows
from tempo_kernels.norm.operands import Norm
from tempo_kernels.squared_relu import kernel as squared_relu

MODULES = [norm_whole_rows, norm_long_rows, norm_lost_channels]
MODULES += [gelu, glu, squared_relu, pointwise, kernel_sums]

TABLE = Path(__file__).with_name("kernel_resources.json")
ROWS, BATCH = 2048, 4


def launches_of(run: Callable[[], Any]) -> list[Launch]:
    return record_launches(run, MODULES)


def name_of(launch: Launch) -> str:
    return str(launch.kernel.__name__.strip("_").removesuffix("_kernel"))


def norm_launches(dtype: torch.dtype, hidden_size: int) -> Iterator[tuple[str, Launch]]:
    x = torch.empty(ROWS, hidden_size, dtype=dtype)
    for name, gamma, bias in [
        ("layer_norm", 1, x[0]),
        ("rms_norm", 1, None),
        ("layer_norm with lost channels", 0, x[0]),
    ]:
        weight = torch.full((hidden_size,), gamma, dtype=dtype)
        bias = None if bias is None else torch.zeros_like(bias)

        def run(weight: Tensor = weight, bias: Tensor | None = bias) -> None:
            _, kept = norm.forward(x, Norm(weight, bias, 1e-5, bias is not None, False))
            norm.backward(x, x, kept, bias is not None, dtype, dtype)

        for launch in launches_of(run):
            yield f"{name} {name_of(launch)}", launch

    def run_from_input() -> None:
        parameters = Norm(x[0], x[0], 1e-5, True, True)
        _, statistics = norm.forward_from_input(x, parameters)
        norm.refill(x, x, parameters, statistics)
        norm.backward_from_input(x, x, parameters, statistics)

    forward, refill, *backward = launches_of(run_from_input)
    yield "layer_norm from input forward", forward
    yield "layer_norm from input refill", refill
    for launch in backward:
        yield f"layer_norm from input {name_of(launch)}", launch


def float32_residual_launches(dtype: torch.dtype, hidden_size: int) -> Iterator[tuple[str, Launch]]:
    """A float32 x beside parameters of `dtype`."""
    x, y = (torch.empty(ROWS, hidden_size, dtype=kind) for kind in (torch.float32, dtype))
    for name, gamma in [("layer_norm of a float32 residual", 1), ("layer_norm of it with lost channels", 0)]:
        parameters = Norm(torch.full_like(y[0], gamma), torch.zeros_like(y[0]), 1e-5, True, False)

        def run(parameters: Norm = parameters) -> None:
            _, kept = norm.forward(x, parameters)
            norm.backward(y, y, kept, True, x.dtype, dtype)

        for launch in launches_of(run):
            yield f"{name} {name_of(launch)}", launch

    def run_from_input() -> None:
        parameters = Norm(y[0], y[0], 1e-5, True, True)
        _, statistics = norm.forward_from_input(x, parameters)
        norm.backward_from_input(y, x, parameters, statistics)

    for launch in launches_of(run_from_input):
        yield f"layer_norm of it from input {name_of(launch)}", launch


def activation_launches(dtype: torch.dtype, hidden_size: int) -> Iterator[tuple[str, Launch]]:
    x = torch.empty(ROWS, hidden_size, dtype=dtype)
    bias, bits, half = x[0], torch.empty(x.numel() // 8, dtype=torch.uint8), x[:, : hidden_size // 2].contiguous()
    runs = {
        "gelu forward": lambda: pointwise.forward_with_bits(x, bias, "gelu", -0.75),
        "gelu forward, tanh, without bias": lambda: pointwise.forward_with_bits(x, None, "gelu_tanh", -0.75),
        "gelu backward": lambda: gelu.backward(x, x, bits, "none", True),
        "gelu backward without bias": lambda: gelu.backward(x, x, bits, "tanh", False),
        "gelu backward from the input": lambda: pointwise.backward(x, x, bias, "gelu", True),
        "gelu backward from the input, tanh": lambda: pointwise.backward(x, x, bias, "gelu_tanh", True),
        "squared_relu forward": lambda: pointwise.forward(x, bias, "squared_relu"),
        "squared_relu backward": lambda: squared_relu.backward(x, x, True),
        "squared_relu backward from the input": lambda: pointwise.backward(x, x, bias, "squared_relu", True),
        "swiglu forward": lambda: glu.forward(x, bias, "silu"),
        "swiglu backward": lambda: glu.backward(half, x, bias, "silu", True),
        "swiglu backward without bias": lambda: glu.backward(half, x, None, "silu", False),
        "geglu forward": lambda: glu.forward(x, bias, "gelu"),
        "geglu backward": lambda: glu.backward(half, x, bias, "gelu", True),
    }
    for name, run in runs.items():
        [launch] = launches_of(run)
        yield name, launch


# The production shapes: 16-bit rows that are multiples of eight, short, medium and long, and float32.
SHAPES: list[tuple[Callable[[torch.dtype, int], Iterator[tuple[str, Launch]]], torch.dtype, int]] = [
    (norm_launches, torch.float32, 4096),
    *((norm_launches, torch.bfloat16, hidden_size) for hidden_size in (1000, 4096, 8192, 12288, 20480)),
    *((float32_residual_launches, torch.bfloat16, hidden_size) for hidden_size in (8192, 12288)),
    *((activation_launches, *shape) for shape in ((torch.bfloat16, 16384), (torch.float32, 4096))),
]
# Each on one GPU: both dtypes, rows that are short, fill the registers, or are read in parts, and every operation.
COVERING = {
    capability: [SHAPES[index] for index in indices]
    for capability, indices in ((90, (1, 3, 8)), (80, (0, 9)), (100, (5, 7)))
}


def cases(shapes: list[Any] = SHAPES) -> Iterator[tuple[str, Launch]]:
    for launches, dtype, hidden_size in shapes:
        for name, launch in launches(dtype, hidden_size):
            yield f"{name}, {str(dtype).removeprefix('torch.')}, h {hidden_size}", launch


def measured(kernel: Any, usage: dict[str, int]) -> dict[str, int]:
    return {"registers": usage["REG"], "shared_bytes": kernel.metadata.shared}


@pytest.mark.parametrize(
    ("capability", "shapes"),
    [
        pytest.param(90, SHAPES[:1], marks=pytest.mark.quick),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in COVERING.items()),
        *exhaustive((90, SHAPES), (80, SHAPES), (100, SHAPES)),
    ],
    ids=["90 quick", "90", "80", "100", "90 all", "80 all", "100 all"],
)
def test_kernels_keep_to_registers_and_recorded_resources_and_access_16_bytes_at_a_time(capability, shapes):
    tables = json.loads(TABLE.read_text(encoding="utf-8"))["kernels"]
    found = {}
    for name, launch in cases(shapes):
        kernel = compiled(launch, capability)
        usage = resources(kernel.asm["cubin"])
        assert usage["STACK"] == 0 and usage["LOCAL"] == 0, f"{name} spills: {usage}"
        found[name] = measured(kernel, usage)
        check_widths(name, launch, narrow_accesses(kernel.asm["ptx"]))
    recorded = {version: {name: table[name][f"sm_{capability}"] for name in found} for version, table in tables.items()}
    if triton.__version__ in recorded:
        assert found == recorded[triton.__version__]
    for name, usage in found.items():
        for resource, number in usage.items():
            most = max(table[name][resource] for table in recorded.values())
            assert number <= most * 1.25, f"{name}: {resource} {number}, {most} recorded"


def check_widths(name: str, launch: Launch, narrow: list[str]) -> None:
    """Tensors are read and written 16 bytes at a time."""
    if "lost channels" in name:
        # Each of a thread's elements may be one of those few that are kept one by one.
        narrow = [access for access in narrow if not access.endswith((".b16", ".b32", " 0x4 bytes"))]
    if " sums" in name:
        # Of partial sums a thread has one column; its neighbours' threads have the columns beside it.
        narrow = [access for access in narrow if not access.endswith(".b32")]
    if launch.arguments.get("bits_ptr") is not None:
        # A thread's eight neighbours have one byte of bits; it has at most 64 elements.
        narrow_bits = [access for access in narrow if access.endswith(".b8")]
        assert len(narrow_bits) <= 8, f"{name}: {narrow_bits}"
        narrow = [access for access in narrow if access not in narrow_bits]
    # What is left is one number per row, or a vector [h] of which a thread has fewer than eight elements; a tile
    # that is read or written narrowly takes at least eight accesses. Of sums over rows a thread has one column, and
    # there are counters. Where three tiles are loaded ahead, so are their rows' rstd and mean: a tile read
    # narrowly, 32 elements a thread, would take 32 copies for each of them.
    sums_rows = any(launch.arguments.get(name) is not None for name in ("counters_ptr", "sums_ptr"))
    most = 4 + (3 if sums_rows else 0) + (3 * launch.arguments["BLOCK_ROWS"] if launch.arguments.get("IS_ALONE") else 0)
    assert len(narrow) <= most, f"{name}: {narrow}"
    assert sums_rows or not any(access.endswith(".b16") for access in narrow), f"{name}: {narrow}"


@pytest.mark.slow
@pytest.mark.parametrize(("launches", "dtype", "hidden_size"), SHAPES)
def test_no_number_of_32_bits_runs_over_in_tensors_of_2_31_elements(launches, dtype, hidden_size, monkeypatch):
    """Nobody touches these tensors, so that they take no memory."""
    monkeypatch.setattr(sys.modules[__name__], "ROWS", 2**31 // hidden_size + 2 * BATCH & -BATCH)
    found = {source_of(launch).hash(): launch for _, launch in launches(dtype, hidden_size)}
    assert [find_overflows(launch) for launch in found.values()] == [[]] * len(found)


def test_the_recorded_table_has_every_kernel():
    tables = json.loads(TABLE.read_text(encoding="utf-8"))["kernels"]
    assert all(list(table) == list(dict(cases())) for table in tables.values())


def write_table() -> None:
    kernels: dict[str, dict[str, dict[str, int]]] = {}
    for name, launch in cases():
        binaries = {capability: compiled(launch, capability) for capability in CAPABILITIES}
        kernels[name] = {f"sm_{c}": measured(one, resources(one.asm["cubin"])) for c, one in binaries.items()}
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    table["kernels"][triton.__version__] = kernels
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_table()

"""The norms' Triton kernels compiled ahead of time, with the arguments that their launchers give; no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it is part of this project's `test` extra")

from ahead_of_time import (
    Launch,
    compiled,
    list_spills_in_loops,
    narrow_accesses,
    record_launches,
    resources,
)
from covering import exhaustive
from torch import Tensor

from tempo_kernels import kernel_sums
from tempo_kernels.norm import kernel as norm
from tempo_kernels.norm import kernel_backward as norm_backward
from tempo_kernels.norm import kernel_forward as norm_forward
from tempo_kernels.norm.settings import Norm

MODULES = [norm_forward, norm_backward, kernel_sums]

# A norm's backward holds whole rows and their sums.
MOST_REGISTERS = 168
ROWS = 2048


def launches_of(run: Callable[[], Any]) -> list[Launch]:
    return record_launches(run, MODULES)


def name_of(launch: Launch) -> str:
    return str(launch.kernel.__name__.strip("_").removesuffix("_kernel"))


def norm_launches(dtype: torch.dtype, hidden_size: int) -> Iterator[tuple[str, Launch]]:
    x = torch.empty(ROWS, hidden_size, dtype=dtype)
    for name, bias in [("layer_norm", x[0]), ("rms_norm", None)]:

        def run(bias: Tensor | None = bias) -> None:
            _, kept = norm.forward(x, Norm(x[0], bias, 1e-5, bias is not None, False))
            norm.backward(x, x, kept, bias is not None, dtype, dtype)

        for launch in launches_of(run):
            yield f"{name} {name_of(launch)}", launch

    def run_from_input() -> None:
        parameters = Norm(x[0], x[0], 1e-5, True, True)
        _, statistics = norm.forward_from_input(x, parameters)
        norm.refill(x, x, parameters, statistics)
        norm.backward_from_input(x, x, parameters, statistics)

    for launch in launches_of(run_from_input):
        form = " given statistics" if launch.arguments.get("HAS_STATISTICS") else ""
        yield f"layer_norm from input {name_of(launch)}{form}", launch


def float32_residual_launches(dtype: torch.dtype, hidden_size: int) -> Iterator[tuple[str, Launch]]:
    """A float32 x beside parameters of `dtype`."""
    x, y = (torch.empty(ROWS, hidden_size, dtype=kind) for kind in (torch.float32, dtype))
    parameters = Norm(y[0], y[0], 1e-5, True, False)

    def run() -> None:
        _, kept = norm.forward(x, parameters)
        norm.backward(y, y, kept, True, x.dtype, dtype)

    for launch in launches_of(run):
        yield f"layer_norm of a float32 residual {name_of(launch)}", launch

    def run_from_input() -> None:
        zero_centered = parameters._replace(zero_centered=True)
        _, statistics = norm.forward_from_input(x, zero_centered)
        norm.backward_from_input(y, x, zero_centered, statistics)

    for launch in launches_of(run_from_input):
        yield f"layer_norm of it from input {name_of(launch)}", launch


# The production shapes: 16-bit rows that are multiples of eight, short, medium and long, and float32.
SHAPES: list[tuple[Callable[[torch.dtype, int], Iterator[tuple[str, Launch]]], torch.dtype, int]] = [
    (norm_launches, torch.float32, 4096),
    *((norm_launches, torch.bfloat16, hidden_size) for hidden_size in (1000, 4096, 8192, 12288, 20480)),
    *((float32_residual_launches, torch.bfloat16, hidden_size) for hidden_size in (8192, 12288)),
]
# Each on one GPU: both dtypes, rows that are short, fill the registers, or are read in parts, and every operation.
COVERING = {
    capability: [SHAPES[index] for index in indices]
    for capability, indices in ((90, (1, 3)), (80, (0,)), (100, (5, 7)))
}


def cases(shapes: list[Any] = SHAPES) -> Iterator[tuple[str, Launch]]:
    for launches, dtype, hidden_size in shapes:
        for name, launch in launches(dtype, hidden_size):
            yield f"{name}, {str(dtype).removeprefix('torch.')}, h {hidden_size}", launch


@pytest.mark.parametrize(
    ("capability", "shapes"),
    [
        pytest.param(90, SHAPES[:1], marks=pytest.mark.quick),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in COVERING.items()),
        *exhaustive((90, SHAPES), (80, SHAPES), (100, SHAPES)),
    ],
    ids=["90 quick", "90", "80", "100", "90 all", "80 all", "100 all"],
)
def test_kernels_keep_to_registers_and_access_16_bytes_at_a_time(capability, shapes):
    for name, launch in cases(shapes):
        kernel = compiled(launch, capability)
        usage = resources(kernel.asm["cubin"])
        # At most a pair of registers waits in memory, of which a loop reads one.
        assert usage["STACK"] <= 8 and usage["LOCAL"] == 0, f"{name} spills: {usage}"
        assert len(list_spills_in_loops(kernel.asm["cubin"])) <= 1, f"{name} spills in a loop"
        assert usage["REG"] <= MOST_REGISTERS, f"{name}: {usage}"
        check_widths(name, launch, narrow_accesses(kernel.asm["ptx"]))


def check_widths(name: str, launch: Launch, narrow: list[str]) -> None:
    """Tensors are read and written 16 bytes at a time."""
    if launch.arguments.get("channels_ptr") is not None:
        # A norm's lost channels are read and written one by one.
        narrow = [access for access in narrow if not access.endswith((".b16", ".b32", " 0x4 bytes"))]
    if " sums" in name:
        # Of partial sums a thread has one column; its neighbours' threads have the columns beside it.
        narrow = [access for access in narrow if not access.endswith(".b32")]
    # What is left is one number per row, or a vector [h] of which a thread has fewer than eight elements; a tile
    # that is read or written narrowly takes at least eight accesses. Of sums over rows a thread has one column, and
    # norms load two numbers for each row of a tile ahead.
    sums_rows = any(launch.arguments.get(name) is not None for name in ("partial_ptr", "sums_ptr"))
    most = 4 + (3 if sums_rows else 0)
    most += 2 * launch.arguments.get("BLOCK_ROWS", 0) if "rstd_ptr" in launch.arguments else 0
    assert len(narrow) <= most, f"{name}: {narrow}"
    assert sums_rows or not any(access.endswith(".b16") for access in narrow), f"{name}: {narrow}"

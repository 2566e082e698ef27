"""Every Triton kernel compiled ahead of time, with the arguments that its launcher gives it; no GPU is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it is part of this project's `test` extra")

from ahead_of_time import Launch, compiled, narrow_accesses, record_launches, resources, source_of
from covering import exhaustive
from torch import Tensor
from ttir_ranges import find_overflows

from tempo_kernels import kernel_sums
from tempo_kernels.activation import kernel as pointwise
from tempo_kernels.dropout_add import Draw
from tempo_kernels.dropout_add import kernel as dropout_add
from tempo_kernels.gelu import kernel as gelu
from tempo_kernels.glu import kernel as glu
from tempo_kernels.norm import kernel as norm
from tempo_kernels.norm import kernel_long_rows as norm_long_rows
from tempo_kernels.norm import kernel_lost_channels as norm_lost_channels
from tempo_kernels.norm import kernel_whole_rows as norm_whole_rows
from tempo_kernels.norm.operands import Norm
from tempo_kernels.squared_relu import kernel as squared_relu

MODULES = [dropout_add, norm_whole_rows, norm_long_rows, norm_lost_channels]
MODULES += [gelu, glu, squared_relu, pointwise, kernel_sums]

# At which two programs of 8 warps share a multiprocessor.
MOST_REGISTERS = 128
ROWS, BATCH = 2048, 4


def launches_of(run: Callable[[], Any]) -> list[Launch]:
    return record_launches(run, MODULES)


def name_of(launch: Launch) -> str:
    return str(launch.kernel.__name__.strip("_").removesuffix("_kernel"))


def dropout_launches(dtype: torch.dtype, hidden_size: int) -> Iterator[tuple[str, Launch]]:
    x = torch.empty(ROWS // BATCH, BATCH, hidden_size, dtype=dtype)
    draw, loaded = Draw(0.1, 2**64 - 1, 5, 7), Draw(0.1, *torch.zeros(2, dtype=torch.int64), 7)
    full, plain, backward, without_bias, from_device_data = launches_of(
        lambda: (
            dropout_add.forward(x, x[0, 0], x, draw),
            dropout_add.forward(x, None, None, draw),
            dropout_add.backward(x, draw, has_grad_bias=True),
            dropout_add.backward(x, draw, has_grad_bias=False),
            dropout_add.backward(x, loaded, has_grad_bias=True),
        ),
    )
    yield "dropout_add forward", full
    yield "dropout_add forward of dropout alone", plain
    yield "dropout_add backward", backward
    yield "dropout_add backward without bias", without_bias
    yield "dropout_add backward from device data", from_device_data


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
    *((dropout_launches, *shape) for shape in ((torch.bfloat16, 4096), (torch.float16, 1000), (torch.float32, 4096))),
    (norm_launches, torch.float32, 4096),
    *((norm_launches, torch.bfloat16, hidden_size) for hidden_size in (1000, 4096, 8192, 12288, 20480)),
    *((float32_residual_launches, torch.bfloat16, hidden_size) for hidden_size in (8192, 12288)),
    *((activation_launches, *shape) for shape in ((torch.bfloat16, 16384), (torch.float32, 4096))),
]
# Each on one GPU: both dtypes, rows that are short, fill the registers, or are read in parts, and every operation.
COVERING = {
    capability: [SHAPES[index] for index in indices]
    for capability, indices in ((90, (0, 4, 6, 11)), (80, (3, 12)), (100, (8, 10)))
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
        assert usage["STACK"] == 0 and usage["LOCAL"] == 0, f"{name} spills: {usage}"
        # A norm's backward holds whole rows and their sums.
        assert usage["REG"] <= MOST_REGISTERS or "norm" in name, f"{name}: {usage}"
        check_widths(name, launch, narrow_accesses(kernel.asm["ptx"]))


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


@pytest.mark.parametrize("capability", [90, *exhaustive([80], [100])])
def test_dropout_add_of_given_rows_and_samples_spills_nothing_and_reads_tensors_16_bytes_at_a_time(capability):
    x = torch.empty(64, BATCH, 4096, dtype=torch.bfloat16)
    draw = Draw(0.1, 7, 0, 0, 0, *torch.zeros(2, 64, BATCH, dtype=torch.int64))
    for launch in launches_of(
        lambda: (dropout_add.forward(x, x[0, 0], x, draw), dropout_add.backward(x, draw, has_grad_bias=True))
    ):
        kernel = compiled(launch, capability)
        usage = resources(kernel.asm["cubin"])
        assert usage["STACK"] == 0 and usage["LOCAL"] == 0, usage
        # One row and one sample for each of a thread's rows are loaded singly, and of sums a thread has one column.
        narrow = [access for access in narrow_accesses(kernel.asm["ptx"]) if not access.endswith(".b64")]
        assert len(narrow) <= 7, narrow


@pytest.mark.slow
@pytest.mark.parametrize(("launches", "dtype", "hidden_size"), SHAPES)
def test_no_number_of_32_bits_runs_over_in_tensors_of_2_31_elements(launches, dtype, hidden_size, monkeypatch):
    """Nobody touches these tensors, so that they take no memory."""
    monkeypatch.setattr(sys.modules[__name__], "ROWS", 2**31 // hidden_size + 2 * BATCH & -BATCH)
    found = {source_of(launch).hash(): launch for _, launch in launches(dtype, hidden_size)}
    assert [find_overflows(launch) for launch in found.values()] == [[]] * len(found)


def test_a_tensor_that_is_not_aligned_is_read_narrowly_and_found_to_be():
    x = torch.empty(4097, dtype=torch.bfloat16)[1:].view(2, 2, 1024)
    [launch] = launches_of(lambda: dropout_add.forward(x, None, None, Draw(0.1, 1, 0, 0)))
    assert len(narrow_accesses(compiled(launch, 90).asm["ptx"])) > 4


def test_new_keys_probabilities_and_positions_compile_nothing_anew():
    x = torch.ones(8, 2, 64)
    draws = [(0.1, 0, 0, 0), (0.5, 2**64 - 1, 1, 1, 8), (0.3, 2**31, 16, 2**20, 8 << 31), (0.25, 2**63, 2**31 - 1, 16)]
    numbers = torch.arange(5)  # of which every second one is aligned to 16 bytes
    loaded = [(0.1, numbers[0], numbers[1], 0), (0.5, numbers[1], numbers[2], 1), (0.3, numbers[4], numbers[3], 16)]

    def run(draw: tuple[Any, ...]) -> None:
        dropout_add.forward(x, None, None, Draw(*draw))
        dropout_add.backward(x, Draw(*draw), has_grad_bias=True)

    for forms in (draws, loaded):
        launches = launches_of(lambda forms=forms: [run(draw) for draw in forms])
        assert len({source_of(launch).hash() for launch in launches}) == 2

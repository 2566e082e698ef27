"""Computes gated linear units (Shazeer, "GLU Variants Improve Transformer", 2020) in Triton; eager.py specifies them.

A tile is a few rows by a strip of columns of y. Gates and ups lie f columns apart in x; one program reads both, so that
x is read once and y or grad_x is written once. A thread holds eight neighbours of each, 16 bytes of a 16-bit type.
Backward computes the activation and its derivative together, because they share their exponential, and sums grad_x over
rows in two stages of fixed order (kernel_sums.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels import kernel_sums
from tempo_kernels.activation.kernel_activations import activate, differentiate
from tempo_kernels.kernel_launch import Plan, cache_plans, launch
from tempo_kernels.kernel_tiles import OPTIONS, Sizes, allocate_like, check_dtype, describe

TILE_ELEMENTS = 2048
SUMS_TILE = 1024
BACKWARD_PROGRAMS = 5
"""How many programs share a multiprocessor, at 96 registers a thread."""


@triton.jit
def _place_tile(
    block_row, block_column, num_rows, half_units,
    UNIT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Returns a tile's rows [m], columns [n] and whether y has such elements [m, n]. Rows count from the tile's first
    one, so that 32 bits suffice."""
    row = tl.arange(0, BLOCK_ROWS)
    column = block_column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    rows_left = tl.minimum(num_rows - block_row * BLOCK_ROWS, BLOCK_ROWS).to(tl.int32)
    return row, column, (column < half_units * UNIT)[None, :] & (row < rows_left)[:, None]


@triton.jit
def _load_gate_and_up(x_ptr, bias_ptr, elements, column, inside, half, HAS_BIAS: tl.constexpr):
    """Loads gates and ups [m, n] in float32 and adds their biases."""
    gate = tl.load(x_ptr + elements, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + half + elements, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        gate += tl.load(bias_ptr + column, mask=column < half, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + half + column, mask=column < half, other=0.0).to(tl.float32)[None, :]
    return gate, up


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    x_ptr, bias_ptr, y_ptr,
    num_rows, half_units,
    UNIT: tl.constexpr, ACTIVATION: tl.constexpr, IS_NARROW: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program computes one tile."""
    half = half_units * UNIT
    num_strips = tl.cdiv(half, BLOCK_COLUMNS)
    block_row, block_column = (tl.program_id(0) // num_strips).to(tl.int64), tl.program_id(0) % num_strips
    row, column, inside = _place_tile(block_row, block_column, num_rows, half_units, UNIT, BLOCK_ROWS, BLOCK_COLUMNS)
    first = block_row * (BLOCK_ROWS * half)
    elements = (row * (2 * half))[:, None] + column[None, :]
    gate, up = _load_gate_and_up(x_ptr + 2 * first, bias_ptr, elements, column, inside, half, HAS_BIAS)
    y = (activate(gate, ACTIVATION, IS_NARROW) * up).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + first + (row * half)[:, None] + column[None, :], y, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "tiles_per_program"])
def _backward_kernel(
    grad_y_ptr, x_ptr, bias_ptr, grad_x_ptr, partial_ptr, counters_ptr, grad_bias_ptr,
    num_rows, half_units, tiles_per_program,
    UNIT: tl.constexpr, ACTIVATION: tl.constexpr, IS_NARROW: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_GRAD_BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program computes tiles_per_program tiles below one another, and their sums over rows."""
    half = half_units * UNIT
    num_strips = tl.cdiv(half, BLOCK_COLUMNS)
    chunk, block_column = (tl.program_id(0) // num_strips).to(tl.int64), tl.program_id(0) % num_strips
    gate_total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    up_total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for block_row in range(chunk * tiles_per_program, (chunk + 1) * tiles_per_program):
        row, column, inside = _place_tile(
            block_row, block_column, num_rows, half_units, UNIT, BLOCK_ROWS, BLOCK_COLUMNS
        )
        first = block_row * (BLOCK_ROWS * half)
        elements = (row * (2 * half))[:, None] + column[None, :]
        grad_y = tl.load(
            grad_y_ptr + first + (row * half)[:, None] + column[None, :], mask=inside, other=0.0
        ).to(tl.float32)  # fmt: skip
        gate, up = _load_gate_and_up(x_ptr + 2 * first, bias_ptr, elements, column, inside, half, HAS_BIAS)
        value, slope = differentiate(gate, ACTIVATION, IS_NARROW)
        grad_gate, grad_up = grad_y * up * slope, grad_y * value
        grad_x = grad_x_ptr + 2 * first
        tl.store(grad_x + elements, grad_gate.to(grad_x_ptr.dtype.element_ty), mask=inside)
        tl.store(grad_x + half + elements, grad_up.to(grad_x_ptr.dtype.element_ty), mask=inside)
        if HAS_GRAD_BIAS:
            gate_total += grad_gate
            up_total += grad_up
    if HAS_GRAD_BIAS:
        column = block_column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        num_chunks = tl.num_programs(0) // num_strips
        # A row of partial holds the sums of gates, then those of ups. Each half is stored as a row of its own.
        kernel_sums.store_sums(partial_ptr, tl.sum(gate_total, axis=0), 2 * chunk, column, half)
        kernel_sums.store_sums(partial_ptr + half, tl.sum(up_total, axis=0), 2 * chunk, column, half)
        if kernel_sums.is_last(counters_ptr + block_column, num_chunks):
            kernel_sums.add_up(partial_ptr, grad_bias_ptr, column, num_chunks, 2 * half, half)
            kernel_sums.add_up(partial_ptr + half, grad_bias_ptr + half, column, num_chunks, 2 * half, half)


def forward(x: Tensor, bias: Tensor | None, activation: str, out: Tensor | None = None) -> Tensor:
    """As in eager.py."""
    check_dtype("glu", x)
    y = torch.empty(*x.shape[:-1], x.size(-1) // 2, dtype=x.dtype, device=x.device) if out is None else out
    if x.numel() == 0:
        return y
    plan = _plan_forward(describe(x), bias is not None, activation)
    launch(_forward_kernel, plan, (x.contiguous(), None if bias is None else bias.contiguous(), y))
    return y


@cache_plans
def _plan_forward(sizes: Sizes, has_bias: bool, activation: str) -> Plan:
    tiling = _plan_tiles(sizes, TILE_ELEMENTS)
    arguments = _list_arguments(sizes, has_bias, activation, tiling)
    return Plan((tiling.row_blocks * tiling.strips,), **arguments)


def backward(
    grad_y: Tensor, x: Tensor, bias: Tensor | None, activation: str, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """As in eager.py, but the sum is in grad_x's dtype; its order is fixed, so every GPU gives the same bits."""
    check_dtype("glu", x)
    grad_x = allocate_like(x)
    if x.numel() == 0:
        return grad_x, grad_x.new_zeros(x.size(-1)) if has_grad_bias else None
    plan = _plan_backward(describe(x), x.device, bias is not None, activation, has_grad_bias)
    sums = plan.allocate_sums(x.size(-1), x.dtype, x.device)
    bias = None if bias is None else bias.contiguous()
    launch(_backward_kernel, plan.launch, (grad_y.contiguous(), x.contiguous(), bias, grad_x, *sums))
    return grad_x, sums[-1]


@cache_plans
def _plan_backward(
    sizes: Sizes, device: torch.device, has_bias: bool, activation: str, has_grad_bias: bool
) -> kernel_sums.BackwardPlan:
    tiling = _plan_tiles(sizes, SUMS_TILE if has_grad_bias else TILE_ELEMENTS, has_grad_bias)
    row_blocks, strips = tiling.row_blocks, tiling.strips
    tiles_per_program = kernel_sums.choose_tiles_per_program(row_blocks, strips, BACKWARD_PROGRAMS, device)
    arguments = _list_arguments(sizes, has_bias, activation, tiling)
    return kernel_sums.plan_chunks(row_blocks, strips, tiles_per_program, has_grad_bias, **arguments)


class _Tiling(NamedTuple):
    rows: int
    columns: int
    row_blocks: int
    strips: int


def _plan_tiles(sizes: Sizes, tile_elements: int, sums_rows: bool = False) -> _Tiling:
    """Chooses the widest strip of 256 to 1024 columns that divides f, or STRIP_COLUMNS where rows are summed, or all of
    f, and as many rows as fill tile_elements."""
    half, num_rows = sizes.num_columns // 2, sizes.numel // sizes.num_columns
    columns = max(256, min(1024, half & -half)) if half > 128 else max(8, triton.next_power_of_2(half))
    columns = min(columns, kernel_sums.STRIP_COLUMNS) if sums_rows else columns
    rows = tile_elements // columns
    return _Tiling(rows, columns, -(-num_rows // rows), -(-half // columns))


def _list_arguments(sizes: Sizes, has_bias: bool, activation: str, tiling: _Tiling) -> dict[str, Any]:
    """Lists the launch arguments that both kernels share; f in units of 8 tells the compiler that rows are aligned."""
    half = sizes.num_columns // 2
    unit = 1 if half % 8 else 8
    return {
        "num_rows": sizes.numel // sizes.num_columns,
        "half_units": half // unit,
        "UNIT": unit,
        "ACTIVATION": activation,
        "IS_NARROW": sizes.dtype.itemsize == 2,
        "HAS_BIAS": has_bias,
        "BLOCK_ROWS": tiling.rows,
        "BLOCK_COLUMNS": tiling.columns,
        **OPTIONS,
    }

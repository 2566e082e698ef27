"""Gated linear units (Shazeer, "GLU Variants Improve Transformer", 2020) in Triton; eager.py is the specification.

A tile is a few rows by a strip of columns of y. Gates and ups lie f columns apart in x. One program reads both, so that
x is read once, y or grad_x is written once, and nothing else is. A thread holds eight neighbours of each, 16 bytes of a
16-bit type. Backward computes the activation and its derivative from the gate together, since they share their
exponential, and sums grad_x over rows in two stages of fixed order, as pointwise/kernel_tiles.py says.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.pointwise.kernel_activations import activate, differentiate
from tempo_kernels.pointwise.kernel_tiles import BACKWARD_PROGRAMS, OPTIONS, check_dtype

TILE_ELEMENTS = 2048
SUMS_TILE = 1024


@triton.jit
def _place_tile(
    block_row, block_column, num_rows, half_units,
    UNIT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile's rows [m] and columns [n], and whether y has such elements [m, n]. Rows are counted from the tile's first
    one, so that 32 bits are enough."""
    row = tl.arange(0, BLOCK_ROWS)
    column = block_column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    rows_left = tl.minimum(num_rows - block_row * BLOCK_ROWS, BLOCK_ROWS).to(tl.int32)
    return row, column, (column < half_units * UNIT)[None, :] & (row < rows_left)[:, None]


@triton.jit
def _load_gate_and_up(x_ptr, bias_ptr, elements, column, inside, half, HAS_BIAS: tl.constexpr):
    """Gates and ups [m, n] in float32, with their biases."""
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
    """One program: one tile."""
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
    grad_y_ptr, x_ptr, bias_ptr, grad_x_ptr, partial_ptr,
    num_rows, half_units, tiles_per_program,
    UNIT: tl.constexpr, ACTIVATION: tl.constexpr, IS_NARROW: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_GRAD_BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: tiles_per_program tiles below one another, and their sums over rows into its row of partial."""
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
        partial = partial_ptr + chunk * (2 * half) + column
        tl.store(partial, tl.sum(gate_total, axis=0), mask=column < half)
        tl.store(partial + half, tl.sum(up_total, axis=0), mask=column < half)


def forward(x: Tensor, bias: Tensor | None, activation: str, out: Tensor | None = None) -> Tensor:
    """y [..., f], contiguous, for x [..., 2f]."""
    check_dtype("glu", x)
    y = torch.empty(*x.shape[:-1], x.size(-1) // 2, dtype=x.dtype, device=x.device) if out is None else out
    if x.numel() == 0:
        return y
    tiling = _plan_tiles(x, TILE_ELEMENTS)
    with torch.cuda.device_of(x):
        _forward_kernel[(tiling.row_blocks * tiling.strips,)](
            x.contiguous(),
            None if bias is None else bias.contiguous(),
            y,
            **_list_arguments(x, bias, activation, tiling),
            **OPTIONS,
        )
    return y


def backward(
    grad_y: Tensor, x: Tensor, bias: Tensor | None, activation: str, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """grad_x [..., 2f], contiguous, and its sum over all dimensions but the last in float32 [2f].

    The sum has two stages, each in a fixed order: the same bits every time on every GPU.
    """
    check_dtype("glu", x)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return grad_x, torch.zeros(x.size(-1), dtype=torch.float32, device=x.device) if has_grad_bias else None
    tiling = _plan_tiles(x, SUMS_TILE if has_grad_bias else TILE_ELEMENTS)
    tiles_per_program = -(-tiling.row_blocks * tiling.strips // BACKWARD_PROGRAMS)
    num_chunks = -(-tiling.row_blocks // tiles_per_program)
    partial = torch.empty(num_chunks, x.size(-1), dtype=torch.float32, device=x.device) if has_grad_bias else None
    with torch.cuda.device_of(x):
        _backward_kernel[(num_chunks * tiling.strips,)](
            grad_y.contiguous(),
            x.contiguous(),
            None if bias is None else bias.contiguous(),
            grad_x,
            partial,
            **_list_arguments(x, bias, activation, tiling),
            tiles_per_program=tiles_per_program,
            HAS_GRAD_BIAS=has_grad_bias,
            **OPTIONS,
        )
    return grad_x, None if partial is None else partial.sum(0)


class _Tiling(NamedTuple):
    rows: int
    columns: int
    row_blocks: int
    strips: int


def _plan_tiles(x: Tensor, tile_elements: int) -> _Tiling:
    """The widest strip of 256 to 1024 columns that divides f, or all of f, and as many rows as fill tile_elements."""
    half, num_rows = x.size(-1) // 2, math.prod(x.shape[:-1])
    columns = max(256, min(1024, half & -half)) if half > 128 else max(8, triton.next_power_of_2(half))
    rows = tile_elements // columns
    return _Tiling(rows, columns, -(-num_rows // rows), -(-half // columns))


def _list_arguments(x: Tensor, bias: Tensor | None, activation: str, tiling: _Tiling) -> dict[str, Any]:
    """The launch arguments that both kernels share; f in units of 8, so that the compiler knows it for a multiple."""
    half = x.size(-1) // 2
    unit = 1 if half % 8 else 8
    return {
        "num_rows": math.prod(x.shape[:-1]),
        "half_units": half // unit,
        "UNIT": unit,
        "ACTIVATION": activation,
        "IS_NARROW": x.dtype.itemsize == 2,
        "HAS_BIAS": bias is not None,
        "BLOCK_ROWS": tiling.rows,
        "BLOCK_COLUMNS": tiling.columns,
    }

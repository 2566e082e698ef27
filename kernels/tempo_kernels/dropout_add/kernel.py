"""Computes residual + dropout(x + bias) in Triton; eager.py is the specification.

Tensors are read as [s * b, h] in tiles of a few rows by a strip of columns. Forward and backward both draw the mask by
Philox4x32 (Salmon et al., SC 2011), whose counter is the element's position: nothing is stored, and the mask does not
depend on the tiling. One call gives 8 x 16 bits, and a thread holds eight neighbours of a row, 16 bytes of a 16-bit
type: it draws exactly the bits that it needs. The bias gradient is summed over rows as in kernel_sums.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.dropout_add.settings import Draw
from tempo_kernels.kernel_launch import Plan, cache_plans, launch
from tempo_kernels.kernel_numbers import check_dtype
from tempo_kernels.kernel_sums import add_up, choose_tiles_per_program
from tempo_kernels.philox import LANES, threshold
from tempo_kernels.philox.kernel import drop_mask, key_words, load_draw

TILE_BYTES = 8192
BACKWARD_PROGRAMS = 5
"""How many programs share a multiprocessor, at 96 registers a thread."""
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}

# The numbers that change from call to call. No value of these or of the other arguments compiles another kernel.
DRAWN = ("key_low", "key_high", "first_sample", "first_row", "first_group")
VARYING = ("key_ptr", "first_sample_ptr", "rows_ptr", "samples_ptr", *DRAWN, "limit")


@triton.jit
def _place_tile(block_row, block_column, num_columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Returns rows [m], columns [n] and int64 offsets [m, n] of one tile."""
    row = block_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = block_column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    return row, column, row.to(tl.int64)[:, None] * num_columns + column[None, :]


@triton.jit
def _drop_tile(
    row, block_column, num_rows, batch, key_ptr, first_sample_ptr, rows_ptr, samples_ptr, key_low, key_high,
    first_sample, first_row, first_group, limit, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Draws the mask of one tile. Row r of [s * b, h] is row r // b of sample r % b, unless numbers are given for each
    token. first_group is the first column of x divided by eight. What has a pointer is read from memory."""
    key_low, key_high, first_sample = load_draw(key_ptr, first_sample_ptr, key_low, key_high, first_sample)
    group = first_group + block_column * (BLOCK_COLUMNS // 8) + tl.arange(0, BLOCK_COLUMNS // 8)
    position, sample = first_row + row // batch, first_sample + row % batch
    if rows_ptr is not None:
        position = tl.load(rows_ptr + row, mask=row < num_rows, other=0)
    if samples_ptr is not None:
        sample = tl.load(samples_ptr + row, mask=row < num_rows, other=0)
    return drop_mask(group[None, :], position[:, None], 0, sample[:, None], key_low, key_high, limit)


@triton.jit
def _compute_scale(limit):
    """Computes 1 / (1 - limit / 2**16)."""
    scale = 1.0
    if limit is not None:
        scale = tl.div_rn(65536.0, 65536.0 - limit.to(tl.float32))
    return scale


@triton.jit(do_not_specialize=VARYING)
def _forward_kernel(
    x_ptr, bias_ptr, residual_ptr, out_ptr, key_ptr, first_sample_ptr, rows_ptr, samples_ptr,
    num_rows, column_units, batch, limit, key_low, key_high, first_sample, first_row, first_group,
    UNIT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program computes one tile; the grid is row blocks x strips. limit is None where nothing is dropped."""
    num_columns = column_units * UNIT
    num_strips = tl.cdiv(num_columns, BLOCK_COLUMNS)
    block_row, block_column = tl.program_id(0) // num_strips, tl.program_id(0) % num_strips
    row, column, offset = _place_tile(block_row, block_column, num_columns, BLOCK_ROWS, BLOCK_COLUMNS)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    out = tl.load(x_ptr + offset, mask=inside).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + offset, mask=inside).to(tl.float32)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + column, mask=column < num_columns).to(tl.float32)[None, :]
    if limit is not None:
        dropped = _drop_tile(
            row, block_column, num_rows, batch, key_ptr, first_sample_ptr, rows_ptr, samples_ptr, key_low, key_high,
            first_sample, first_row, first_group, limit, BLOCK_COLUMNS,
        )  # fmt: skip
        out = tl.where(dropped, 0.0, out)
    scale = _compute_scale(limit)
    if residual_ptr is not None:
        out = tl.fma(out, scale, residual)
    else:
        out *= scale
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[*VARYING, "tiles_per_program"])
def _backward_kernel(
    grad_out_ptr, grad_x_ptr, partial_ptr, key_ptr, first_sample_ptr, rows_ptr, samples_ptr,
    num_rows, column_units, batch, limit, key_low, key_high, first_sample, first_row, first_group,
    tiles_per_program, UNIT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program computes tiles_per_program tiles below one another, and writes their sum over rows to its row of
    partial; the grid is programs below one another x strips."""
    num_columns = column_units * UNIT
    num_strips = tl.cdiv(num_columns, BLOCK_COLUMNS)
    chunk, block_column = tl.program_id(0) // num_strips, tl.program_id(0) % num_strips
    scale = _compute_scale(limit)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for block_row in range(chunk * tiles_per_program, (chunk + 1) * tiles_per_program):
        row, column, offset = _place_tile(block_row, block_column, num_columns, BLOCK_ROWS, BLOCK_COLUMNS)
        inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        grad = tl.load(grad_out_ptr + offset, mask=inside, other=0.0).to(tl.float32) * scale
        if limit is not None:
            dropped = _drop_tile(
                row, block_column, num_rows, batch, key_ptr, first_sample_ptr, rows_ptr, samples_ptr, key_low, key_high,
                first_sample, first_row, first_group, limit, BLOCK_COLUMNS,
            )  # fmt: skip
            grad = tl.where(dropped, 0.0, grad)
        tl.store(grad_x_ptr + offset, grad.to(grad_x_ptr.dtype.element_ty), mask=inside)
        if partial_ptr is not None:
            total += grad
    if partial_ptr is not None:
        column = block_column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        place = chunk.to(tl.int64) * num_columns + column
        tl.store(partial_ptr + place, tl.sum(total, axis=0), mask=column < num_columns)


def forward(x: Tensor, bias: Tensor | None, residual: Tensor | None, draw: Draw) -> Tensor:
    """As in eager.py."""
    check_dtype("bias_dropout_add", x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        contiguous = (None if t is None else t.contiguous() for t in (x, bias, residual))
        pointers, numbers = _list_drawn(draw, x)
        plan = _plan_forward(x.shape, x.element_size(), draw.p)
        launch(_forward_kernel, plan, (*contiguous, out, *pointers), numbers)
    return out


def backward(
    grad_out: Tensor, draw: Draw, has_grad_bias: bool, sum_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None]:
    """As in eager.py; the order of the sum over rows is fixed, so the same GPU gives the same bits every time."""
    check_dtype("bias_dropout_add", grad_out)
    grad_x = torch.empty_like(grad_out, memory_format=torch.contiguous_format)
    num_columns, sum_dtype = grad_out.size(-1), sum_dtype or torch.float32
    if grad_out.numel() == 0:
        return grad_x, grad_x.new_zeros(num_columns, dtype=sum_dtype) if has_grad_bias else None
    num_chunks, plan = _plan_backward(grad_out.shape, grad_out.element_size(), grad_out.device, draw.p, has_grad_bias)
    pointers, numbers = _list_drawn(draw, grad_out)
    partial, grad_bias = None, None
    if has_grad_bias:
        partial = torch.empty(1, num_chunks, num_columns, dtype=torch.float32, device=grad_out.device)
    launch(_backward_kernel, plan, (grad_out.contiguous(), grad_x, partial, *pointers), numbers)
    if partial is not None:
        grad_bias = add_up(partial, sum_dtype, TILE_BYTES // 4, OPTIONS["num_warps"])[0]
    return grad_x, grad_bias


@cache_plans
def _plan_forward(shape: torch.Size, item_size: int, p: float) -> Plan:
    row_blocks, strips, arguments = _plan_tiles(shape, item_size, p)
    return Plan((row_blocks * strips,), DRAWN, **arguments)


@cache_plans
def _plan_backward(
    shape: torch.Size, item_size: int, device: torch.device, p: float, has_grad_bias: bool
) -> tuple[int, Plan]:
    row_blocks, strips, arguments = _plan_tiles(shape, item_size, p)
    tiles = choose_tiles_per_program(row_blocks, strips, BACKWARD_PROGRAMS, device) if has_grad_bias else 1
    num_chunks = -(-row_blocks // tiles)
    return num_chunks, Plan((num_chunks * strips,), DRAWN, tiles_per_program=tiles, **arguments)


def _plan_tiles(shape: torch.Size, item_size: int, p: float) -> tuple[int, int, dict[str, Any]]:
    """Returns the blocks of rows, the strips, and the launch arguments of both kernels: the widest strip of 256 to 1024
    columns that divides h, and as many rows as fill TILE_BYTES. Raises ValueError where 32 bits do not count them."""
    num_rows, num_columns = shape[0] * shape[1], shape[2]
    if max(num_rows, num_columns) >= 1 << 31:
        raise ValueError(
            f"bias_dropout_add: x has {num_rows} rows of {num_columns} elements; expected fewer than 2**31 of each, "
            "which its kernel counts; divide x into parts, each with its first_row, first_sample or first_column"
        )
    unit = 1 if num_columns % 8 else 8  # tells the compiler that rows are aligned
    columns = max(256, min(1024, num_columns & -num_columns))
    rows = TILE_BYTES // (columns * item_size)
    arguments = {
        "num_rows": num_rows,
        "column_units": num_columns // unit,
        "batch": shape[1],
        "limit": threshold(p) or None,
        "UNIT": unit,
        "BLOCK_ROWS": rows,
        "BLOCK_COLUMNS": columns,
        **OPTIONS,
    }
    return -(-num_rows // rows), -(-num_columns // columns), arguments


def _list_drawn(draw: Draw, x: Tensor) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
    """Returns key, first sample, rows and samples where they are tensors, and the numbers that DRAWN names. rows and
    samples are given as [s, b], one number for each row of [s * b, h]."""
    (_, low, high, first_sample, first_row, first_column), (key, sample, *positions) = draw.split()
    whole = (None if t is None else t.view(x.size(0), -1).expand(x.shape[:2]).contiguous() for t in positions)
    # A group has 32 bits, which an argument of 32 bits holds with a sign.
    first_group, _ = key_words(first_column // LANES)
    return (key, sample, *whole), (*key_words(low | high << 32), first_sample, first_row, first_group)

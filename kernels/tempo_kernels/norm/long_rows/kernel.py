"""LayerNorm and RMSNorm of rows that are too long for the registers of one program: read more than once, in blocks of
columns. The mathematics is that of norm/kernel.py."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.norm.lost_channels.kernel import inverse_of, parameters, restored, store_lost

OPTIONS = {"BLOCK_COLUMNS": 4096, "num_warps": 8, "enable_fp_fusion": True}
SUMS_OPTIONS = {"BLOCK_ROWS": 8, "BLOCK_COLUMNS": 256, "num_warps": 4, "enable_fp_fusion": True}
SUMS_PROGRAMS = 1024


@triton.jit(do_not_specialize=["capacity"])
def _forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, rstd_ptr, slots_ptr, lost_xhat_ptr,
    num_rows, column_units, capacity, eps,
    UNIT: tl.constexpr, SUBTRACTS_MEAN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LOST: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: one row, read three times."""
    num_columns = column_units * UNIT
    row = tl.program_id(0) + tl.arange(0, 1)
    start = row.to(tl.int64)[:, None] * num_columns
    mean = tl.zeros((1,), dtype=tl.float32)
    if SUBTRACTS_MEAN:
        for block in range(0, num_columns, BLOCK_COLUMNS):
            column = (block + tl.arange(0, BLOCK_COLUMNS))[None, :]
            x = tl.load(x_ptr + start + column, mask=column < num_columns, other=0.0).to(tl.float32)
            mean += tl.sum(x, axis=1)
        mean /= num_columns
    variance = tl.zeros((1,), dtype=tl.float32)
    for block in range(0, num_columns, BLOCK_COLUMNS):
        column = (block + tl.arange(0, BLOCK_COLUMNS))[None, :]
        x = tl.load(x_ptr + start + column, mask=column < num_columns, other=0.0).to(tl.float32)
        x = tl.where(column < num_columns, x - mean[:, None], 0.0)
        variance += tl.sum(x * x, axis=1)
    rstd = tl.rsqrt(variance / num_columns + eps)
    tl.store(rstd_ptr + row, rstd)
    for block in range(0, num_columns, BLOCK_COLUMNS):
        column = block + tl.arange(0, BLOCK_COLUMNS)
        inside = column < num_columns
        gamma, beta = parameters(weight_ptr, bias_ptr, column, inside, HAS_BIAS)
        x = tl.load(x_ptr + start + column[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
        xhat = (x - mean[:, None]) * rstd[:, None]
        if HAS_LOST:
            store_lost(slots_ptr, lost_xhat_ptr, row, column, inside, xhat, num_rows, capacity)
        y = xhat * gamma[None, :] + beta[None, :]
        tl.store(y_ptr + start + column[None, :], y.to(y_ptr.dtype.element_ty), mask=inside[None, :])


@triton.jit(do_not_specialize=["capacity"])
def _backward_kernel(
    grad_y_ptr, y_ptr, rstd_ptr, weight_ptr, bias_ptr, slots_ptr, lost_xhat_ptr, grad_x_ptr,
    num_rows, column_units, capacity,
    UNIT: tl.constexpr, SUBTRACTS_MEAN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LOST: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: grad_x of one row, read twice."""
    num_columns = column_units * UNIT
    row = tl.program_id(0) + tl.arange(0, 1)
    start = row.to(tl.int64)[:, None] * num_columns
    along_xhat = tl.zeros((1,), dtype=tl.float32)
    along_ones = tl.zeros((1,), dtype=tl.float32)
    rstd = tl.load(rstd_ptr + row)
    for block in range(0, num_columns, BLOCK_COLUMNS):
        column = block + tl.arange(0, BLOCK_COLUMNS)
        inside = column < num_columns
        gamma, beta = parameters(weight_ptr, bias_ptr, column, inside, HAS_BIAS)
        y = tl.load(y_ptr + start + column[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
        grad = tl.load(grad_y_ptr + start + column[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
        xhat = (y - beta[None, :]) * inverse_of(gamma)[None, :]
        if HAS_LOST:
            xhat = restored(xhat, slots_ptr, lost_xhat_ptr, row, column, inside, num_rows, capacity)
        grad *= gamma[None, :]
        along_xhat += tl.sum(grad * xhat, axis=1)
        along_ones += tl.sum(grad, axis=1)
    for block in range(0, num_columns, BLOCK_COLUMNS):
        column = block + tl.arange(0, BLOCK_COLUMNS)
        inside = column < num_columns
        gamma, beta = parameters(weight_ptr, bias_ptr, column, inside, HAS_BIAS)
        y = tl.load(y_ptr + start + column[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
        grad = tl.load(grad_y_ptr + start + column[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
        xhat = (y - beta[None, :]) * inverse_of(gamma)[None, :]
        if HAS_LOST:
            xhat = restored(xhat, slots_ptr, lost_xhat_ptr, row, column, inside, num_rows, capacity)
        grad_x = grad * gamma[None, :] - xhat * (along_xhat / num_columns)[:, None]
        if SUBTRACTS_MEAN:
            grad_x -= (along_ones / num_columns)[:, None]
        grad_x *= rstd[:, None]
        tl.store(grad_x_ptr + start + column[None, :], grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside[None, :])


@triton.jit(do_not_specialize=["tiles_per_program", "capacity"])
def _sums_kernel(
    grad_y_ptr, y_ptr, weight_ptr, bias_ptr, slots_ptr, lost_xhat_ptr, partial_ptr,
    num_rows, column_units, capacity, tiles_per_program,
    UNIT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LOST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: sums over tiles_per_program tiles below one another, in one strip of columns."""
    num_columns = column_units * UNIT
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = column < num_columns
    gamma, beta = parameters(weight_ptr, bias_ptr, column, inside, HAS_BIAS)
    inverse = inverse_of(gamma)
    grad_gamma = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    grad_beta = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    first = tl.program_id(0) * tiles_per_program
    for tile in range(first, first + tiles_per_program):
        row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        offset = row.to(tl.int64)[:, None] * num_columns + column[None, :]
        mask = (row < num_rows)[:, None] & inside[None, :]
        y = tl.load(y_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_y_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        xhat = (y - beta[None, :]) * inverse[None, :]
        if HAS_LOST:
            xhat = restored(xhat, slots_ptr, lost_xhat_ptr, row, column, inside, num_rows, capacity)
        grad_gamma += grad * xhat
        if HAS_BIAS:
            grad_beta += grad
    partial = partial_ptr + tl.program_id(0).to(tl.int64) * num_columns + column
    tl.store(partial, tl.sum(grad_gamma, axis=0), mask=inside)
    if HAS_BIAS:
        partial += tl.num_programs(0).to(tl.int64) * num_columns
        tl.store(partial, tl.sum(grad_beta, axis=0), mask=inside)


def forward(*tensors: Tensor | None, **sizes: Any) -> None:
    """Fills y, rstd and lost_xhat; the arguments are those of norm/kernel.py's kernel."""
    _forward_kernel[(sizes["num_rows"],)](*tensors, **sizes, **OPTIONS)


def backward(*tensors: Tensor | None, SUBTRACTS_MEAN: bool, **sizes: Any) -> Tensor:
    """Fills grad_x; returns partial sums [2 or 1, programs, h] of grad_gamma and grad_beta; arguments likewise."""
    grad_y, y, _, *others, _ = tensors
    assert y is not None
    _backward_kernel[(sizes["num_rows"],)](*tensors, SUBTRACTS_MEAN=SUBTRACTS_MEAN, **sizes, **OPTIONS)
    num_columns = y.size(-1)
    num_strips = -(-num_columns // SUMS_OPTIONS["BLOCK_COLUMNS"])
    num_tiles = -(-sizes["num_rows"] // SUMS_OPTIONS["BLOCK_ROWS"])
    tiles_per_program = -(-num_tiles * num_strips // SUMS_PROGRAMS)
    num_programs = -(-num_tiles // tiles_per_program)
    partial = torch.empty(1 + sizes["HAS_BIAS"], num_programs, num_columns, device=y.device)
    _sums_kernel[(num_programs, num_strips)](
        grad_y, y, *others, partial, **sizes, tiles_per_program=tiles_per_program, **SUMS_OPTIONS
    )
    return partial

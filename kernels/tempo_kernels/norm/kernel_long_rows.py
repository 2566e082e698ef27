"""Computes norms of rows too long for the registers of one program: rows are read more than once, in blocks of columns.

The mathematics, its sources and the arguments are those of kernel_whole_rows.py.
1. In forward a program owns a row and reads it three times: for the mean, for the variance around it, and to write y.
   The second and third reads come from the L2 cache, where a row of this length stays.
2. In backward a program owns a row and reads it twice: for the sums of g xhat and of g over the row, then for grad_x.
3. Such a program cannot sum over rows in registers. _sums_kernel does, in strips of columns: a third read of y (or x)
   and grad_y, which is cheaper than atomics and has a fixed order. A second launch adds up their sums (kernel_sums.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.kernel_launch import Plan, launch
from tempo_kernels.kernel_numbers import invert
from tempo_kernels.kernel_sums import launch_sums, plan_sums
from tempo_kernels.norm.kernel_lost_channels import (
    choose_divisor,
    find_channels,
    poison_lost,
    restore_lost,
    store_lost,
)
from tempo_kernels.norm.kernel_rows import load_parameters, place_tile, store_sums

OPTIONS: dict[str, Any] = {"BLOCK_COLUMNS": 4096, "num_warps": 8, "enable_fp_fusion": True}
SUMS_OPTIONS: dict[str, Any] = {"BLOCK_ROWS": 4, "BLOCK_COLUMNS": 256, "num_warps": 4, "enable_fp_fusion": True}
SUMS_PROGRAMS = 1024


@triton.jit(do_not_specialize=["capacity"])
def _forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, rstd_ptr, mean_ptr, affine_ptr, slots_ptr, lost_xhat_ptr, counts_ptr,
    num_rows, column_units, capacity, eps,
    UNIT: tl.constexpr, SUBTRACTS_MEAN: tl.constexpr, HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    HAS_LOST: tl.constexpr, FROM_INPUT: tl.constexpr, REFILLS: tl.constexpr, COUNTS: tl.constexpr,
    SMALLEST: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program reads one row three times, or with REFILLS once, taking mean and rstd from the first forward."""
    num_columns = column_units * UNIT
    if COUNTS:  # noqa: SIM102
        # The first program does only this and has no row. As the last one it would start, and so end, after all others.
        if tl.program_id(0) == 0:
            find_channels(
                weight_ptr, bias_ptr, affine_ptr, slots_ptr, counts_ptr, num_columns, 0,
                HAS_BIAS, ZERO_CENTERED, False, SMALLEST, BLOCK_COLUMNS,
            )  # fmt: skip
            return
    row = (tl.program_id(0) - COUNTS).to(tl.int64) + tl.arange(0, 1)
    start = row[:, None] * num_columns
    mean = tl.zeros((1,), dtype=tl.float32)
    if REFILLS:
        if SUBTRACTS_MEAN:
            mean = tl.load(mean_ptr + row)
        rstd = tl.load(rstd_ptr + row)
    else:
        if SUBTRACTS_MEAN:
            for block in range(0, num_columns, BLOCK_COLUMNS):
                column = (block + tl.arange(0, BLOCK_COLUMNS))[None, :]
                x = tl.load(x_ptr + start + column, mask=column < num_columns, other=0.0).to(tl.float32)
                mean += tl.sum(x, axis=1)
            mean /= num_columns
            if FROM_INPUT:
                tl.store(mean_ptr + row, mean)
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
        gamma, beta = load_parameters(weight_ptr, bias_ptr, column, inside, HAS_BIAS, ZERO_CENTERED)
        x = tl.load(x_ptr + start + column[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
        xhat = (x - mean[:, None]) * rstd[:, None]
        if HAS_LOST:
            store_lost(slots_ptr, lost_xhat_ptr, row, column, inside, xhat, num_rows, capacity)
        y = tl.fma(xhat, gamma[None, :], beta[None, :])
        tl.store(y_ptr + start + column[None, :], y.to(y_ptr.dtype.element_ty), mask=inside[None, :])


@triton.jit
def _recover_xhat(source, gamma, beta, mean, rstd, FROM_INPUT: tl.constexpr, HAS_LOST: tl.constexpr):
    """Recovers xhat [m, n] from x or y, as NaN in the lost channels, where gamma or beta is NaN (poison_lost)."""
    if FROM_INPUT:
        xhat = (source - mean[:, None]) * rstd[:, None]
    else:
        xhat = (source - beta[None, :]) * invert(choose_divisor(gamma, beta, HAS_LOST))[None, :]
    return xhat


@triton.jit
def _load_block(
    grad_y_ptr, source_ptr, weight_ptr, bias_ptr, slots_ptr, lost_xhat_ptr,
    row, start, column, mean, rstd, num_rows, num_columns, capacity,
    HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr, HAS_LOST: tl.constexpr, FROM_INPUT: tl.constexpr,
    SMALLEST: tl.constexpr,
):  # fmt: skip
    """Returns g = gamma * grad_y and xhat, [1, n] each, for some columns of the row that begins at `start`."""
    inside = column < num_columns
    gamma, beta = load_parameters(weight_ptr, bias_ptr, column, inside, HAS_BIAS, ZERO_CENTERED)
    if not FROM_INPUT:
        gamma, beta = poison_lost(gamma, beta, HAS_LOST, SMALLEST)
    source = tl.load(source_ptr + start + column[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
    grad = tl.load(grad_y_ptr + start + column[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
    xhat = _recover_xhat(source, gamma, beta, mean, rstd, FROM_INPUT, HAS_LOST)
    if HAS_LOST:
        xhat = restore_lost(xhat, slots_ptr, lost_xhat_ptr, row, column, inside, num_rows, capacity)
    return grad * gamma[None, :], xhat


@triton.jit(do_not_specialize=["capacity"])
def _backward_kernel(
    grad_y_ptr, source_ptr, rstd_ptr, mean_ptr, weight_ptr, bias_ptr, slots_ptr, lost_xhat_ptr, grad_x_ptr,
    num_rows, column_units, capacity,
    UNIT: tl.constexpr, SUBTRACTS_MEAN: tl.constexpr, HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    HAS_LOST: tl.constexpr, FROM_INPUT: tl.constexpr, SMALLEST: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program computes grad_x of one row, and reads it twice."""
    num_columns = column_units * UNIT
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    start = row[:, None] * num_columns
    along_xhat = tl.zeros((1,), dtype=tl.float32)
    along_ones = tl.zeros((1,), dtype=tl.float32)
    rstd = tl.load(rstd_ptr + row)
    mean = tl.zeros((1,), dtype=tl.float32)
    if FROM_INPUT and SUBTRACTS_MEAN:
        mean = tl.load(mean_ptr + row)
    for block in range(0, num_columns, BLOCK_COLUMNS):
        column = block + tl.arange(0, BLOCK_COLUMNS)
        grad, xhat = _load_block(
            grad_y_ptr, source_ptr, weight_ptr, bias_ptr, slots_ptr, lost_xhat_ptr,
            row, start, column, mean, rstd, num_rows, num_columns, capacity,
            HAS_BIAS, ZERO_CENTERED, HAS_LOST, FROM_INPUT, SMALLEST,
        )  # fmt: skip
        along_xhat += tl.sum(grad * xhat, axis=1)
        along_ones += tl.sum(grad, axis=1)
    for block in range(0, num_columns, BLOCK_COLUMNS):
        column = block + tl.arange(0, BLOCK_COLUMNS)
        grad, xhat = _load_block(
            grad_y_ptr, source_ptr, weight_ptr, bias_ptr, slots_ptr, lost_xhat_ptr,
            row, start, column, mean, rstd, num_rows, num_columns, capacity,
            HAS_BIAS, ZERO_CENTERED, HAS_LOST, FROM_INPUT, SMALLEST,
        )  # fmt: skip
        grad_x = grad - xhat * (along_xhat / num_columns)[:, None]
        if SUBTRACTS_MEAN:
            grad_x -= (along_ones / num_columns)[:, None]
        grad_x *= rstd[:, None]
        inside = (column < num_columns)[None, :]
        tl.store(grad_x_ptr + start + column[None, :], grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tiles_per_program", "capacity"])
def _sums_kernel(
    grad_y_ptr, source_ptr, rstd_ptr, mean_ptr, weight_ptr, bias_ptr, slots_ptr, lost_xhat_ptr,
    partial_ptr,
    num_rows, column_units, capacity, tiles_per_program,
    UNIT: tl.constexpr, SUBTRACTS_MEAN: tl.constexpr, HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    HAS_LOST: tl.constexpr, FROM_INPUT: tl.constexpr, SMALLEST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program sums tiles_per_program tiles below one another in one strip of columns."""
    num_columns = column_units * UNIT
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = column < num_columns
    gamma, beta = load_parameters(weight_ptr, bias_ptr, column, inside, HAS_BIAS, ZERO_CENTERED)
    if not FROM_INPUT:
        gamma, beta = poison_lost(gamma, beta, HAS_LOST, SMALLEST)
    grad_gamma = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    grad_beta = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    first = tl.program_id(0) * tiles_per_program
    for tile in range(first, first + tiles_per_program):
        row, offset, mask = place_tile(tile, column, inside, num_rows, num_columns, BLOCK_ROWS)
        source = tl.load(source_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_y_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
        mean = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
        if FROM_INPUT:
            rstd = tl.load(rstd_ptr + row, mask=row < num_rows, other=0.0)
            if SUBTRACTS_MEAN:
                mean = tl.load(mean_ptr + row, mask=row < num_rows, other=0.0)
        xhat = _recover_xhat(source, gamma, beta, mean, rstd, FROM_INPUT, HAS_LOST)
        if HAS_LOST:
            xhat = restore_lost(xhat, slots_ptr, lost_xhat_ptr, row, column, inside, num_rows, capacity)
        grad_gamma += grad * xhat
        if HAS_BIAS:
            grad_beta += grad
    store_sums(partial_ptr, grad_gamma, grad_beta, column, inside, num_columns, tl.num_programs(0), HAS_BIAS)


class BackwardPlan(NamedTuple):
    partial_shape: tuple[int, int, int]
    launch: Plan
    launch_sums: Plan
    """Of the sums over a program's rows; `sums` adds these up."""
    sums: Plan


def plan_forward(hidden_size: int, **arguments: Any) -> Plan:
    """Plans `launch_forward`; the arguments are the kernel's."""
    counts = not (arguments["HAS_LOST"] or arguments["FROM_INPUT"])
    return Plan((arguments["num_rows"] + counts,), COUNTS=counts, **arguments, **OPTIONS)


def launch_forward(plan: Plan, tensors: tuple[Tensor | None, ...]) -> None:
    """Fills y, rstd and whatever else the form keeps; the tensors are the kernel's pointers."""
    launch(_forward_kernel, plan, tensors)


def plan_backward(hidden_size: int, itemsize: int, device: torch.device, **arguments: Any) -> BackwardPlan:
    """Plans `launch_backward`; the arguments are the kernels', the others those of kernel_whole_rows.py."""
    num_rows = arguments["num_rows"]
    # Slots of lost channels take as many registers as elements do, so blocks are half as wide with them.
    block = OPTIONS["BLOCK_COLUMNS"] // (2 if arguments["HAS_LOST"] else 1)
    num_strips = -(-hidden_size // SUMS_OPTIONS["BLOCK_COLUMNS"])
    num_tiles = -(-num_rows // SUMS_OPTIONS["BLOCK_ROWS"])
    tiles_per_program = -(-num_tiles * num_strips // SUMS_PROGRAMS)
    num_programs = -(-num_tiles // tiles_per_program)
    shape = (1 + arguments["HAS_BIAS"], num_programs, hidden_size)
    return BackwardPlan(
        shape,
        Plan((num_rows,), **arguments, **OPTIONS | {"BLOCK_COLUMNS": block}),
        Plan((num_programs, num_strips), tiles_per_program=tiles_per_program, **arguments, **SUMS_OPTIONS),
        plan_sums(shape, 4096, 4, device),
    )


def launch_backward(plan: BackwardPlan, tensors: tuple[Tensor | None, ...], grad_x: Tensor, sums: Tensor) -> None:
    """Fills grad_x, and sums [2 or 1, h] with grad_gamma and grad_beta."""
    partial = torch.empty(*plan.partial_shape, dtype=torch.float32, device=grad_x.device)
    launch(_backward_kernel, plan.launch, (*tensors, grad_x))
    launch(_sums_kernel, plan.launch_sums, (*tensors, partial))
    launch_sums(plan.sums, partial, sums)

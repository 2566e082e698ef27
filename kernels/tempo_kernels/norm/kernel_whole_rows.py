"""Computes norms of rows that stay in the registers of one program: one read of each input, one write of each output.

The same kernels serve both forms: with FROM_INPUT they keep mean and rstd, otherwise rstd and the lost channels.
The mathematics is that of eager.py: LayerNorm (Ba et al., 2016), RMSNorm (Zhang and Sennrich, 2019), and the backward
from the output after In-Place Activated BatchNorm (Rota Bulo et al., CVPR 2018) and Tempo (Andoorveedu et al., 2022).
1. A program walks over tiles of whole rows below one another; tl.range loads the next one while it computes.
2. The variance is the mean of (x - mean)^2: two passes, but over registers, and exact even where the mean is large
   beside the deviation, unlike E[x^2] - E[x]^2.
3. Backward needs two sums per row, of g xhat and of g, and two sums per column, for gamma and beta. A program sums its
   columns in registers over all its tiles and then writes them to its row of `partial`. A second launch adds up the
   rows and rounds once (kernel_sums.py). The order is fixed; atomics would give other bits every time. Where the
   registers suffice, a multiprocessor has one program, of large tiles: half as many rows of partial to write and read.
4. From y, backward computes with gamma xhat = y - beta and divides by gamma late, where fewer registers are live.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.kernel_launch import Plan, count_multiprocessors, launch
from tempo_kernels.kernel_numbers import invert
from tempo_kernels.kernel_sums import launch_sums, plan_sums
from tempo_kernels.norm.kernel_lost_channels import (
    choose_divisor,
    find_channels,
    poison_lost,
    restore_lost,
    store_lost,
)
from tempo_kernels.norm.kernel_rows import load_parameters, store_sums, widen

FORWARD_PROGRAMS = 2048
TILE, LARGE_TILE = 2048, 8192
"""Elements of a tile of short rows; and of one in backward where a program has a multiprocessor to itself. At 32
elements a thread, three such tiles of 16-bit tensors fit into the 99 KiB of shared memory of sm_86."""
MAX_WARPS = 16
"""Of a program; and how many of backward fit into a multiprocessor, at 128 registers a thread."""
FORWARD_STAGES = tl.constexpr(2)
COUNTED_COLUMNS = tl.constexpr(4096)


@triton.jit(do_not_specialize=["tiles_per_program", "capacity"])
def _forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, rstd_ptr, mean_ptr, affine_ptr, slots_ptr, lost_xhat_ptr, counts_ptr,
    num_rows, column_units, capacity, eps, tiles_per_program,
    UNIT: tl.constexpr, SUBTRACTS_MEAN: tl.constexpr, HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    HAS_LOST: tl.constexpr, FROM_INPUT: tl.constexpr, REFILLS: tl.constexpr, COUNTS: tl.constexpr,
    SMALLEST: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program computes tiles_per_program tiles of whole rows; with REFILLS mean and rstd are given."""
    num_columns = column_units * UNIT
    if COUNTS:  # noqa: SIM102
        # The first program does only this. As the last one it would start, and so end, after all others.
        if tl.program_id(0) == 0:
            find_channels(
                weight_ptr, bias_ptr, affine_ptr, slots_ptr, counts_ptr, num_columns, 0,
                HAS_BIAS, ZERO_CENTERED, False, SMALLEST, COUNTED_COLUMNS,
            )  # fmt: skip
            return
    column = tl.arange(0, BLOCK_COLUMNS)
    inside = column < num_columns
    gamma, beta = load_parameters(weight_ptr, bias_ptr, column, inside, HAS_BIAS, ZERO_CENTERED)
    first = (tl.program_id(0) - COUNTS) * tiles_per_program
    for tile in tl.range(first, first + tiles_per_program, num_stages=FORWARD_STAGES):
        row = tile * tl.full((1,), BLOCK_ROWS, tl.int64) + tl.arange(0, BLOCK_ROWS)
        offset = row[:, None] * num_columns + column[None, :]
        mask = (row < num_rows)[:, None] & inside[None, :]
        xhat = widen(tl.load(x_ptr + offset, mask=mask, other=0.0))
        if REFILLS:
            if SUBTRACTS_MEAN:
                xhat -= tl.load(mean_ptr + row, mask=row < num_rows, other=0.0)[:, None]
            rstd = tl.load(rstd_ptr + row, mask=row < num_rows, other=0.0)
        else:
            if SUBTRACTS_MEAN:
                mean = tl.sum(xhat, axis=1) / num_columns
                xhat = tl.where(mask, xhat - mean[:, None], 0.0)
                if FROM_INPUT:
                    tl.store(mean_ptr + row, mean, mask=row < num_rows)
            rstd = tl.rsqrt(tl.sum(xhat * xhat, axis=1) / num_columns + eps)
            tl.store(rstd_ptr + row, rstd, mask=row < num_rows)
        xhat *= rstd[:, None]
        if HAS_LOST:
            store_lost(slots_ptr, lost_xhat_ptr, row, column, inside, xhat, num_rows, capacity)
        y = tl.fma(xhat, gamma[None, :], beta[None, :])
        tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _divide_by_gamma(scaled, gamma, beta, FROM_INPUT: tl.constexpr, HAS_LOST: tl.constexpr):
    """Divides gamma * xhat [m, n], which comes from y, by gamma; from x it is xhat already. NaN stays NaN."""
    quotient = scaled
    if not FROM_INPUT:
        quotient = scaled / choose_divisor(gamma, beta, HAS_LOST)[None, :]
    return quotient


@triton.jit
def _sum_rows(a, NUM_ROWS: tl.constexpr):
    """Sums a [m, n] to [NUM_ROWS, n]."""
    if a.shape[0] > NUM_ROWS:
        a = tl.sum(tl.reshape(a, (a.shape[0] // NUM_ROWS, NUM_ROWS, a.shape[1])), axis=0)
    return a


@triton.jit
def _average_both(a, b, num_columns):
    """Sums a and b [m, n] over their rows and divides by num_columns: warps wait for both at once. Before that eight
    neighbours are summed, which a thread has, for a joined tensor takes as many registers again."""
    if a.shape[1] >= 8:
        a = tl.sum(tl.reshape(a, (a.shape[0], a.shape[1] // 8, 8)), axis=2)
        b = tl.sum(tl.reshape(b, (b.shape[0], b.shape[1] // 8, 8)), axis=2)
    return tl.split(tl.sum(tl.join(a, b), axis=1) / num_columns)


@triton.jit(do_not_specialize=["tiles_per_program", "capacity"])
def _backward_kernel(
    grad_y_ptr, source_ptr, rstd_ptr, mean_ptr, weight_ptr, bias_ptr, slots_ptr, lost_xhat_ptr, grad_x_ptr,
    partial_ptr,
    num_rows, column_units, capacity, tiles_per_program,
    UNIT: tl.constexpr, SUBTRACTS_MEAN: tl.constexpr, HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    HAS_LOST: tl.constexpr, FROM_INPUT: tl.constexpr, SMALLEST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, IS_ALONE: tl.constexpr,
):  # fmt: skip
    """One program writes tiles_per_program tiles of grad_x, and their sums over rows to its row of partial.

    source is x where FROM_INPUT; otherwise it is y, and weight and bias are those that its forward used. IS_ALONE where
    the program has a multiprocessor to itself, and a thread has some columns of all rows of a tile.
    """
    num_columns = column_units * UNIT
    column = tl.arange(0, BLOCK_COLUMNS)
    inside = column < num_columns
    gamma, beta = load_parameters(weight_ptr, bias_ptr, column, inside, HAS_BIAS and not FROM_INPUT, ZERO_CENTERED)
    if not FROM_INPUT:
        gamma, beta = poison_lost(gamma, beta, HAS_LOST, SMALLEST)
    # At 32 elements a thread, a lone program's threads have 8 columns of every SUM_ROWS-th row, or 16 of both rows.
    SUM_ROWS: tl.constexpr = max(1, BLOCK_ROWS // 4) if IS_ALONE else BLOCK_ROWS
    grad_gamma = tl.zeros((SUM_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    grad_beta = tl.zeros((SUM_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    HAS_XHAT: tl.constexpr = FROM_INPUT or IS_ALONE
    if IS_ALONE and not FROM_INPUT:
        inverse_gamma = invert(choose_divisor(gamma, beta, HAS_LOST))
        shift = -beta * inverse_gamma
    inside_tile = tl.arange(0, BLOCK_ROWS)[:, None] * num_columns + column[None, :]
    first = tl.program_id(0) * tiles_per_program
    for tile in tl.range(first, first + tiles_per_program, num_stages=3 if IS_ALONE else 2):
        start = tile * tl.full((), BLOCK_ROWS, tl.int64)
        row = start + tl.arange(0, BLOCK_ROWS)
        mask = (row < num_rows)[:, None] & inside[None, :]
        source = widen(tl.load(source_ptr + start * num_columns + inside_tile, mask=mask, other=0.0))
        grad = widen(tl.load(grad_y_ptr + start * num_columns + inside_tile, mask=mask, other=0.0))
        rstd = tl.load(rstd_ptr + row, mask=row < num_rows, other=0.0)
        # xhat in one instruction is rounded as a float32 mean or beta is, which a 16-bit source does not resolve.
        if FROM_INPUT:
            scaled = source
            if SUBTRACTS_MEAN:
                mean = tl.load(mean_ptr + row, mask=row < num_rows, other=0.0)
                if IS_ALONE:
                    scaled = tl.fma(source, rstd[:, None], (-mean * rstd)[:, None])
                else:
                    scaled = (source - mean[:, None]) * rstd[:, None]
            else:
                scaled *= rstd[:, None]
        elif IS_ALONE:
            scaled = tl.fma(source, inverse_gamma[None, :], shift[None, :])
        else:
            # This is gamma * xhat. Dividing by gamma late holds fewer numbers per channel in registers.
            scaled = source - beta[None, :]
        if HAS_LOST:
            scaled = restore_lost(scaled, slots_ptr, lost_xhat_ptr, row, column, inside, num_rows, capacity)
        if HAS_BIAS:
            grad_beta += _sum_rows(grad, SUM_ROWS)
        product = grad * scaled
        grad_gamma += _sum_rows(product, SUM_ROWS)
        grad *= gamma[None, :]
        if HAS_XHAT:
            product = grad * scaled
        if HAS_LOST:
            # Restored channels hold xhat instead of gamma xhat, and the sums over the row need the latter.
            product = tl.where((beta != beta)[None, :], product * gamma[None, :], product)
        if SUBTRACTS_MEAN:
            along_xhat, along_ones = _average_both(product, grad, num_columns)
        else:
            along_xhat = tl.sum(product, axis=1) / num_columns
        if IS_ALONE:  # two multiply-adds for each element
            grad_x = grad * rstd[:, None]
            if SUBTRACTS_MEAN:
                grad_x -= along_ones[:, None] * rstd[:, None]
            grad_x -= scaled * (along_xhat[:, None] * rstd[:, None])
        else:
            if SUBTRACTS_MEAN:
                grad -= along_ones[:, None]
            if FROM_INPUT:
                along = scaled * along_xhat[:, None]
            else:
                # 1 / gamma, the same for all tiles, would stand in registers that are not there. scaled / (gamma /
                # along_xhat) has one rounding more.
                inverse = tl.where(along_xhat == 0.0, float("inf"), 1.0 / tl.where(along_xhat == 0.0, 1.0, along_xhat))
                along = scaled * invert(choose_divisor(gamma, beta, HAS_LOST)[None, :] * inverse[:, None])
            grad_x = (grad - along) * rstd[:, None]
        tl.store(grad_x_ptr + start * num_columns + inside_tile, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
    # The tiles summed grad * gamma xhat: a single division by gamma serves all rows.
    grad_gamma = _divide_by_gamma(grad_gamma, gamma, beta, HAS_XHAT, HAS_LOST)
    store_sums(partial_ptr, grad_gamma, grad_beta, column, inside, num_columns, tl.num_programs(0), HAS_BIAS)


class BackwardPlan(NamedTuple):
    partial_shape: tuple[int, int, int]
    launch: Plan
    launch_sums: Plan


def plan_forward(hidden_size: int, **arguments: Any) -> Plan:
    """How `launch_forward` launches; the arguments are the kernel's."""
    has_lost = arguments["HAS_LOST"]
    tiles = _choose_tile(hidden_size, TILE, 256 if has_lost else 512)
    num_programs, tiles["tiles_per_program"] = _share_tiles(
        arguments["num_rows"], tiles["BLOCK_ROWS"], FORWARD_PROGRAMS
    )
    counts = not (has_lost or arguments["FROM_INPUT"])
    return Plan((num_programs + counts,), COUNTS=counts, **arguments, **tiles)


def launch_forward(plan: Plan, tensors: tuple[Tensor | None, ...]) -> None:
    """Fills y and rstd, and what the form keeps besides; the tensors are the kernel's."""
    launch(_forward_kernel, plan, tensors)


def plan_backward(hidden_size: int, itemsize: int, device: torch.device, **arguments: Any) -> BackwardPlan:
    """How `launch_backward` launches; itemsize is that of the widest tensor, and the arguments are the kernel's."""
    # As many programs as run at once: each writes a row of partial, so few are best.
    is_alone = itemsize == 2 and 128 <= hidden_size <= 4096 and not arguments["HAS_LOST"]
    if is_alone:
        tiles = _choose_tile(hidden_size, LARGE_TILE, 1024)
    else:
        tiles = _choose_tile(hidden_size, TILE, 256 if arguments["HAS_LOST"] else 512)
    max_programs = count_multiprocessors(device) * (1 if is_alone else MAX_WARPS // tiles["num_warps"])
    num_programs, tiles["tiles_per_program"] = _share_tiles(arguments["num_rows"], tiles["BLOCK_ROWS"], max_programs)
    shape = (1 + arguments["HAS_BIAS"], num_programs, hidden_size)
    sums_tile = tiles["num_warps"] * 32 * (64 if is_alone else 32)
    launch_sums = plan_sums(shape, sums_tile, tiles["num_warps"], device)
    return BackwardPlan(shape, Plan((num_programs,), IS_ALONE=is_alone, **arguments, **tiles), launch_sums)


def launch_backward(plan: BackwardPlan, tensors: tuple[Tensor | None, ...], grad_x: Tensor, sums: Tensor) -> None:
    """Fills grad_x, and sums [2 or 1, h] with grad_gamma and grad_beta."""
    partial = torch.empty(*plan.partial_shape, dtype=torch.float32, device=grad_x.device)
    launch(_backward_kernel, plan.launch, (*tensors, grad_x, partial))
    launch_sums(plan.launch_sums, partial, sums)


def _choose_tile(hidden_size: int, tile: int, elements_of_warp: int) -> dict[str, Any]:
    """Chooses as many whole rows as fill a tile, at least one, and warps for so many elements each."""
    columns: int = triton.next_power_of_2(hidden_size)
    rows = max(1, tile // columns)  # short rows share a tile, so that all threads have work
    warps = min(MAX_WARPS, rows * columns // elements_of_warp)
    return {"BLOCK_ROWS": rows, "BLOCK_COLUMNS": columns, "num_warps": warps, "enable_fp_fusion": True}


def _share_tiles(num_rows: int, block_rows: int, max_programs: int) -> tuple[int, int]:
    """Returns the number of programs, and how many tiles each of them has."""
    num_tiles = -(-num_rows // block_rows)
    tiles_per_program = -(-num_tiles // max_programs)
    return -(-num_tiles // tiles_per_program), tiles_per_program

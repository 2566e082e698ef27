"""Sums over rows in two launches, in a fixed order: the same bits every time.

Each program of a kernel writes the sums over its own rows to its row of `partial`, in float32. A second small launch
adds up the rows of partial, in narrow strips of columns so that many programs share it, and rounds once. Atomic
additions would give other bits every time. Programs of the first launch that waited for the others would spare the
second, but CUDA does not promise that those they wait for ever start.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.kernel_launch import Plan, cache_plans, count_multiprocessors, launch

STRIP_COLUMNS = 128


@triton.jit(do_not_specialize=["num_chunks"])
def _sums_kernel(partial_ptr, sums_ptr, num_chunks, num_columns, SUMS_ROWS: tl.constexpr, SUMS_COLUMNS: tl.constexpr):
    """One program adds up the rows of one strip of partial [sums, num_chunks, num_columns]."""
    index = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * SUMS_COLUMNS + tl.arange(0, SUMS_COLUMNS)
    inside = column < num_columns
    row = tl.arange(0, SUMS_ROWS)
    partial_ptr += index * num_chunks * num_columns
    total = tl.zeros((SUMS_ROWS, SUMS_COLUMNS), dtype=tl.float32)
    for first in range(0, num_chunks, SUMS_ROWS):
        place = (first + row).to(tl.int64)[:, None] * num_columns + column[None, :]
        total += tl.load(partial_ptr + place, mask=(first + row < num_chunks)[:, None] & inside[None, :], other=0.0)
    sums = tl.sum(total, axis=0).to(sums_ptr.dtype.element_ty)
    tl.store(sums_ptr + index * num_columns + column, sums, mask=inside)


def choose_tiles_per_program(
    row_blocks: int, strips: int, programs_per_multiprocessor: int, device: torch.device
) -> int:
    """Returns how many tiles below one another a program takes so that all programs run at once."""
    num_programs = count_multiprocessors(device) * programs_per_multiprocessor
    return max(1, -(-row_blocks // max(1, num_programs // max(1, strips))))


def add_up(partial: Tensor, dtype: torch.dtype, tile: int, num_warps: int) -> Tensor:
    """Adds up the rows of partial [sums, rows, h] to [sums, h] in a fixed order, and rounds once to dtype. A program
    reads `tile` numbers at once."""
    sums = torch.empty(partial.size(0), partial.size(2), dtype=dtype, device=partial.device)
    launch(_sums_kernel, _plan_sums(partial.shape, tile, num_warps, partial.device), (partial, sums))
    return sums


@cache_plans
def _plan_sums(shape: tuple[int, int, int], tile: int, num_warps: int, device: torch.device) -> Plan:
    """Chooses as narrow strips, between 32 and STRIP_COLUMNS wide, as give half of the multiprocessors one."""
    num_sums, num_chunks, num_columns = shape
    most = max(1, count_multiprocessors(device) // 2)
    columns = min(STRIP_COLUMNS, max(32, triton.next_power_of_2(-(-num_sums * num_columns // most))))
    return Plan(
        (-(-num_columns // columns), num_sums),
        num_chunks=num_chunks,
        num_columns=num_columns,
        SUMS_ROWS=tile // columns,
        SUMS_COLUMNS=columns,
        num_warps=num_warps,
        enable_fp_fusion=True,
    )

"""Device functions and launches that the norms' kernels share: reading parameters, and sums over rows.

The launch that adds up the rows of `partial` is ready before they are written, where that is possible: a kernel whose
programs have all called `start_next`, or ended, lets the next one on its stream start (programmatic dependent launch).
The next one then waits until the kernel has ended and what it wrote can be read. By the definition of griddepcontrol
(PTX) nothing is read too early, whenever start_next is called; and where all programs wait, no later kernel is either.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.kernel_launch import KNOWS_DEPENDENT_LAUNCHES, Plan, launch
from tempo_kernels.pointwise.kernel_sums import add_up

SUMS_COLUMNS = 32
SUMS_ROWS = 128
"""Of partial, that the last launch reads at once: 16 numbers a thread, and many programs, for they wait for memory."""


if KNOWS_DEPENDENT_LAUNCHES:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    start_next, wait_for_previous = gdc_launch_dependents, gdc_wait
else:  # nothing calls them

    @triton.jit
    def start_next():
        pass

    @triton.jit
    def wait_for_previous():
        pass


@functools.cache
def can_depend(device: torch.device) -> bool:
    """Whether a launch may start ahead of the end of the one before it, and wait in the kernel: from sm_90 on."""
    is_cuda = KNOWS_DEPENDENT_LAUNCHES and device.type == "cuda"
    return is_cuda and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def load_parameters(weight_ptr, bias_ptr, column, inside, HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """Loads gamma and beta in float32, with 1 and 0 outside."""
    if ZERO_CENTERED:
        gamma = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32) + 1.0
    else:
        gamma = tl.load(weight_ptr + column, mask=inside, other=1.0).to(tl.float32)
    beta = tl.zeros_like(gamma)
    if HAS_BIAS:
        beta = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return gamma, beta


@triton.jit
def place_tile(tile, column, inside, num_rows, num_columns, BLOCK_ROWS: tl.constexpr):
    """Returns row [m] and offset [m, n] in int64 and the mask [m, n] of a tile of whole rows or of a strip."""
    row = tile * tl.full((1,), BLOCK_ROWS, tl.int64) + tl.arange(0, BLOCK_ROWS)
    offset = row[:, None] * num_columns + column[None, :]
    return row, offset, (row < num_rows)[:, None] & inside[None, :]


@triton.jit
def store_sums(partial_ptr, grad_gamma, grad_beta, column, inside, num_columns, HAS_BIAS: tl.constexpr):
    """Sums grad_gamma [m, n] over its rows into this program's row of partial [1, programs, h], or with a bias
    grad_gamma and grad_beta into partial [2, programs, h]."""
    partial = partial_ptr + tl.program_id(0).to(tl.int64) * num_columns + column
    tl.store(partial, tl.sum(grad_gamma, axis=0), mask=inside)
    if HAS_BIAS:
        partial += tl.num_programs(0).to(tl.int64) * num_columns
        tl.store(partial, tl.sum(grad_beta, axis=0), mask=inside)


@triton.jit(do_not_specialize=["num_chunks"])
def _add_up_kernel(
    partial_ptr, sums_ptr,
    num_chunks, column_units,
    UNIT: tl.constexpr, WAITS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program adds up the rows of partial [1 or 2, num_chunks, h] in one strip of columns of one sum."""
    if WAITS:
        wait_for_previous()
    num_columns, sum_index = column_units * UNIT, tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    partial, out = partial_ptr + sum_index * num_chunks * num_columns, sums_ptr + sum_index * num_columns
    add_up(partial, out, column, num_chunks, num_columns, num_columns, BLOCK_ROWS)


def plan_sums(num_sums: int, num_chunks: int, num_columns: int, waits: bool) -> Plan:
    """Plans `launch_sums`; it starts ahead of the end of the launch before it if it `waits` for that."""
    # Older versions of Triton do not know the option.
    options = {"launch_pdl": True} if waits else {}
    unit = 1 if num_columns % 8 else 8
    return Plan(
        (-(-num_columns // SUMS_COLUMNS), num_sums),
        num_chunks=num_chunks,
        column_units=num_columns // unit,
        UNIT=unit,
        WAITS=waits,
        BLOCK_ROWS=SUMS_ROWS,
        BLOCK_COLUMNS=SUMS_COLUMNS,
        num_warps=8,
        enable_fp_fusion=True,
        **options,
    )


def launch_sums(plan: Plan, partial: Tensor, sums: Tensor) -> None:
    """Adds up the rows of partial [1 or 2, programs, h] into sums [1 or 2, h], rounded once."""
    launch(_add_up_kernel, plan, (partial, sums))

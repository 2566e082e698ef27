"""Computes the backward of LayerNorm and RMSNorm in Triton, from y or from x.

Grid: (row tiles, strips of columns), as in kernel_forward.py. A program writes grad_x of tiles_per_program tiles below
one another, and the sums of gamma's and beta's gradients over its rows to its row of `partial` (kernel_sums.py).
- Whole rows: one strip. A program sums g * xhat and g over a row itself. There are as many programs as run at once,
  because each writes a row of partial.
- Long rows: `_means_kernel` reads each row in a loop over columns and stores both means; `_backward_kernel` reads them.

A lost channel takes xhat from its column of lost_xhat. Where it has none, xhat is NaN, so are the gradients that need
it, and a flag says so. The tiles have xhat = 0 in lost channels, whose few columns are then computed apart: where none
is lost, a program takes a few branches only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.kernel_launch import Plan, cache_plans, count_multiprocessors, launch
from tempo_kernels.kernel_sums import add_up
from tempo_kernels.norm import eager
from tempo_kernels.norm.kernel_forward import is_lost, load_parameters
from tempo_kernels.norm.settings import Blocks, Norm, describe_row


@triton.jit
def load_channels(
    weight_ptr, channels_ptr, column, inside, NUM_COLUMNS: tl.constexpr, RESERVE: tl.constexpr,
    SMALLEST: tl.constexpr, SUBTRACTS_MEAN: tl.constexpr, ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    """Returns gamma, and from y also beta and 1 / gamma, which is 0 in lost channels and NaN in those without a column.
    From y, weight_ptr is the forward's affine, in which beta comes behind gamma. From x channels_ptr is None."""
    if channels_ptr is None:
        gamma, beta = load_parameters(weight_ptr, None, column, inside, ZERO_CENTERED)
        inverse = gamma
    else:
        bias_ptr = weight_ptr + NUM_COLUMNS if SUBTRACTS_MEAN else None
        gamma, beta = load_parameters(weight_ptr, bias_ptr, column, inside, False)
        lost = is_lost(gamma, beta, SMALLEST)
        last = tl.load(channels_ptr + RESERVE - 1)  # of the reserve, if all of it is taken
        inverse = tl.where(lost, tl.where((last >= 0) & (column > last), float("nan"), 0.0), 1.0)
        inverse = tl.div_rn(inverse, tl.where(lost, 1.0, gamma))
    return gamma, beta, inverse


@triton.jit
def load_tile(
    source_ptr, grad_y_ptr, rstd_ptr, mean_ptr, channels_ptr, row, inside_row, column, inside, beta, inverse,
    NUM_COLUMNS: tl.constexpr, SUBTRACTS_MEAN: tl.constexpr,
):  # fmt: skip
    """Returns xhat, from x where channels_ptr is None and else from y, and grad_y, [m, n] each in float32. From y xhat
    is 0 in the lost channels."""
    offset = row[:, None] * NUM_COLUMNS + column[None, :]
    mask = inside_row[:, None] & inside[None, :]
    xhat = tl.load(source_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_y_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if channels_ptr is None:
        if SUBTRACTS_MEAN:
            xhat -= tl.load(mean_ptr + row, mask=inside_row, other=0.0)[:, None]
        xhat *= tl.load(rstd_ptr + row, mask=inside_row, other=0.0)[:, None]
    else:
        xhat = (xhat - beta[None, :]) * inverse[None, :]
    return xhat, grad


@triton.jit
def load_lost(
    grad_y_ptr, weight_ptr, channels_ptr, lost_xhat_ptr, row, inside_row, block, first_column,
    NUM_COLUMNS: tl.constexpr, RESERVE: tl.constexpr, LOST_COLUMNS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Returns some lost channels [l] of those from first_column on, the mask, grad_y, xhat and gamma * grad_y,
    [m, l] each."""
    slot = block + tl.arange(0, LOST_COLUMNS)
    channel = tl.load(channels_ptr + slot, mask=slot < RESERVE, other=-1)
    is_here = (channel >= first_column) & (channel < first_column + BLOCK_COLUMNS)
    mask = inside_row[:, None] & is_here[None, :]
    grad = tl.load(grad_y_ptr + row[:, None] * NUM_COLUMNS + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    xhat = tl.load(lost_xhat_ptr + row[:, None] * RESERVE + slot[None, :], mask=mask, other=0.0).to(tl.float32)
    gamma = tl.load(weight_ptr + channel, mask=is_here, other=0.0)
    return channel, mask, grad, xhat, grad * gamma[None, :]


@triton.jit
def store_lost(
    grad_y_ptr, rstd_ptr, weight_ptr, channels_ptr, lost_xhat_ptr, means_ptr, grad_x_ptr, partial_ptr,
    num_rows, first, tiles_per_program, first_column,
    NUM_COLUMNS: tl.constexpr, RESERVE: tl.constexpr, LOST_COLUMNS: tl.constexpr, SUBTRACTS_MEAN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Stores the lost columns of grad_x of a program's tiles, and of its row of partial."""
    for block in range(0, RESERVE, LOST_COLUMNS):
        grad_gamma = tl.zeros((LOST_COLUMNS,), dtype=tl.float32)
        for tile in range(first, first + tiles_per_program):
            row = tile * tl.full((1,), BLOCK_ROWS, tl.int64) + tl.arange(0, BLOCK_ROWS)
            inside_row = row < num_rows
            channel, mask, grad, xhat, g = load_lost(
                grad_y_ptr, weight_ptr, channels_ptr, lost_xhat_ptr, row, inside_row, block, first_column,
                NUM_COLUMNS, RESERVE, LOST_COLUMNS, BLOCK_COLUMNS,
            )  # fmt: skip
            grad_gamma += tl.sum(grad * xhat, axis=0)
            grad_x = g - xhat * tl.load(means_ptr + row, mask=inside_row, other=0.0)[:, None]
            if SUBTRACTS_MEAN:
                grad_x -= tl.load(means_ptr + num_rows + row, mask=inside_row, other=0.0)[:, None]
            grad_x *= tl.load(rstd_ptr + row, mask=inside_row, other=0.0)[:, None]
            place = grad_x_ptr + row[:, None] * NUM_COLUMNS + channel[None, :]
            tl.store(place, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
        slot = block + tl.arange(0, LOST_COLUMNS)
        channel = tl.load(channels_ptr + slot, mask=slot < RESERVE, other=-1)
        is_here = (channel >= first_column) & (channel < first_column + BLOCK_COLUMNS)
        tl.store(partial_ptr + channel, grad_gamma, mask=is_here)


@triton.jit
def _means_kernel(
    grad_y_ptr, source_ptr, rstd_ptr, mean_ptr, weight_ptr, channels_ptr, lost_xhat_ptr, means_ptr, num_rows,
    NUM_COLUMNS: tl.constexpr, RESERVE: tl.constexpr, LOST_COLUMNS: tl.constexpr, SMALLEST: tl.constexpr,
    SUBTRACTS_MEAN: tl.constexpr, ZERO_CENTERED: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid: (rows,). One program stores the means of g * xhat and of g over one row in means [2, rows]."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    inside_row = row < num_rows
    along_xhat = tl.zeros((1,), dtype=tl.float32)
    along_ones = tl.zeros((1,), dtype=tl.float32)
    for block in range(0, NUM_COLUMNS, BLOCK_COLUMNS):
        column = block + tl.arange(0, BLOCK_COLUMNS)
        inside = column < NUM_COLUMNS
        gamma, beta, inverse = load_channels(
            weight_ptr, channels_ptr, column, inside, NUM_COLUMNS, RESERVE, SMALLEST, SUBTRACTS_MEAN, ZERO_CENTERED
        )
        xhat, grad = load_tile(
            source_ptr, grad_y_ptr, rstd_ptr, mean_ptr, channels_ptr, row, inside_row, column, inside, beta, inverse,
            NUM_COLUMNS, SUBTRACTS_MEAN,
        )  # fmt: skip
        grad *= gamma[None, :]
        along_xhat += tl.sum(grad * xhat, axis=1)
        along_ones += tl.sum(grad, axis=1)
    if channels_ptr is not None:
        has_lost = tl.load(channels_ptr) >= 0
    if channels_ptr is not None:  # noqa: SIM102
        if has_lost:
            for block in range(0, RESERVE, LOST_COLUMNS):
                _, _, _, xhat, g = load_lost(
                    grad_y_ptr, weight_ptr, channels_ptr, lost_xhat_ptr, row, inside_row, block, 0,
                    NUM_COLUMNS, RESERVE, LOST_COLUMNS, NUM_COLUMNS,
                )  # fmt: skip
                along_xhat += tl.sum(g * xhat, axis=1)
    tl.store(means_ptr + row, along_xhat / NUM_COLUMNS)
    tl.store(means_ptr + num_rows + row, along_ones / NUM_COLUMNS)


@triton.jit
def _backward_kernel(
    grad_y_ptr, source_ptr, rstd_ptr, mean_ptr, weight_ptr, channels_ptr, lost_xhat_ptr, means_ptr, grad_x_ptr,
    partial_ptr, overflow_ptr, num_rows,
    NUM_COLUMNS: tl.constexpr, RESERVE: tl.constexpr, LOST_COLUMNS: tl.constexpr, SMALLEST: tl.constexpr,
    SUBTRACTS_MEAN: tl.constexpr, ZERO_CENTERED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """source is x where channels_ptr is None, else y. For strips means is given, for whole rows it is memory to use."""
    HAS_MEANS: tl.constexpr = BLOCK_COLUMNS < NUM_COLUMNS
    first_column = tl.program_id(1) * BLOCK_COLUMNS
    column = first_column + tl.arange(0, BLOCK_COLUMNS)
    inside = column < NUM_COLUMNS
    gamma, beta, inverse = load_channels(
        weight_ptr, channels_ptr, column, inside, NUM_COLUMNS, RESERVE, SMALLEST, SUBTRACTS_MEAN, ZERO_CENTERED
    )
    if channels_ptr is not None:
        has_lost = tl.load(channels_ptr) >= 0
        if tl.max((inverse != inverse).to(tl.int32), axis=0) > 0:
            tl.store(overflow_ptr, 1)
    grad_gamma = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    grad_beta = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    tiles_per_program = tl.cdiv(tl.cdiv(num_rows, BLOCK_ROWS), tl.num_programs(0))
    first = tl.program_id(0) * tiles_per_program
    for tile in tl.range(first, first + tiles_per_program, num_stages=2):
        row = tile * tl.full((1,), BLOCK_ROWS, tl.int64) + tl.arange(0, BLOCK_ROWS)
        inside_row = row < num_rows
        xhat, grad = load_tile(
            source_ptr, grad_y_ptr, rstd_ptr, mean_ptr, channels_ptr, row, inside_row, column, inside, beta, inverse,
            NUM_COLUMNS, SUBTRACTS_MEAN,
        )  # fmt: skip
        grad_gamma += grad * xhat
        if SUBTRACTS_MEAN:
            grad_beta += grad
        grad *= gamma[None, :]
        along_ones = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
        if HAS_MEANS:
            along_xhat = tl.load(means_ptr + row, mask=inside_row, other=0.0)
            if SUBTRACTS_MEAN:
                along_ones = tl.load(means_ptr + num_rows + row, mask=inside_row, other=0.0)
        else:
            along_xhat = tl.sum(grad * xhat, axis=1)
            if SUBTRACTS_MEAN:
                along_ones = tl.sum(grad, axis=1) / NUM_COLUMNS
            if channels_ptr is not None:  # noqa: SIM102
                if has_lost:
                    for block in tl.static_range(0, RESERVE, LOST_COLUMNS):
                        _, _, _, lost_xhat, g = load_lost(
                            grad_y_ptr, weight_ptr, channels_ptr, lost_xhat_ptr, row, inside_row, block, first_column,
                            NUM_COLUMNS, RESERVE, LOST_COLUMNS, BLOCK_COLUMNS,
                        )  # fmt: skip
                        along_xhat += tl.sum(g * lost_xhat, axis=1)
                    tl.store(means_ptr + row, along_xhat / NUM_COLUMNS, mask=inside_row)
                    tl.store(means_ptr + num_rows + row, along_ones, mask=inside_row)
            along_xhat /= NUM_COLUMNS
        grad_x = grad - xhat * along_xhat[:, None]
        if SUBTRACTS_MEAN:
            grad_x -= along_ones[:, None]
        grad_x *= tl.load(rstd_ptr + row, mask=inside_row, other=0.0)[:, None]
        offset = row[:, None] * NUM_COLUMNS + column[None, :]
        mask = inside_row[:, None] & inside[None, :]
        tl.store(grad_x_ptr + offset, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
    partial_ptr += tl.program_id(0).to(tl.int64) * NUM_COLUMNS
    tl.store(partial_ptr + column, tl.sum(grad_gamma, axis=0), mask=inside)
    if SUBTRACTS_MEAN:
        place = partial_ptr + tl.num_programs(0).to(tl.int64) * NUM_COLUMNS + column
        tl.store(place, tl.sum(grad_beta, axis=0), mask=inside)
    if channels_ptr is not None:  # noqa: SIM102
        if has_lost:
            tl.debug_barrier()  # its stores go to the lost columns of what is stored above, and it reads the means
            store_lost(
                grad_y_ptr, rstd_ptr, weight_ptr, channels_ptr, lost_xhat_ptr, means_ptr, grad_x_ptr, partial_ptr,
                num_rows, first, tiles_per_program, first_column,
                NUM_COLUMNS, RESERVE, LOST_COLUMNS, SUBTRACTS_MEAN, BLOCK_ROWS, BLOCK_COLUMNS,
            )  # fmt: skip


@cache_plans
def plan_backward(
    num_rows: int, num_columns: int, x_dtype: torch.dtype, dtype: torch.dtype, from_output: bool, subtracts_mean: bool,
    zero_centered: bool, device: torch.device, blocks: Blocks,
) -> tuple[tuple[int, int, int], Plan | None, Plan]:  # fmt: skip
    """Returns partial's shape, and the launches for the means of long rows and for grad_x; dtype is the source's."""
    row = describe_row(num_columns, zero_centered) | {
        "num_rows": num_rows,
        "SUBTRACTS_MEAN": subtracts_mean,
        "SMALLEST": eager.get_smallest_carried(dtype),
    }
    # Of a LayerNorm from y a thread holds five numbers per channel, else three or four.
    limit = blocks.backward_row_bytes // (2 if from_output and subtracts_mean else 1)
    is_long = num_columns * x_dtype.itemsize > limit and num_columns > blocks.strip_columns
    means = Plan((num_rows,), **row, **blocks.loop()) if is_long else None
    programs = blocks.backward_warps * (blocks.multiprocessors or count_multiprocessors(device))
    grid, tile = blocks.divide(num_rows, num_columns, is_long, programs, counts_warps=True)
    return (1 + subtracts_mean, grid[0], num_columns), means, Plan(grid, **row, **tile)


def launch_backward(
    grad_y: Tensor, source: Tensor, norm: Norm, statistics: tuple[Tensor, Tensor | None],
    dtypes: tuple[torch.dtype, torch.dtype], blocks: Blocks, lost: tuple[Tensor | None, ...] = (None, None, None),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns grad_x, and the gradients of gamma and beta [1 or 2, h], in these dtypes. `source` is x, or y where
    `lost` is given: channels, their columns, and the flag that is set where lost channels have no column."""
    grad_x, num_columns, device = torch.empty_like(source, dtype=dtypes[0]), source.size(-1), source.device
    if source.numel() == 0:
        return grad_x, torch.zeros(1 + norm.subtracts_mean, num_columns, dtype=dtypes[1], device=device)
    num_rows, (*columns, overflow) = source.numel() // num_columns, lost
    form = dtypes[0], source.dtype, lost[0] is not None, norm.subtracts_mean, norm.zero_centered
    partial_shape, for_means, plan = plan_backward(num_rows, num_columns, *form, device, blocks)
    tensors = (grad_y.contiguous(), source, *statistics, norm.weight.contiguous(), *columns)
    means = torch.empty(2, num_rows, dtype=torch.float32, device=device)
    if for_means is not None:
        launch(_means_kernel, for_means, (*tensors, means))
    partial = torch.empty(partial_shape, dtype=torch.float32, device=device)
    launch(_backward_kernel, plan, (*tensors, means, grad_x, partial, overflow))
    num_warps = plan.named["num_warps"]
    return grad_x, add_up(partial, dtypes[1], num_warps * 1024, num_warps)

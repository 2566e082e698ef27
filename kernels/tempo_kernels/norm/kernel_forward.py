"""Computes the forward of LayerNorm and RMSNorm in Triton, and finds the channels that y does not carry.

Grid: (row tiles, strips of columns). A program normalises tiles_per_program tiles [BLOCK_ROWS, BLOCK_COLUMNS] below one
another; program_id(1) is its strip.
- Whole rows: one strip. A program has its rows in registers, reads x once, and takes the variance as the mean of
  (x - mean)^2: two passes over registers, exact even where the mean is large compared with the deviation.
- Long rows: `_statistics_kernel` reads each row in a loop over columns and stores mean and rstd; `_forward_kernel` is
  given them. It is also given them where it writes a dropped y again, whose bits are then the same.

In place, `_channels_kernel` runs before: it copies gamma and beta for backward, and lists the lost channels (eager.py)
in `channels` [reserve], in their order, with -1 behind the last. A program stores their xhat in lost_xhat [rows,
reserve]. These few columns are read once more, from the cache; where none is lost, that costs one branch per tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.kernel_launch import Plan, cache_plans, launch
from tempo_kernels.norm import eager
from tempo_kernels.norm.settings import Blocks, Norm, describe_row

MAX_OFFSET = tl.constexpr(eager.MAX_OFFSET)
LARGEST = tl.constexpr(eager.LARGEST)


@triton.jit
def load_parameters(weight_ptr, bias_ptr, column, inside, ZERO_CENTERED: tl.constexpr):
    """Loads gamma and beta in float32, with 1 and 0 outside; an RMSNorm's bias_ptr is None and its beta 0."""
    if ZERO_CENTERED:
        gamma = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32) + 1.0
    else:
        gamma = tl.load(weight_ptr + column, mask=inside, other=1.0).to(tl.float32)
    beta = tl.zeros_like(gamma)
    if bias_ptr is not None:
        beta = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return gamma, beta


@triton.jit
def is_lost(gamma, beta, SMALLEST: tl.constexpr):
    """Whether a rounded y does not carry xhat; so it is where gamma or beta is NaN."""
    gamma, beta = tl.abs(gamma), tl.abs(beta)
    return ~((gamma > SMALLEST) & (gamma <= LARGEST) & (beta <= MAX_OFFSET * gamma))


@triton.jit
def _channels_kernel(
    weight_ptr, bias_ptr, affine_ptr, channels_ptr,
    NUM_COLUMNS: tl.constexpr, RESERVE: tl.constexpr, SMALLEST: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid: (1,). Fills affine and channels."""
    num_lost = 0
    for block in range(0, NUM_COLUMNS, BLOCK_COLUMNS):
        column = block + tl.arange(0, BLOCK_COLUMNS)
        inside = column < NUM_COLUMNS
        gamma, beta = load_parameters(weight_ptr, bias_ptr, column, inside, ZERO_CENTERED)
        tl.store(affine_ptr + column, gamma, mask=inside)
        if bias_ptr is not None:
            tl.store(affine_ptr + NUM_COLUMNS + column, beta, mask=inside)
        lost = is_lost(gamma, beta, SMALLEST)
        slot = num_lost + tl.cumsum(lost.to(tl.int32), axis=0) - 1
        tl.store(channels_ptr + slot, column, mask=lost & (slot < RESERVE))
        num_lost += tl.sum(lost.to(tl.int32), axis=0)
    for block in range(0, RESERVE, BLOCK_COLUMNS):
        slot = block + tl.arange(0, BLOCK_COLUMNS)
        tl.store(channels_ptr + slot, -1, mask=(slot >= num_lost) & (slot < RESERVE))


@triton.jit
def _statistics_kernel(x_ptr, rstd_ptr, mean_ptr, eps, NUM_COLUMNS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Grid: (rows,). One program reads one row twice, the second time from the L2 cache."""
    row = tl.program_id(0).to(tl.int64)
    mean = 0.0
    if mean_ptr is not None:
        for block in range(0, NUM_COLUMNS, BLOCK_COLUMNS):
            column = block + tl.arange(0, BLOCK_COLUMNS)
            x = tl.load(x_ptr + row * NUM_COLUMNS + column, mask=column < NUM_COLUMNS, other=0.0)
            mean += tl.sum(x.to(tl.float32), axis=0)
        mean /= NUM_COLUMNS
        tl.store(mean_ptr + row, mean)
    variance = 0.0
    for block in range(0, NUM_COLUMNS, BLOCK_COLUMNS):
        column = block + tl.arange(0, BLOCK_COLUMNS)
        x = tl.load(x_ptr + row * NUM_COLUMNS + column, mask=column < NUM_COLUMNS, other=0.0).to(tl.float32)
        x = tl.where(column < NUM_COLUMNS, x - mean, 0.0)
        variance += tl.sum(x * x, axis=0)
    tl.store(rstd_ptr + row, tl.rsqrt(variance / NUM_COLUMNS + eps))


@triton.jit
def _forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, rstd_ptr, mean_ptr, channels_ptr, lost_xhat_ptr,
    num_rows, eps,
    NUM_COLUMNS: tl.constexpr, RESERVE: tl.constexpr, LOST_COLUMNS: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    HAS_STATISTICS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """With HAS_STATISTICS it reads rstd and mean; else it stores rstd, and mean if mean_ptr is given."""
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = column < NUM_COLUMNS
    gamma, beta = load_parameters(weight_ptr, bias_ptr, column, inside, ZERO_CENTERED)
    if channels_ptr is not None:
        has_lost = (tl.load(channels_ptr) >= 0) & (tl.program_id(1) == tl.num_programs(1) - 1)
    tiles_per_program = tl.cdiv(tl.cdiv(num_rows, BLOCK_ROWS), tl.num_programs(0))
    first = tl.program_id(0) * tiles_per_program
    for tile in tl.range(first, first + tiles_per_program, num_stages=2):
        row = tile * tl.full((1,), BLOCK_ROWS, tl.int64) + tl.arange(0, BLOCK_ROWS)
        inside_row = row < num_rows
        offset = row[:, None] * NUM_COLUMNS + column[None, :]
        mask = inside_row[:, None] & inside[None, :]
        xhat = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        mean = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
        if HAS_STATISTICS:
            if bias_ptr is not None:
                mean = tl.load(mean_ptr + row, mask=inside_row, other=0.0)
                xhat -= mean[:, None]
            rstd = tl.load(rstd_ptr + row, mask=inside_row, other=0.0)
        else:
            if bias_ptr is not None:
                mean = tl.sum(xhat, axis=1) / NUM_COLUMNS
                xhat = tl.where(mask, xhat - mean[:, None], 0.0)
                if mean_ptr is not None:
                    tl.store(mean_ptr + row, mean, mask=inside_row)
            rstd = tl.rsqrt(tl.sum(xhat * xhat, axis=1) / NUM_COLUMNS + eps)
            tl.store(rstd_ptr + row, rstd, mask=inside_row)
        xhat *= rstd[:, None]
        y = tl.fma(xhat, gamma[None, :], beta[None, :])
        tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)
        if channels_ptr is not None:  # noqa: SIM102
            if has_lost:
                for block in range(0, RESERVE, LOST_COLUMNS):
                    slot = block + tl.arange(0, LOST_COLUMNS)
                    channel = tl.load(channels_ptr + slot, mask=slot < RESERVE, other=-1)
                    is_kept = inside_row[:, None] & (channel >= 0)[None, :]
                    x = tl.load(x_ptr + row[:, None] * NUM_COLUMNS + channel[None, :], mask=is_kept, other=0.0)
                    lost_xhat = (x.to(tl.float32) - mean[:, None]) * rstd[:, None]
                    place = lost_xhat_ptr + row[:, None] * RESERVE + slot[None, :]
                    tl.store(place, lost_xhat.to(lost_xhat_ptr.dtype.element_ty), mask=is_kept)


@cache_plans
def plan_forward(
    num_rows: int, num_columns: int, x_dtype: torch.dtype, dtype: torch.dtype, eps: float, zero_centered: bool,
    has_statistics: bool, blocks: Blocks,
) -> tuple[Plan, Plan | None, Plan]:  # fmt: skip
    """Plans the launches for the channels, the statistics of long rows, and y, whose dtype is `dtype`."""
    row = describe_row(num_columns, zero_centered)
    in_loop = blocks.loop()
    channels = row | {"SMALLEST": eager.get_smallest_carried(dtype)} | in_loop
    del channels["LOST_COLUMNS"]
    is_long = num_columns * x_dtype.itemsize > blocks.forward_row_bytes
    statistics = None
    if is_long and not has_statistics:
        statistics = Plan((num_rows,), eps=eps, NUM_COLUMNS=num_columns, **in_loop)
    grid, tile = blocks.divide(num_rows, num_columns, is_long, blocks.forward_programs)
    forward = Plan(grid, **row, num_rows=num_rows, eps=eps, HAS_STATISTICS=is_long or has_statistics, **tile)
    return Plan((1,), **channels), statistics, forward


def launch_forward(
    x: Tensor, norm: Norm, y: Tensor, kept: tuple[Tensor | None, ...], has_statistics: bool, blocks: Blocks,
    found: tuple[Tensor, ...] = (),
) -> None:  # fmt: skip
    """Fills y and `kept`, which is rstd, mean, channels and lost_xhat, or None for those that the form lacks; in place
    `found` is what `_channels_kernel` fills: affine and channels."""
    if x.numel() == 0:
        return
    num_columns, (rstd, mean, *lost) = x.size(-1), kept
    sizes = x.numel() // num_columns, num_columns
    form = norm.eps, norm.zero_centered, has_statistics
    for_channels, for_statistics, for_y = plan_forward(*sizes, x.dtype, y.dtype, *form, blocks)
    parameters = norm.weight.contiguous(), None if norm.bias is None else norm.bias.contiguous()
    if found:
        launch(_channels_kernel, for_channels, (*parameters, *found))
    x = x.contiguous()
    if for_statistics is not None:
        assert rstd is not None
        mean = torch.empty_like(rstd) if norm.bias is not None and mean is None else mean
        launch(_statistics_kernel, for_statistics, (x, rstd, mean))
    launch(_forward_kernel, for_y, (x, *parameters, y, rstd, mean, *lost))

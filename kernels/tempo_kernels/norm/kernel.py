"""LayerNorm and RMSNorm, differentiated from their output, in Triton; eager.py is the specification.

Rows up to FORWARD_ROW_BYTES and BACKWARD_ROW_BYTES stay in registers: one read of each input, one write of each output;
for longer rows see long_rows/kernel.py. The host counts the lost channels in every forward, and for that it waits for
the GPU once per call; a form without waiting is still to come. Only where there are any, kernels are compiled with the
code that keeps them.

Kept for backward: y (the next linear's own), rstd, and where channels are lost, slots and lost_xhat (see forward).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.norm import eager
from tempo_kernels.norm.long_rows import kernel as long_rows
from tempo_kernels.norm.lost_channels.kernel import parameters, restored, store_lost

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FORWARD_ROW_BYTES = 32768
BACKWARD_ROW_BYTES = 16384
FORWARD_PROGRAMS = 2048
BACKWARD_PROGRAMS = 264
STAGES = tl.constexpr(2)


@triton.jit(do_not_specialize=["tiles_per_program", "capacity"])
def _forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, rstd_ptr, slots_ptr, lost_xhat_ptr,
    num_rows, column_units, capacity, eps, tiles_per_program,
    UNIT: tl.constexpr, SUBTRACTS_MEAN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LOST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: tiles_per_program tiles of whole rows below one another."""
    num_columns = column_units * UNIT
    column = tl.arange(0, BLOCK_COLUMNS)
    inside = column < num_columns
    gamma, beta = parameters(weight_ptr, bias_ptr, column, inside, HAS_BIAS)
    first = tl.program_id(0) * tiles_per_program
    for tile in tl.range(first, first + tiles_per_program, num_stages=STAGES):
        row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        offset = row.to(tl.int64)[:, None] * num_columns + column[None, :]
        mask = (row < num_rows)[:, None] & inside[None, :]
        xhat = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        if SUBTRACTS_MEAN:
            mean = tl.sum(xhat, axis=1) / num_columns
            xhat = tl.where(mask, xhat - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(xhat * xhat, axis=1) / num_columns + eps)
        xhat *= rstd[:, None]
        tl.store(rstd_ptr + row, rstd, mask=row < num_rows)
        if HAS_LOST:
            store_lost(slots_ptr, lost_xhat_ptr, row, column, inside, xhat, num_rows, capacity)
        y = xhat * gamma[None, :] + beta[None, :]
        tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tiles_per_program", "capacity"])
def _backward_kernel(
    grad_y_ptr, y_ptr, rstd_ptr, weight_ptr, bias_ptr, slots_ptr, lost_xhat_ptr, grad_x_ptr, partial_ptr,
    num_rows, column_units, capacity, tiles_per_program,
    UNIT: tl.constexpr, SUBTRACTS_MEAN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LOST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: tiles_per_program tiles of whole rows, and their sums over rows into its part of partial."""
    num_columns = column_units * UNIT
    column = tl.arange(0, BLOCK_COLUMNS)
    inside = column < num_columns
    gamma, beta = parameters(weight_ptr, bias_ptr, column, inside, HAS_BIAS)
    # Where y carries xhat, y - beta is gamma * xhat: dividing late holds fewer numbers per channel in registers.
    divisor, along = gamma[None, :], 1.0
    if HAS_LOST:
        carried = tl.load(slots_ptr + column, mask=inside, other=-1) < 0
        divisor = tl.where(carried, gamma, 1.0)[None, :]
        along = tl.where(carried, 1.0, gamma)[None, :]
    grad_gamma = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    grad_beta = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    first = tl.program_id(0) * tiles_per_program
    for tile in tl.range(first, first + tiles_per_program, num_stages=STAGES):
        row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        offset = row.to(tl.int64)[:, None] * num_columns + column[None, :]
        mask = (row < num_rows)[:, None] & inside[None, :]
        y = tl.load(y_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_y_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < num_rows, other=0.0)
        scaled = y - beta[None, :]
        if HAS_LOST:
            scaled = restored(scaled, slots_ptr, lost_xhat_ptr, row, column, inside, num_rows, capacity)
        product = grad * scaled
        grad_gamma += product
        if HAS_BIAS:
            grad_beta += grad
        grad *= gamma[None, :]
        along_xhat = tl.sum(product * along, axis=1) / num_columns
        if SUBTRACTS_MEAN:
            grad -= (tl.sum(grad, axis=1) / num_columns)[:, None]
        grad_x = (grad - scaled / divisor * along_xhat[:, None]) * rstd[:, None]
        tl.store(grad_x_ptr + offset, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
    partial = partial_ptr + tl.program_id(0).to(tl.int64) * num_columns + column
    tl.store(partial, tl.sum(grad_gamma / divisor, axis=0), mask=inside)
    if HAS_BIAS:
        partial += tl.num_programs(0).to(tl.int64) * num_columns
        tl.store(partial, tl.sum(grad_beta, axis=0), mask=inside)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, subtracts_mean: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y [..., h], rstd [rows] (float32), slots and lost_xhat.

    slots (int32 [h]) is each channel's column in lost_xhat [rows, k] (x's dtype), or -1 where y carries it; k is the
    number of lost channels rounded up to a multiple of eight, so that the size of the allocation seldom changes. Where
    none is lost (as with every common initialisation), both are empty.
    """
    _check(x)
    hidden_size = x.size(-1)
    num_rows = math.prod(x.shape[:-1])
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    slots, capacity = _slots(eager.lost_channels(weight, bias, x.dtype), hidden_size)
    lost_xhat = torch.empty(num_rows, capacity, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y, rstd, slots, lost_xhat
    weight, bias = _contiguous(weight, bias)
    sizes = _sizes(x, num_rows, lost_xhat)
    with torch.cuda.device_of(x):
        tensors = (x.contiguous(), weight, bias, y, rstd, slots, lost_xhat)
        flags = {"SUBTRACTS_MEAN": subtracts_mean, "HAS_BIAS": bias is not None, "HAS_LOST": slots.numel() > 0}
        if _is_long(x, slots, FORWARD_ROW_BYTES):
            long_rows.forward(*tensors, **sizes, eps=eps, **flags)
        else:
            num_programs, tiles = _tiles(num_rows, hidden_size, slots, FORWARD_PROGRAMS)
            _forward_kernel[(num_programs,)](*tensors, **sizes, eps=eps, **flags, **tiles)
    return y, rstd, slots, lost_xhat


def backward(
    grad_y: Tensor,
    y: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: Tensor,
    lost_xhat: Tensor,
    subtracts_mean: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """grad_x [..., h] in y's dtype; grad_weight and, where there is a bias, grad_bias [h] in float32.

    The sums over rows have two stages, each in a fixed order: the same bits every time on the same GPU.
    """
    num_rows, hidden_size = rstd.numel(), y.size(-1)
    grad_x = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if y.numel() == 0:
        zeros = torch.zeros(2, hidden_size, device=y.device)
        return grad_x, zeros[0], None if bias is None else zeros[1]
    tensors = (grad_y.contiguous(), y, rstd, *_contiguous(weight, bias), slots, lost_xhat, grad_x)
    sizes = _sizes(y, num_rows, lost_xhat)
    flags = {"SUBTRACTS_MEAN": subtracts_mean, "HAS_BIAS": bias is not None, "HAS_LOST": slots.numel() > 0}
    with torch.cuda.device_of(y):
        if _is_long(y, slots, BACKWARD_ROW_BYTES):
            partial = long_rows.backward(*tensors, **sizes, **flags)
        else:
            num_programs, tiles = _tiles(num_rows, hidden_size, slots, _backward_programs(y))
            partial = torch.empty(1 if bias is None else 2, num_programs, hidden_size, device=y.device)
            _backward_kernel[(num_programs,)](*tensors, partial, **sizes, **flags, **tiles)
    sums = partial.sum(1)
    return grad_x, sums[0], None if bias is None else sums[1]


def _slots(lost: Tensor, hidden_size: int) -> tuple[Tensor, int]:
    """slots as forward returns them, for the indices of the lost channels, and how many columns lost_xhat has."""
    if not lost.numel():
        return torch.empty(0, dtype=torch.int32, device=lost.device), 0
    slots = torch.full((hidden_size,), -1, dtype=torch.int32, device=lost.device)
    slots[lost] = torch.arange(lost.numel(), dtype=torch.int32, device=lost.device)
    return slots, -(-lost.numel() // 8) * 8


def _is_long(x: Tensor, slots: Tensor, limit: int) -> bool:
    """Whether a row takes more registers than a program has; lost channels take some too."""
    return x.size(-1) * x.element_size() * (2 if slots.numel() else 1) > limit


def _tiles(num_rows: int, hidden_size: int, slots: Tensor, max_programs: int) -> tuple[int, dict[str, Any]]:
    """Programs and their meta-parameters: 16 elements a thread, 8 where it has lost channels to find too."""
    columns = triton.next_power_of_2(hidden_size)
    rows = max(1, 2048 // columns)
    num_tiles = -(-num_rows // rows)
    tiles_per_program = -(-num_tiles // max_programs)
    return -(-num_tiles // tiles_per_program), {
        "tiles_per_program": tiles_per_program,
        "BLOCK_ROWS": rows,
        "BLOCK_COLUMNS": columns,
        "num_warps": min(16, rows * columns // (256 if slots.numel() else 512)),
        "enable_fp_fusion": True,
    }


def _backward_programs(x: Tensor) -> int:
    """As many as run at once: two on each multiprocessor."""
    return 2 * torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else BACKWARD_PROGRAMS


def _sizes(x: Tensor, num_rows: int, lost_xhat: Tensor) -> dict[str, Any]:
    """The launch arguments that all kernels share; h in units of 8, so that the compiler knows it for a multiple."""
    unit = 1 if x.size(-1) % 8 else 8
    return {
        "num_rows": num_rows,
        "column_units": x.size(-1) // unit,
        "capacity": lost_xhat.size(1),
        "UNIT": unit,
    }


def _contiguous(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight.contiguous(), None if bias is None else bias.contiguous()


def _check(x: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"norm: x is {x.dtype}; float32, float16 or bfloat16 is wanted on a GPU; cast it")

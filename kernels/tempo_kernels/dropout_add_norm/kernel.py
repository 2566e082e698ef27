"""Bias, dropout, residual addition and norm in Triton, in one pass; eager.py is the specification.

A program holds whole rows in its registers: each input is read once and each output written once. Rows longer than
FORWARD_COLUMNS and BACKWARD_COLUMNS do not fit: they take the two operations in a row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.dropout_add import Draw
from tempo_kernels.dropout_add import kernel as dropout_add
from tempo_kernels.dropout_add.kernel import VARYING, draw_arguments, tile_mask
from tempo_kernels.dropout_add_norm.in_a_row import InARow
from tempo_kernels.norm import kernel as norm
from tempo_kernels.norm import kernel_lost_channels as lost_channels
from tempo_kernels.philox.kernel import loaded_draw

IN_A_ROW = InARow(dropout_add, norm)
FORWARD_COLUMNS = 8192
BACKWARD_COLUMNS = 4096
FORWARD_PROGRAMS = 2048
BACKWARD_PROGRAMS = 264
STAGES = tl.constexpr(2)
COUNTED_COLUMNS = tl.constexpr(4096)


@triton.jit(do_not_specialize=[*VARYING, "tiles_per_program", "capacity"])
def _forward_kernel(
    x_ptr, bias_ptr, residual_ptr, weight_ptr, norm_bias_ptr, residual_out_ptr, y_ptr, rstd_ptr,
    key_ptr, first_sample_ptr, affine_ptr, slots_ptr, lost_xhat_ptr, counts_ptr,
    num_rows, column_units, batch, first_sample, first_row, limit, scale, key_low, key_high,
    capacity, eps, tiles_per_program,
    UNIT: tl.constexpr, DRAWS: tl.constexpr, LOADS_KEY: tl.constexpr, LOADS_SAMPLE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM_BIAS: tl.constexpr, SUBTRACTS_MEAN: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    HAS_LOST: tl.constexpr, SMALLEST: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: tiles_per_program tiles of whole rows below one another."""
    num_columns = column_units * UNIT
    if not HAS_LOST:
        # A program of its own, whose rows all lie outside: nobody waits for it.
        is_last = tl.program_id(0) == tl.num_programs(0) - 1
        if is_last:
            lost_channels.find_channels(
                weight_ptr, norm_bias_ptr, affine_ptr, slots_ptr, counts_ptr, num_columns, 0,
                HAS_NORM_BIAS, ZERO_CENTERED, False, SMALLEST, COUNTED_COLUMNS,
            )  # fmt: skip
    column = tl.arange(0, BLOCK_COLUMNS)
    inside = column < num_columns
    gamma, beta = lost_channels.parameters(weight_ptr, norm_bias_ptr, column, inside, HAS_NORM_BIAS, ZERO_CENTERED)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    key_low, key_high, first_sample = loaded_draw(
        key_ptr, first_sample_ptr, key_low, key_high, first_sample, LOADS_KEY, LOADS_SAMPLE
    )
    first = tl.program_id(0) * tiles_per_program
    for tile in tl.range(first, first + tiles_per_program, num_stages=STAGES):
        row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        offset = row.to(tl.int64)[:, None] * num_columns + column[None, :]
        mask = (row < num_rows)[:, None] & inside[None, :]
        out = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            out += bias
        if DRAWS:
            dropped = tile_mask(row, 0, batch, first_sample, first_row, limit, key_low, key_high, BLOCK_COLUMNS)
            out = tl.where(dropped, 0.0, out)
        rounded = tl.fma(out, scale, residual).to(residual_out_ptr.dtype.element_ty)
        tl.store(residual_out_ptr + offset, rounded, mask=mask)
        # The norm is that of the numbers that were written.
        xhat = rounded.to(tl.float32)
        if SUBTRACTS_MEAN:
            mean = tl.sum(xhat, axis=1) / num_columns
            xhat = tl.where(mask, xhat - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(xhat * xhat, axis=1) / num_columns + eps)
        tl.store(rstd_ptr + row, rstd, mask=row < num_rows)
        xhat *= rstd[:, None]
        if HAS_LOST:
            lost_channels.store_lost(
                slots_ptr, lost_xhat_ptr, row.to(tl.int64), column, inside, xhat, num_rows, capacity
            )
        y = tl.fma(xhat, gamma[None, :], beta[None, :])
        tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=[*VARYING, "tiles_per_program", "capacity"])
def _backward_kernel(
    grad_residual_out_ptr, grad_y_ptr, y_ptr, rstd_ptr, weight_ptr, norm_bias_ptr,
    grad_x_ptr, grad_residual_ptr, partial_ptr, key_ptr, first_sample_ptr, slots_ptr, lost_xhat_ptr,
    num_rows, column_units, batch, first_sample, first_row, limit, scale, key_low, key_high,
    capacity, tiles_per_program,
    UNIT: tl.constexpr, DRAWS: tl.constexpr, LOADS_KEY: tl.constexpr, LOADS_SAMPLE: tl.constexpr,
    HAS_GRAD_RESIDUAL_OUT: tl.constexpr, NEEDS_GRAD_BIAS: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr, SUBTRACTS_MEAN: tl.constexpr, ZERO_CENTERED: tl.constexpr, HAS_LOST: tl.constexpr,
    SMALLEST: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: tiles_per_program tiles of whole rows, and their sums over rows into its part of partial.

    weight and norm_bias are what the forward used.
    """
    num_columns = column_units * UNIT
    column = tl.arange(0, BLOCK_COLUMNS)
    inside = column < num_columns
    gamma, beta = lost_channels.parameters(weight_ptr, norm_bias_ptr, column, inside, HAS_NORM_BIAS, ZERO_CENTERED)
    gamma, beta = lost_channels.poisoned(gamma, beta, HAS_LOST, SMALLEST)
    key_low, key_high, first_sample = loaded_draw(
        key_ptr, first_sample_ptr, key_low, key_high, first_sample, LOADS_KEY, LOADS_SAMPLE
    )
    grad_gamma = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    grad_beta = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    grad_bias = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    first = tl.program_id(0) * tiles_per_program
    for tile in tl.range(first, first + tiles_per_program, num_stages=STAGES):
        row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        offset = row.to(tl.int64)[:, None] * num_columns + column[None, :]
        mask = (row < num_rows)[:, None] & inside[None, :]
        y = tl.load(y_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_y_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        if HAS_GRAD_RESIDUAL_OUT:
            grad_residual_out = tl.load(grad_residual_out_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < num_rows, other=0.0)
        # gamma * xhat, divided late: that holds fewer numbers per channel in registers. Of lost channels xhat itself.
        scaled = y - beta[None, :]
        if HAS_LOST:
            scaled = lost_channels.restored(
                scaled, slots_ptr, lost_xhat_ptr, row.to(tl.int64), column, inside, num_rows, capacity
            )
        product = grad * scaled
        grad_gamma += product
        if HAS_NORM_BIAS:
            grad_beta += grad
        grad *= gamma[None, :]
        if HAS_LOST:
            product = tl.where((beta != beta)[None, :], product * gamma[None, :], product)
        xhat = scaled / lost_channels.divisor(gamma, beta, HAS_LOST)[None, :]
        along_xhat = tl.sum(product, axis=1) / num_columns
        if SUBTRACTS_MEAN:
            grad -= (tl.sum(grad, axis=1) / num_columns)[:, None]
        grad = (grad - xhat * along_xhat[:, None]) * rstd[:, None]
        if HAS_GRAD_RESIDUAL_OUT:
            grad += grad_residual_out
        tl.store(grad_residual_ptr + offset, grad.to(grad_residual_ptr.dtype.element_ty), mask=mask)
        if DRAWS:
            dropped = tile_mask(row, 0, batch, first_sample, first_row, limit, key_low, key_high, BLOCK_COLUMNS)
            grad = tl.where(dropped, 0.0, grad * scale)
            tl.store(grad_x_ptr + offset, grad.to(grad_x_ptr.dtype.element_ty), mask=mask)
        if NEEDS_GRAD_BIAS:
            grad_bias += grad
    quotient = grad_gamma / lost_channels.divisor(gamma, beta, HAS_LOST)[None, :]
    partial = partial_ptr + tl.program_id(0).to(tl.int64) * num_columns + column
    programs = tl.num_programs(0).to(tl.int64) * num_columns
    tl.store(partial, tl.sum(quotient, axis=0), mask=inside)
    if HAS_NORM_BIAS:
        partial += programs
        tl.store(partial, tl.sum(grad_beta, axis=0), mask=inside)
    if NEEDS_GRAD_BIAS:
        partial += programs
        tl.store(partial, tl.sum(grad_bias, axis=0), mask=inside)


def forward(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    subtracts_mean: bool,
    zero_centered: bool,
    draw: Draw,
    needs_grad: bool = True,
) -> tuple[Tensor, ...]:
    """residual_out and y [s, b, h], and what the norm keeps beside y: rstd (float32), affine, slots and lost_xhat."""
    if x.numel() == 0 or x.size(-1) > FORWARD_COLUMNS:
        form = (eps, subtracts_mean, zero_centered, draw, needs_grad)
        return IN_A_ROW.forward(x, bias, residual, weight, norm_bias, *form)
    dropout_add.check(x)
    num_rows, hidden_size = x.size(0) * x.size(1), x.size(-1)
    residual_out, y = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        slots, capacity, counts, affine = lost_channels.find_lost(x, weight, norm_bias, zero_centered, needs_grad)
        lost_xhat = torch.empty(num_rows, capacity, dtype=x.dtype, device=x.device)
        num_programs, tiles = _tiles(num_rows, hidden_size, 8 if capacity else 16, FORWARD_PROGRAMS)
        _forward_kernel[(num_programs + (capacity == 0),)](
            x_ptr=x.contiguous(),
            bias_ptr=None if bias is None else bias.contiguous(),
            residual_ptr=residual.contiguous(),
            residual_out_ptr=residual_out,
            y_ptr=y,
            affine_ptr=affine,
            counts_ptr=counts,
            eps=eps,
            ZERO_CENTERED=zero_centered,
            HAS_BIAS=bias is not None,
            SUBTRACTS_MEAN=subtracts_mean,
            **_norm_arguments(rstd, weight, norm_bias, slots, lost_xhat),
            **draw_arguments(x, *draw),
            **tiles,
        )
    return residual_out, y, rstd, affine, slots, lost_xhat


def backward(
    grad_residual_out: Tensor | None,
    grad_y: Tensor | None,
    y: Tensor,
    rstd: Tensor,
    affine: Tensor,
    slots: Tensor,
    lost_xhat: Tensor,
    draw: Draw,
    bias_dtype: torch.dtype | None,
    weight_dtype: torch.dtype,
    norm_bias_dtype: torch.dtype | None,
) -> tuple[Tensor | None, ...]:
    """The gradients of x, bias (in bias_dtype, where that is given), residual, weight and norm_bias.

    One of grad_residual_out and grad_y may be None: that output was not used. The sums over rows have two stages, each
    in a fixed order: the same bits every time on the same GPU.
    """
    if grad_y is None or y.numel() == 0 or y.size(-1) > BACKWARD_COLUMNS:
        dtypes = (bias_dtype, weight_dtype, norm_bias_dtype)
        return IN_A_ROW.backward(grad_residual_out, grad_y, y, rstd, affine, slots, lost_xhat, draw, *dtypes)
    norm_bias = None if norm_bias_dtype is None else affine[1]
    draws = draw_arguments(y, *draw)
    grad_residual = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    grad_x = torch.empty_like(grad_residual) if draws["DRAWS"] else grad_residual
    with torch.cuda.device_of(y):
        norm.check_after_backward(y.device)
        num_programs, tiles = _tiles(rstd.numel(), y.size(-1), 8, _backward_programs(y))
        num_sums = 1 + (norm_bias is not None) + (bias_dtype is not None)
        partial = torch.empty(num_sums, num_programs, y.size(-1), dtype=torch.float32, device=y.device)
        _backward_kernel[(num_programs,)](
            grad_residual_out_ptr=None if grad_residual_out is None else grad_residual_out.contiguous(),
            grad_y_ptr=grad_y.contiguous(),
            y_ptr=y,
            grad_x_ptr=grad_x,
            grad_residual_ptr=grad_residual,
            partial_ptr=partial,
            HAS_GRAD_RESIDUAL_OUT=grad_residual_out is not None,
            NEEDS_GRAD_BIAS=bias_dtype is not None,
            ZERO_CENTERED=False,
            SUBTRACTS_MEAN=norm_bias is not None,
            **_norm_arguments(rstd, affine[0], norm_bias, slots, lost_xhat),
            **draws,
            maxnreg=128,  # two programs on a multiprocessor
            **tiles,
        )
        sums = partial.sum(1)
    if bias_dtype in (None, weight_dtype) and norm_bias_dtype in (None, weight_dtype):
        sums = sums.to(weight_dtype)  # one launch for all
    grad_bias = None if bias_dtype is None else sums[-1].to(bias_dtype)
    grad_norm_bias = None if norm_bias_dtype is None else sums[1].to(norm_bias_dtype)
    return grad_x, grad_bias, grad_residual, sums[0].to(weight_dtype), grad_norm_bias


def _norm_arguments(
    rstd: Tensor, weight: Tensor, norm_bias: Tensor | None, slots: Tensor, lost_xhat: Tensor
) -> dict[str, Any]:
    """The launch arguments that both kernels take for the norm."""
    capacity = lost_xhat.size(1)
    return {
        "rstd_ptr": rstd,
        "weight_ptr": weight.contiguous(),
        "norm_bias_ptr": None if norm_bias is None else norm_bias.contiguous(),
        "slots_ptr": slots,
        "lost_xhat_ptr": lost_xhat,
        "capacity": capacity,
        "HAS_NORM_BIAS": norm_bias is not None,
        "HAS_LOST": capacity > 0,
        "SMALLEST": lost_channels.SMALLEST[lost_xhat.dtype],
    }


def _tiles(num_rows: int, hidden_size: int, per_thread: int, max_programs: int) -> tuple[int, dict[str, Any]]:
    """Programs and their meta-parameters, for so many elements a thread."""
    columns = max(8, triton.next_power_of_2(hidden_size))
    rows = max(1, 2048 // columns)
    num_tiles = -(-num_rows // rows)
    tiles_per_program = -(-num_tiles // max_programs)
    return -(-num_tiles // tiles_per_program), {
        "tiles_per_program": tiles_per_program,
        "BLOCK_ROWS": rows,
        "BLOCK_COLUMNS": columns,
        "num_warps": min(16, rows * columns // (32 * per_thread)),
        "enable_fp_fusion": True,
    }


def _backward_programs(x: Tensor) -> int:
    """As many as run at once: two on each multiprocessor."""
    return 2 * torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else BACKWARD_PROGRAMS

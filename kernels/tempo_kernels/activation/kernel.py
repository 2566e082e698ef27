"""Computes activations of x + bias in Triton, gated ones too, with formulas from kernel_activations.py; eager.py is the
specification.

Forward reads x and writes y, backward reads grad_y and x or y and writes grad_x, so memory bounds the time as long as
the formula is short. In place (Andoorveedu et al., "Tempo", NeurIPS 2022), forward also writes a bit per element where
f falls and rises again, an eighth of a byte mask, and backward turns it into a sign without a comparison or a branch.

Tensors are read as [rows, groups, 8]. A group is eight neighbours, which one thread holds: 16 bytes of a 16-bit type,
the widest load that there is, and one byte of bits. A tile is a few rows by a strip of groups. With a bias or a gate, a
row is a row of y; otherwise any FLAT_COLUMNS neighbours make a row. Gates and ups lie a row of y apart in x. The bias
gradient is summed over rows as in kernel_sums.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.activation.activations import ACTIVATIONS
from tempo_kernels.activation.eager import allocate_output, get_smallest_at_least
from tempo_kernels.activation.inverse import get_coefficients
from tempo_kernels.activation.kernel_activations import activate, differentiate, differentiate_output
from tempo_kernels.kernel_launch import Plan, cache_plans, launch
from tempo_kernels.kernel_numbers import check_dtype
from tempo_kernels.kernel_sums import STRIP_COLUMNS, add_up, choose_tiles_per_program

FLAT_COLUMNS = 1024
TILE_ELEMENTS = 2048
"""Half as many where sums of gates and ups, or of float32 numbers, would take too many registers."""
BACKWARD_PROGRAMS = 5
"""How many programs share a multiprocessor, at 96 registers a thread."""
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


@triton.jit
def _get_program(num_columns, GROUPS: tl.constexpr):
    """Returns this program's block of rows, or chunk of such blocks, as int64, and its strip of columns."""
    num_strips = tl.cdiv(num_columns, GROUPS * 8)
    return (tl.program_id(0) // num_strips).to(tl.int64), tl.program_id(0) % num_strips


@triton.jit
def _place_tile(block_row, strip, numel, num_columns, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Locates a tile of y. A tensor may have more than 2**31 elements, but a tile has few: only its first row is
    counted in 64 bits, and everything else in 32 bits from there.

    Returns:
        first: the index of the tile's first row in y, int64.
        left: how many elements y has from there on, at most ROWS rows.
        starts [m, 1, 1]: the first element of each row, counted from `first`.
        column [n, 8]: the columns.
        inside [m, n, 8]: whether y has such elements.
    """
    first = block_row * (ROWS * num_columns)
    left = tl.minimum(tl.maximum(numel - first, 0), ROWS * num_columns).to(tl.int32)
    starts = (tl.arange(0, ROWS) * num_columns)[:, None, None]
    column = (strip * GROUPS + tl.arange(0, GROUPS))[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = (column < num_columns)[None, :, :] & (starts + column[None, :, :] < left)
    return first, left, starts, column, inside


@triton.jit
def _place_bits(first, left, strip, num_columns, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Returns the offsets [m, n] of a tile's bytes of bits, and whether there are such bytes."""
    group = strip * GROUPS + tl.arange(0, GROUPS)
    groups = (tl.arange(0, ROWS) * (num_columns // 8))[:, None] + group[None, :]
    return first // 8 + groups, (group * 8 < num_columns)[None, :] & (groups * 8 < left)


@triton.jit
def _load_sum(
    x_ptr, bias_ptr, first, elements, bias_first, column, inside, num_columns, bias_size, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Loads x + bias in float32, with ROUNDS rounded to x's dtype first. Where y has no elements it is -1e4, far left
    of GELU's minimum, so that the bits there are 0."""
    total = tl.load(x_ptr + first + elements, mask=inside, other=-1e4).to(tl.float32)
    if bias_ptr is not None:
        if bias_size is not None:
            total += tl.load(bias_ptr + (first + elements) % bias_size, mask=inside, other=0.0).to(tl.float32)
        else:
            bias = tl.load(bias_ptr + bias_first + column, mask=column < num_columns, other=0.0)
            total += bias.to(tl.float32)[None, :, :]
        if ROUNDS:
            total = total.to(x_ptr.dtype.element_ty).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["num_units"])
def _forward_kernel(
    x_ptr, bias_ptr, y_ptr, bits_ptr,
    num_units, column_units, bias_size,
    UNIT: tl.constexpr, ACTIVATION: tl.constexpr, FORM: tl.constexpr, IS_NARROW: tl.constexpr, ROUNDS: tl.constexpr,
    THRESHOLD: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One program computes one tile; the grid is blocks of rows x strips."""
    numel, num_columns = num_units.to(tl.int64) * UNIT, column_units * UNIT
    block_row, strip = _get_program(num_columns, GROUPS)
    first, left, starts, column, inside = _place_tile(block_row, strip, numel, num_columns, ROWS, GROUPS)
    elements = starts + column[None, :, :]
    if FORM == "gated":
        gates = elements + starts
        x = _load_sum(x_ptr, bias_ptr, 2 * first, gates, 0, column, inside, num_columns, bias_size, ROUNDS)
        up = _load_sum(
            x_ptr, bias_ptr, 2 * first + num_columns, gates, num_columns, column, inside, num_columns, bias_size, ROUNDS
        )  # fmt: skip
        y = activate(x, ACTIVATION, IS_NARROW) * up
    else:
        x = _load_sum(x_ptr, bias_ptr, first, elements, 0, column, inside, num_columns, bias_size, ROUNDS)
        y = activate(x, ACTIVATION, IS_NARROW)
    tl.store(y_ptr + first + elements, y.to(y_ptr.dtype.element_ty), mask=inside)
    if bits_ptr is not None:
        byte = tl.sum(tl.where(x >= THRESHOLD, (128 >> tl.arange(0, 8))[None, None, :], 0), axis=2)
        groups, has_group = _place_bits(first, left, strip, num_columns, ROWS, GROUPS)
        tl.store(bits_ptr + groups, byte.to(tl.uint8), mask=has_group)


@triton.jit(do_not_specialize=["num_units", "tiles_per_program"])
def _backward_kernel(
    grad_y_ptr, kept_ptr, bias_ptr, bits_ptr, grad_x_ptr, partial_ptr,
    num_units, column_units, bias_size, tiles_per_program, bounds, p, q,
    UNIT: tl.constexpr, ACTIVATION: tl.constexpr, FORM: tl.constexpr, IS_NARROW: tl.constexpr, ROUNDS: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One program computes tiles_per_program tiles below one another, and writes their sums over rows to its row of
    partial; the grid is programs below one another x strips. What was kept is x, or in place y."""
    numel, num_columns = num_units.to(tl.int64) * UNIT, column_units * UNIT
    chunk, strip = _get_program(num_columns, GROUPS)
    total = tl.zeros((ROWS, GROUPS, 8), dtype=tl.float32)
    up_total = tl.zeros((ROWS, GROUPS, 8), dtype=tl.float32)
    for block_row in range(chunk * tiles_per_program, (chunk + 1) * tiles_per_program):
        first, left, starts, column, inside = _place_tile(block_row, strip, numel, num_columns, ROWS, GROUPS)
        elements = starts + column[None, :, :]
        grad = tl.load(grad_y_ptr + first + elements, mask=inside, other=0.0).to(tl.float32)
        if FORM == "gated":
            gates = elements + starts
            x = _load_sum(kept_ptr, bias_ptr, 2 * first, gates, 0, column, inside, num_columns, bias_size, ROUNDS)
            up = _load_sum(
                kept_ptr, bias_ptr, 2 * first + num_columns, gates, num_columns, column, inside, num_columns,
                bias_size, ROUNDS,
            )  # fmt: skip
            value, slope = differentiate(x, ACTIVATION, IS_NARROW)
            grad_up = grad * value
            grad *= up * slope
            grad_x = grad_x_ptr + 2 * first
            tl.store(grad_x + gates, grad.to(grad_x_ptr.dtype.element_ty), mask=inside)
            tl.store(grad_x + num_columns + gates, grad_up.to(grad_x_ptr.dtype.element_ty), mask=inside)
            up_total += grad_up
        else:
            if FORM == "inplace":
                y = tl.load(kept_ptr + first + elements, mask=inside, other=0.0)
                is_left = None
                if bits_ptr is not None:
                    groups, has_group = _place_bits(first, left, strip, num_columns, ROWS, GROUPS)
                    byte = tl.load(bits_ptr + groups, mask=has_group, other=0).to(tl.int32)
                    is_left = (~byte)[:, :, None] << (24 + tl.arange(0, 8))[None, None, :]
                slope = differentiate_output(y, is_left, ACTIVATION, IS_NARROW, bounds, p, q)
            else:
                x = _load_sum(kept_ptr, bias_ptr, first, elements, 0, column, inside, num_columns, bias_size, ROUNDS)
                _, slope = differentiate(x, ACTIVATION, IS_NARROW)
            grad *= slope
            tl.store(grad_x_ptr + first + elements, grad.to(grad_x_ptr.dtype.element_ty), mask=inside)
        total += grad
    if partial_ptr is not None:
        # A row of partial holds the sums of gates, then those of ups.
        columns = strip * (GROUPS * 8) + tl.arange(0, GROUPS * 8)
        sums_ptr = partial_ptr + chunk * num_columns * (2 if FORM == "gated" else 1) + columns
        tl.store(sums_ptr, tl.sum(tl.reshape(total, (ROWS, GROUPS * 8)), axis=0), mask=columns < num_columns)
        if FORM == "gated":
            up_sums = tl.sum(tl.reshape(up_total, (ROWS, GROUPS * 8)), axis=0)
            tl.store(sums_ptr + num_columns, up_sums, mask=columns < num_columns)


def forward(
    x: Tensor, bias: Tensor | None, activation: str, form: str, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """As in eager.py."""
    check_dtype(activation, x)
    y, *bits = allocate_output(x, bias, activation, form) if out is None else [out]
    if x.numel():
        plan = _plan_forward(y.shape, y.dtype, bias is not None, activation, form)
        bias = None if bias is None else bias.contiguous()
        launch(_forward_kernel, plan, (x.contiguous(), bias, y, bits[0] if bits else None))
    return y, bits[0] if bits else None


def backward(
    grad_y: Tensor, kept: Tensor, bias: Tensor | None, bits: Tensor | None, activation: str, form: str,
    has_grad_bias: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As in eager.py, but sums of grad_x before it is rounded, in its dtype."""
    check_dtype(activation, kept)
    kept, bias = kept.contiguous(), None if bias is None else bias.contiguous()
    grad_x = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)
    if kept.numel() == 0:
        return grad_x, grad_x.new_zeros(kept.size(-1)) if has_grad_bias else None
    plan, num_chunks = _plan_backward(
        grad_y.shape, grad_x.dtype, kept.device, bias is not None, activation, form, has_grad_bias
    )
    partial = None
    if num_chunks is not None:
        partial = torch.empty(1, num_chunks, kept.size(-1), dtype=torch.float32, device=kept.device)
    launch(_backward_kernel, plan, (grad_y.contiguous(), kept, bias, bits, grad_x, partial))
    if not has_grad_bias:
        return grad_x, None
    if partial is None:  # rows that share bytes of bits
        return grad_x, grad_x.view(-1, kept.size(-1)).sum(0)
    return grad_x, add_up(partial, grad_x.dtype, 4096, 4)[0]


def _plan_tiles(
    shape: torch.Size, dtype: torch.dtype, has_bias: bool, activation: str, form: str, sums_rows: bool = False
) -> tuple[int, int, dict[str, Any]]:
    """Returns the blocks of rows, the strips, and the launch arguments of both kernels; bias_size is None where the
    kernel's columns are y's. Chooses strips of 256 to 1024 columns that divide a row, or all of a short one, or
    STRIP_COLUMNS where rows are summed, and as many rows as fill TILE_ELEMENTS. Units of 8 tell the compiler that rows
    are aligned.

    Rows whose length is no multiple of 8 would share bytes of bits. Then, as without a bias, the tensor is read as one
    long row cut into pieces. Gated units have no bits. Raises ValueError where 32 bits do not count a tile's elements.
    """
    is_gated, numel, last_size = form == "gated", shape.numel(), shape[-1] if shape else 1
    has_columns = is_gated or ((has_bias or sums_rows) and last_size % 8 == 0)
    num_columns = last_size if has_columns else FLAT_COLUMNS
    columns = max(256, min(1024, num_columns & -num_columns))
    if num_columns <= columns // 2:
        columns = max(64, triton.next_power_of_2(num_columns))
    if sums_rows and has_columns:
        columns = min(columns, STRIP_COLUMNS)
    rows = TILE_ELEMENTS // columns // (2 if sums_rows and (is_gated or dtype.itemsize == 4) else 1)
    if num_columns * rows * (1 + is_gated) >= 1 << 31:
        raise ValueError(
            f"{activation}: a row of y has {num_columns} elements; expected fewer than 2**31 in {rows} rows of x, as "
            "the kernel counts them; divide each row into parts"
        )
    unit = 8 if numel % 8 == 0 and num_columns % 8 == 0 else 1
    arguments = {
        "num_units": numel // unit,
        "column_units": num_columns // unit,
        "bias_size": None if has_columns else last_size,
        "UNIT": unit,
        "ACTIVATION": activation,
        "FORM": form,
        "IS_NARROW": dtype.itemsize == 2,
        "ROUNDS": not is_gated and ACTIVATIONS[activation].rounds_sum,
        "ROWS": rows,
        "GROUPS": columns // 8,
        **OPTIONS,
    }
    return -(-numel // (num_columns * rows)), -(-num_columns // columns), arguments


@cache_plans
def _plan_forward(shape: torch.Size, dtype: torch.dtype, has_bias: bool, activation: str, form: str) -> Plan:
    row_blocks, strips, arguments = _plan_tiles(shape, dtype, has_bias, activation, form)
    threshold = get_smallest_at_least(ACTIVATIONS[activation].x_min or 0.0, torch.float32)
    return Plan((row_blocks * strips,), THRESHOLD=threshold, **arguments)


@cache_plans
def _plan_backward(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, has_bias: bool, activation: str, form: str,
    has_grad_bias: bool,
) -> tuple[Plan, int | None]:  # fmt: skip
    """Returns the number of partial's rows too; None where the kernel sums no rows."""
    row_blocks, strips, arguments = _plan_tiles(shape, dtype, has_bias, activation, form, has_grad_bias)
    sums_rows = has_grad_bias and arguments["bias_size"] is None
    tiles_per_program = choose_tiles_per_program(row_blocks, strips, BACKWARD_PROGRAMS, device) if sums_rows else 1
    num_chunks = -(-row_blocks // tiles_per_program)
    has_bits = form == "inplace" and ACTIVATIONS[activation].x_min is not None
    bounds, p, q = get_coefficients(activation, dtype) if has_bits else (None, None, None)
    named = {"tiles_per_program": tiles_per_program, "bounds": bounds, "p": p, "q": q}
    return Plan((num_chunks * strips,), **named, **arguments), num_chunks if sums_rows else None

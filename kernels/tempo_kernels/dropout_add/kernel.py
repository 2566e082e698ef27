"""Computes residual + dropout(x + bias) in Triton; eager.py is the specification.

Tensors are read as [s * b, h] in tiles of a few rows by a strip of columns. Forward and backward both draw the mask by
Philox4x32 (Salmon et al., SC 2011), whose counter is the element's position: nothing is stored, and the mask does not
depend on the tiling. One call gives 8 x 16 bits, and a thread holds eight neighbours of a row, 16 bytes of a 16-bit
type: it draws exactly the bits that it needs. The bias gradient is summed over rows in two stages of fixed order: in
registers over a program's tiles, then over the programs (kernel_sums.py).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.dropout_add.draw import Draw
from tempo_kernels.kernel_launch import MAX_PLANS, Plan, cache_plans, launch
from tempo_kernels.kernel_numbers import check_dtype
from tempo_kernels.kernel_sums import STRIP_COLUMNS, choose_tiles_per_program, launch_sums, plan_sums
from tempo_kernels.philox import LANES, effective_probability, threshold
from tempo_kernels.philox.kernel import drop_mask, key_words, load_draw

TILE_BYTES = 8192
BACKWARD_PROGRAMS = 5
"""How many programs share a multiprocessor, at 96 registers a thread."""
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}

# The numbers that change from call to call. No value of these or of the other arguments compiles a kernel anew.
DRAWN = ("key_low", "key_high", "first_sample", "first_row", "first_group")
VARYING = ("key_ptr", "first_sample_ptr", "rows_ptr", "samples_ptr", *DRAWN, "limit", "inverse", "shift")

_Loads = tuple[bool, ...]
"""Whether a launch reads the key, the first sample, rows and samples from the device."""
_NO_TENSORS = (None,) * 4
_LOADS_NOTHING = (False,) * 4


@triton.jit
def _place_tile(block_row, block_column, num_columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Returns rows [m], columns [n] and int64 offsets [m, n] of one tile."""
    row = block_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = block_column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    return row, column, row.to(tl.int64)[:, None] * num_columns + column[None, :]


@triton.jit
def _drop_tile(
    row, block_column, num_rows, batch, inverse, shift, rows_ptr, samples_ptr, first_sample, first_row, first_group,
    limit, key_low, key_high, LOADS_ROWS: tl.constexpr, LOADS_SAMPLES: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Draws the mask of one tile. Row r of [s * b, h] is row r // b of sample r % b, unless numbers are given for each
    token; find_inverse explains inverse. first_group is the first column of x divided by eight."""
    group = first_group + block_column * (BLOCK_COLUMNS // 8) + tl.arange(0, BLOCK_COLUMNS // 8)
    position = (row.to(tl.uint32).to(tl.uint64) * inverse.to(tl.uint32) >> shift).to(tl.int32)
    sample = first_sample + (row - position * batch)
    position += first_row
    if LOADS_ROWS:
        position = tl.load(rows_ptr + row, mask=row < num_rows, other=0)
    if LOADS_SAMPLES:
        sample = tl.load(samples_ptr + row, mask=row < num_rows, other=0)
    return drop_mask(group[None, :], position[:, None], 0, sample[:, None], key_low, key_high, limit)


@triton.jit(do_not_specialize=VARYING)
def _forward_kernel(
    x_ptr, bias_ptr, residual_ptr, out_ptr, key_ptr, first_sample_ptr, rows_ptr, samples_ptr,
    num_rows, column_units, batch, inverse, shift, first_sample, first_row, first_group, limit, scale, key_low,
    key_high, UNIT: tl.constexpr, DRAWS: tl.constexpr, LOADS_KEY: tl.constexpr, LOADS_SAMPLE: tl.constexpr,
    LOADS_ROWS: tl.constexpr, LOADS_SAMPLES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program computes one tile."""
    num_columns = column_units * UNIT
    num_strips = tl.cdiv(num_columns, BLOCK_COLUMNS)
    block_row, block_column = tl.program_id(0) // num_strips, tl.program_id(0) % num_strips
    row, column, offset = _place_tile(block_row, block_column, num_columns, BLOCK_ROWS, BLOCK_COLUMNS)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    out = tl.load(x_ptr + offset, mask=inside).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + offset, mask=inside).to(tl.float32)
    if HAS_BIAS:
        out += tl.load(bias_ptr + column, mask=column < num_columns).to(tl.float32)[None, :]
    if DRAWS:
        key_low, key_high, first_sample = load_draw(
            key_ptr, first_sample_ptr, key_low, key_high, first_sample, LOADS_KEY, LOADS_SAMPLE
        )
        dropped = _drop_tile(
            row, block_column, num_rows, batch, inverse, shift, rows_ptr, samples_ptr, first_sample, first_row,
            first_group, limit, key_low, key_high, LOADS_ROWS, LOADS_SAMPLES, BLOCK_COLUMNS,
        )  # fmt: skip
        out = tl.where(dropped, 0.0, out)
    if HAS_RESIDUAL:
        out = tl.fma(out, scale, residual)
    else:
        out *= scale
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[*VARYING, "tiles_per_program"])
def _backward_kernel(
    grad_out_ptr, grad_x_ptr, partial_ptr, key_ptr, first_sample_ptr,
    rows_ptr, samples_ptr,
    num_rows, column_units, batch, inverse, shift, first_sample, first_row, first_group, limit, scale, key_low,
    key_high, tiles_per_program,
    UNIT: tl.constexpr, DRAWS: tl.constexpr, LOADS_KEY: tl.constexpr, LOADS_SAMPLE: tl.constexpr,
    LOADS_ROWS: tl.constexpr, LOADS_SAMPLES: tl.constexpr, HAS_GRAD_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program computes tiles_per_program tiles below one another, and their sum over rows."""
    num_columns = column_units * UNIT
    num_strips = tl.cdiv(num_columns, BLOCK_COLUMNS)
    chunk, block_column = tl.program_id(0) // num_strips, tl.program_id(0) % num_strips
    key_low, key_high, first_sample = load_draw(
        key_ptr, first_sample_ptr, key_low, key_high, first_sample, LOADS_KEY, LOADS_SAMPLE
    )
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for block_row in range(chunk * tiles_per_program, (chunk + 1) * tiles_per_program):
        row, column, offset = _place_tile(block_row, block_column, num_columns, BLOCK_ROWS, BLOCK_COLUMNS)
        inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        grad = tl.load(grad_out_ptr + offset, mask=inside, other=0.0).to(tl.float32) * scale
        if DRAWS:
            dropped = _drop_tile(
                row, block_column, num_rows, batch, inverse, shift, rows_ptr, samples_ptr, first_sample, first_row,
                first_group, limit, key_low, key_high, LOADS_ROWS, LOADS_SAMPLES, BLOCK_COLUMNS,
            )  # fmt: skip
            grad = tl.where(dropped, 0.0, grad)
        tl.store(grad_x_ptr + offset, grad.to(grad_x_ptr.dtype.element_ty), mask=inside)
        if HAS_GRAD_BIAS:
            total += grad
    if HAS_GRAD_BIAS:
        column = block_column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        partial_ptr += chunk.to(tl.int64) * num_columns
        tl.store(partial_ptr + column, tl.sum(total, axis=0), mask=column < num_columns)


def forward(x: Tensor, bias: Tensor | None, residual: Tensor | None, draw: Draw) -> Tensor:
    """As in eager.py."""
    check_dtype("bias_dropout_add", x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    drawn, loads, numbers = _list_drawn(draw, x)
    plan = _plan_forward(x.shape, x.element_size(), draw.p, bias is not None, residual is not None, loads)
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    launch(_forward_kernel, plan, (x.contiguous(), bias, residual, out, *drawn), numbers)
    return out


@cache_plans
def _plan_forward(
    shape: torch.Size, item_size: int, p: float, has_bias: bool, has_residual: bool, loads: _Loads
) -> Plan:
    tile = _plan_tiles(shape, item_size)
    arguments = _list_arguments(shape, tile, p, loads)
    return Plan((tile.row_blocks * tile.strips,), DRAWN, HAS_BIAS=has_bias, HAS_RESIDUAL=has_residual, **arguments)


def backward(
    grad_out: Tensor, draw: Draw, has_grad_bias: bool, sum_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None]:
    """As in eager.py; the order of the sum over rows is fixed, so the same GPU gives the same bits every time."""
    check_dtype("bias_dropout_add", grad_out)
    grad_x = torch.empty_like(grad_out, memory_format=torch.contiguous_format)
    num_columns, sum_dtype = grad_out.size(-1), sum_dtype or torch.float32
    if grad_out.numel() == 0:
        return grad_x, grad_x.new_zeros(num_columns, dtype=sum_dtype) if has_grad_bias else None
    drawn, loads, numbers = _list_drawn(draw, grad_out)
    plan = _plan_backward(grad_out.shape, grad_out.element_size(), grad_out.device, draw.p, has_grad_bias, loads)
    partial, sums = None, None
    if has_grad_bias:
        partial = torch.empty(1, plan.num_chunks, num_columns, dtype=torch.float32, device=grad_out.device)
        sums = torch.empty(1, num_columns, dtype=sum_dtype, device=grad_out.device)
    launch(_backward_kernel, plan.launch, (grad_out.contiguous(), grad_x, partial, *drawn), numbers)
    if partial is None or sums is None:
        return grad_x, None
    launch_sums(plan.sums, partial, sums)
    return grad_x, sums[0]


class BackwardPlan(NamedTuple):
    num_chunks: int
    launch: Plan
    sums: Plan


@cache_plans
def _plan_backward(
    shape: torch.Size,
    item_size: int,
    device: torch.device,
    p: float,
    has_grad_bias: bool,
    loads: _Loads,
) -> BackwardPlan:
    tile = _plan_tiles(shape, item_size, has_grad_bias)
    tiles_per_program = 1
    if has_grad_bias:
        tiles_per_program = choose_tiles_per_program(tile.row_blocks, tile.strips, BACKWARD_PROGRAMS, device)
    arguments = _list_arguments(shape, tile, p, loads)
    num_chunks = -(-tile.row_blocks // tiles_per_program)
    arguments |= {"tiles_per_program": tiles_per_program, "HAS_GRAD_BIAS": has_grad_bias}
    sums = plan_sums((1, num_chunks, shape[-1]), 4096, 4, device)
    return BackwardPlan(num_chunks, Plan((num_chunks * tile.strips,), DRAWN, **arguments), sums)


class _Tile(NamedTuple):
    rows: int
    columns: int
    row_blocks: int
    strips: int


def _plan_tiles(shape: torch.Size, item_size: int, sums_rows: bool = False) -> _Tile:
    """Chooses the widest strip of 256 to 1024 columns that divides h, or STRIP_COLUMNS where rows are summed, and as
    many rows as fill TILE_BYTES. Raises ValueError where 32 bits do not count the columns."""
    num_columns = shape[-1]
    if num_columns >= 1 << 31:
        raise ValueError(
            f"bias_dropout_add: a row of x has {num_columns} elements; expected fewer than 2**31, which its kernel "
            "counts; divide each row into parts with a first_column of their own"
        )
    columns = STRIP_COLUMNS if sums_rows else max(256, min(1024, num_columns & -num_columns))
    rows = TILE_BYTES // (columns * item_size)
    return _Tile(rows, columns, -(-shape[0] * shape[1] // rows), -(-num_columns // columns))


def _list_arguments(shape: torch.Size, tile: _Tile, p: float, loads: _Loads) -> dict[str, Any]:
    """Lists the launch arguments of both kernels; h in units of 8 tells the compiler that rows are aligned."""
    num_columns = shape[-1]
    unit = 1 if num_columns % 8 else 8
    inverse, shift = find_inverse(shape[1])
    loads_key, loads_sample, loads_rows, loads_samples = loads
    return {
        "num_rows": shape[0] * shape[1],
        "column_units": num_columns // unit,
        "batch": shape[1],
        "inverse": inverse,
        "shift": shift,
        "limit": threshold(p),
        "scale": 1.0 / (1.0 - effective_probability(p)),
        "UNIT": unit,
        "DRAWS": threshold(p) > 0,
        "LOADS_KEY": loads_key,
        "LOADS_SAMPLE": loads_sample,
        "LOADS_ROWS": loads_rows,
        "LOADS_SAMPLES": loads_samples,
        "BLOCK_ROWS": tile.rows,
        "BLOCK_COLUMNS": tile.columns,
        **OPTIONS,
    }


def find_inverse(divisor: int) -> tuple[int, int]:
    """Returns (inverse, shift) such that n // divisor == n * inverse >> shift for every n of 31 bits: a third of a
    division's instructions (Granlund and Montgomery, PLDI 1994). inverse has 32 bits with the highest set."""
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift


def _list_drawn(draw: Draw, x: Tensor) -> tuple[tuple[Tensor | None, ...], _Loads, tuple[int, ...]]:
    """Returns key, first sample, rows and samples where they are tensors (else None), which of them are, and the
    numbers that DRAWN names.

    rows and samples are given as [s, b], one number for each row of [s * b, h].
    """
    numbers, tensors = draw.split()
    words = _find_words(int(numbers.key), int(numbers.first_sample), draw.first_row, draw.first_column)
    if not tensors:
        return _NO_TENSORS, _LOADS_NOTHING, words
    key, first_sample, *positions = tensors
    whole = (None if t is None else t.view(x.size(0), -1).expand(x.shape[:2]).contiguous() for t in positions)
    drawn = (key, first_sample, *whole)
    return drawn, tuple(t is not None for t in drawn), words


@functools.lru_cache(maxsize=MAX_PLANS)  # backward draws what forward drew
def _find_words(key: int, first_sample: int, first_row: int, first_column: int) -> tuple[int, ...]:
    # A group has 32 bits, which an argument of 32 bits holds with a sign.
    first_group, _ = key_words(first_column // LANES)
    return (*key_words(key), first_sample, first_row, first_group)

"""residual + dropout(x + bias) in Triton; eager.py is the specification.

Tensors are read as [s * b, h] in tiles of a few rows by a strip of columns. The mask is drawn where it is needed, in
forward and again in backward, by Philox4x32 (Salmon et al., SC 2011), whose counter is the element's position: nothing
is stored, and no tiling changes a mask. One call gives 8 x 16 bits, and a thread holds eight neighbours of a row, so
that it draws what it needs, once, beside loads of 16 bytes. The bias gradient is summed over rows in two stages of
fixed order: in registers over a program's tiles, then by torch over the programs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.dropout_add.draw import Draw
from tempo_kernels.philox import effective_probability, threshold
from tempo_kernels.philox.kernel import drop_mask, key_words, load_draw

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TILE_BYTES = 8192
BACKWARD_PROGRAMS = 1024
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}

# Arguments that change from call to call: no value of theirs compiles a kernel anew.
VARYING = ("key_ptr", "first_sample_ptr", "key_low", "key_high", "first_sample", "first_row", "limit")


@triton.jit
def _place_tile(block_row, block_column, num_columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Rows [m], columns [n] and int64 offsets [m, n] of one tile."""
    row = block_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = block_column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    return row, column, row.to(tl.int64)[:, None] * num_columns + column[None, :]


@triton.jit
def _drop_tile(
    row, block_column, batch, first_sample, first_row, limit, key_low, key_high, BLOCK_COLUMNS: tl.constexpr
):
    """The mask of one tile: row r of [s * b, h] is row r // b of sample r % b."""
    group = block_column * (BLOCK_COLUMNS // 8) + tl.arange(0, BLOCK_COLUMNS // 8)
    sample = first_sample + (row % batch)
    return drop_mask(group[None, :], (first_row + row // batch)[:, None], 0, sample[:, None], key_low, key_high, limit)


@triton.jit(do_not_specialize=VARYING)
def _forward_kernel(
    x_ptr, bias_ptr, residual_ptr, out_ptr, key_ptr, first_sample_ptr,
    num_rows, column_units, batch, first_sample, first_row, limit, scale, key_low, key_high,
    UNIT: tl.constexpr, DRAWS: tl.constexpr, LOADS_KEY: tl.constexpr, LOADS_SAMPLE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
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
        dropped = _drop_tile(row, block_column, batch, first_sample, first_row, limit, key_low, key_high, BLOCK_COLUMNS)
        out = tl.where(dropped, 0.0, out)
    if HAS_RESIDUAL:
        out = tl.fma(out, scale, residual)
    else:
        out *= scale
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[*VARYING, "tiles_per_program"])
def _backward_kernel(
    grad_out_ptr, grad_x_ptr, partial_ptr, key_ptr, first_sample_ptr,
    num_rows, column_units, batch, first_sample, first_row, limit, scale, key_low, key_high, tiles_per_program,
    UNIT: tl.constexpr, DRAWS: tl.constexpr, LOADS_KEY: tl.constexpr, LOADS_SAMPLE: tl.constexpr,
    HAS_GRAD_BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program computes tiles_per_program tiles that lie below one another, and writes their sum over rows to its
    row of partial."""
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
                row, block_column, batch, first_sample, first_row, limit, key_low, key_high, BLOCK_COLUMNS
            )
            grad = tl.where(dropped, 0.0, grad)
        tl.store(grad_x_ptr + offset, grad.to(grad_x_ptr.dtype.element_ty), mask=inside)
        if HAS_GRAD_BIAS:
            total += grad
    if HAS_GRAD_BIAS:
        column = block_column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        partial = partial_ptr + chunk.to(tl.int64) * num_columns + column
        tl.store(partial, tl.sum(total, axis=0), mask=column < num_columns)


def forward(x: Tensor, bias: Tensor | None, residual: Tensor | None, draw: Draw) -> Tensor:
    """As in eager.py."""
    _check(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    tile = _plan_tiles(x)
    with torch.cuda.device_of(x):
        _forward_kernel[(tile.row_blocks * tile.strips,)](
            x.contiguous(),
            None if bias is None else bias.contiguous(),
            None if residual is None else residual.contiguous(),
            out,
            **_make_draw_arguments(x, draw),
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            **OPTIONS,
        )
    return out


def backward(grad_out: Tensor, draw: Draw, has_grad_bias: bool) -> tuple[Tensor, Tensor | None]:
    """As in eager.py.

    The sum over rows has two stages, each in a fixed order: the same bits every time on every GPU.
    """
    _check(grad_out)
    grad_x = torch.empty(grad_out.shape, dtype=grad_out.dtype, device=grad_out.device)
    num_columns = grad_out.size(-1)
    if grad_out.numel() == 0:
        grad_bias = torch.zeros(num_columns, dtype=torch.float32, device=grad_out.device) if has_grad_bias else None
        return grad_x, grad_bias
    tile = _plan_tiles(grad_out)
    tiles_per_program, partial = 1, None
    if has_grad_bias:
        tiles_per_program = -(-tile.row_blocks * tile.strips // BACKWARD_PROGRAMS)
    num_chunks = -(-tile.row_blocks // tiles_per_program)
    if has_grad_bias:
        partial = torch.empty(num_chunks, num_columns, dtype=torch.float32, device=grad_out.device)
    with torch.cuda.device_of(grad_out):
        _backward_kernel[(num_chunks * tile.strips,)](
            grad_out.contiguous(),
            grad_x,
            partial,
            **_make_draw_arguments(grad_out, draw),
            tiles_per_program=tiles_per_program,
            HAS_GRAD_BIAS=has_grad_bias,
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            **OPTIONS,
        )
    return grad_x, None if partial is None else partial.sum(0)


class _Tile(NamedTuple):
    rows: int
    columns: int
    row_blocks: int
    strips: int


def _plan_tiles(x: Tensor) -> _Tile:
    """The widest strip of 256 to 1024 columns that divides h, and as many rows as fill TILE_BYTES."""
    num_columns = x.size(-1)
    columns = max(256, min(1024, num_columns & -num_columns))
    rows = TILE_BYTES // (columns * x.element_size())
    return _Tile(rows, columns, -(-x.size(0) * x.size(1) // rows), -(-num_columns // columns))


def _make_draw_arguments(x: Tensor, draw: Draw) -> dict[str, Any]:
    """The launch arguments of a kernel that draws; h in units of 8, so that the compiler knows it for a multiple."""
    num_columns = x.size(-1)
    unit = 1 if num_columns % 8 else 8
    numbers, (key, first_sample) = draw.split()
    key_low, key_high = key_words(int(numbers.key))
    return {
        "key_ptr": key,
        "first_sample_ptr": first_sample,
        "num_rows": x.size(0) * x.size(1),
        "column_units": num_columns // unit,
        "batch": x.size(1),
        "first_sample": numbers.first_sample,
        "first_row": draw.first_row,
        "limit": threshold(draw.p),
        "scale": 1.0 / (1.0 - effective_probability(draw.p)),
        "key_low": key_low,
        "key_high": key_high,
        "UNIT": unit,
        "DRAWS": threshold(draw.p) > 0,
        "LOADS_KEY": key is not None,
        "LOADS_SAMPLE": first_sample is not None,
    }


def _check(x: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"bias_dropout_add: x is {x.dtype}; expected float32, float16 or bfloat16 on a GPU; cast it")

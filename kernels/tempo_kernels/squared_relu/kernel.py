"""Squared ReLU in Triton; eager.py is the specification.

Tensors are read in tiles of a few rows by a strip of columns. Rows are those of x where a bias has to meet them, and of
FLAT_COLUMNS elsewhere. A thread holds eight neighbours of a row: 16 bytes of a 16-bit type.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLAT_COLUMNS = 1024
TILE_ELEMENTS = 2048
BACKWARD_PROGRAMS = 2048
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


@triton.jit
def _tile(block_row, block_column, num_units, row_units, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of one tile: the int64 number of its first row's first element, and from there, in 32 bits, elements [m, n], and
    whether there are such."""
    row_size = row_units * UNIT
    first = block_row * (ROWS * row_size)
    # How many elements there are from there on.
    left = (tl.minimum(tl.maximum(num_units - first // UNIT, 0), ROWS * row_units) * UNIT).to(tl.int32)
    column = block_column * COLUMNS + tl.arange(0, COLUMNS)
    elements = (tl.arange(0, ROWS) * row_size)[:, None] + column[None, :]
    return first, elements, (column < row_size)[None, :] & (elements < left)


@triton.jit
def _rectified(x, bias_ptr, block_column, row_size, DTYPE: tl.constexpr, HAS_BIAS: tl.constexpr, COLUMNS: tl.constexpr):
    """relu(x + bias), the sum rounded to DTYPE, in float32."""
    if HAS_BIAS:
        column = block_column * COLUMNS + tl.arange(0, COLUMNS)
        x += tl.load(bias_ptr + column, mask=column < row_size, other=0.0).to(tl.float32)[None, :]
        x = x.to(DTYPE).to(tl.float32)
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["num_units"])
def _forward_kernel(
    x_ptr, bias_ptr, y_ptr,
    num_units, row_units,
    UNIT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: one tile."""
    num_strips = tl.cdiv(row_units * UNIT, BLOCK_COLUMNS)
    block_row, block_column = (tl.program_id(0) // num_strips).to(tl.int64), tl.program_id(0) % num_strips
    first, elements, inside = _tile(block_row, block_column, num_units, row_units, UNIT, BLOCK_ROWS, BLOCK_COLUMNS)
    x = tl.load(x_ptr + first + elements, mask=inside, other=0.0).to(tl.float32)
    x = _rectified(x, bias_ptr, block_column, row_units * UNIT, x_ptr.dtype.element_ty, HAS_BIAS, BLOCK_COLUMNS)
    tl.store(y_ptr + first + elements, (x * x).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_units", "tiles_per_program"])
def _backward_kernel(
    grad_y_ptr, kept_ptr, bias_ptr, grad_x_ptr, partial_ptr,
    num_units, row_units, tiles_per_program,
    UNIT: tl.constexpr, KEEPS_OUTPUT: tl.constexpr, IS_NARROW: tl.constexpr, HAS_BIAS: tl.constexpr,
    NEEDS_SUMS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: tiles_per_program tiles below one another, and their sum over rows into its row of partial."""
    row_size = row_units * UNIT
    num_strips = tl.cdiv(row_size, BLOCK_COLUMNS)
    chunk, block_column = (tl.program_id(0) // num_strips).to(tl.int64), tl.program_id(0) % num_strips
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for block_row in range(chunk * tiles_per_program, (chunk + 1) * tiles_per_program):
        first, elements, inside = _tile(block_row, block_column, num_units, row_units, UNIT, BLOCK_ROWS, BLOCK_COLUMNS)
        kept = tl.load(kept_ptr + first + elements, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_y_ptr + first + elements, mask=inside, other=0.0).to(tl.float32)
        if KEEPS_OUTPUT:
            # Rounded to the dtype of y, the root is exact.
            root = tl.sqrt(kept).to(kept_ptr.dtype.element_ty).to(tl.float32) if IS_NARROW else tl.sqrt_rn(kept)
        else:
            root = _rectified(
                kept, bias_ptr, block_column, row_size, kept_ptr.dtype.element_ty, HAS_BIAS, BLOCK_COLUMNS
            )
        grad *= 2.0 * root
        tl.store(grad_x_ptr + first + elements, grad.to(grad_x_ptr.dtype.element_ty), mask=inside)
        if NEEDS_SUMS:
            total += grad
    if NEEDS_SUMS:
        column = block_column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        tl.store(partial_ptr + chunk * row_size + column, tl.sum(total, axis=0), mask=column < row_size)


def forward(x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """y = relu(x + bias)**2, contiguous."""
    _check(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if x.numel() == 0:
        return y
    tiling = _tiling(x, bias is not None)
    with torch.cuda.device_of(x):
        _forward_kernel[(tiling.row_blocks * tiling.strips,)](
            x.contiguous(),
            None if bias is None else bias.contiguous(),
            y,
            **tiling.sizes,
            HAS_BIAS=bias is not None,
            **OPTIONS,
        )
    return y


def backward(grad_y: Tensor, y: Tensor, has_grad_bias: bool) -> tuple[Tensor, Tensor | None]:
    """grad_x = 2 sqrt(y) grad_y, contiguous, and its sum over all dimensions but the last in float32 [f].

    The sum has two stages, each in a fixed order: the same bits every time on every GPU.
    """
    return _launch_backward(grad_y, y, None, True, has_grad_bias)


def backward_from_input(
    grad_y: Tensor, x: Tensor, bias: Tensor | None, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """grad_x = 2 relu(x + bias) grad_y, contiguous, and its sum likewise."""
    return _launch_backward(grad_y, x.contiguous(), bias, False, has_grad_bias)


def _launch_backward(
    grad_y: Tensor, kept: Tensor, bias: Tensor | None, keeps_output: bool, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    grad_x = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)
    tiling = _tiling(kept, has_grad_bias or bias is not None)
    tiles_per_program = max(1, -(-tiling.row_blocks * tiling.strips // BACKWARD_PROGRAMS))
    num_chunks = -(-tiling.row_blocks // tiles_per_program)
    partial = torch.empty(num_chunks, kept.size(-1), dtype=torch.float32, device=kept.device) if has_grad_bias else None
    if kept.numel():
        with torch.cuda.device_of(kept):
            _backward_kernel[(num_chunks * tiling.strips,)](
                grad_y.contiguous(),
                kept,
                None if bias is None else bias.contiguous(),
                grad_x,
                partial,
                **tiling.sizes,
                tiles_per_program=tiles_per_program,
                KEEPS_OUTPUT=keeps_output,
                IS_NARROW=kept.dtype.itemsize == 2,
                HAS_BIAS=bias is not None,
                NEEDS_SUMS=has_grad_bias,
                **OPTIONS,
            )
    return grad_x, None if partial is None else partial.sum(0)


class _Tiling(NamedTuple):
    row_blocks: int
    strips: int
    sizes: dict[str, Any]
    """The launch arguments that both kernels share."""


def _tiling(x: Tensor, has_columns: bool) -> _Tiling:
    """Strips of 256 to 1024 columns that divide a row, and as many rows as fill TILE_ELEMENTS.

    Sizes are in units of 8 where possible, so that the compiler knows them for multiples.
    """
    numel = x.numel()
    num_columns = x.size(-1) if has_columns else FLAT_COLUMNS
    block_columns = max(256, min(1024, num_columns & -num_columns))
    block_rows = TILE_ELEMENTS // block_columns
    num_rows = -(-numel // num_columns) if numel else 0
    unit = 1 if numel % 8 or num_columns % 8 else 8
    return _Tiling(
        -(-num_rows // block_rows),
        -(-num_columns // block_columns),
        {
            "num_units": numel // unit,
            "row_units": num_columns // unit,
            "UNIT": unit,
            "BLOCK_ROWS": block_rows,
            "BLOCK_COLUMNS": block_columns,
        },
    )


def _check(x: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"squared_relu: x is {x.dtype}; float32, float16 or bfloat16 is wanted on a GPU; cast it")

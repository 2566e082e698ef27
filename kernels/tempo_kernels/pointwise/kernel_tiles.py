"""How kernels of pointwise operations walk over their tensors: tiles, biases, sums over rows, launches.

Tensors are read as [rows, row_groups, 8], groups of eight neighbours that are 16 bytes of a 16-bit type and one byte of
bits, in tiles of a few rows by a strip of groups. Rows are the rows of x where a bias has to meet them, and of
FLAT_COLUMNS elsewhere, since which elements meet does not matter there.

A bias gradient is summed in two stages, each in a fixed order: a program adds up its tiles, which lie below one
another, in registers and writes a row of float32; torch sums these rows. Atomics would give other bits every time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLAT_COLUMNS = 1024
FORWARD_TILE = 4096
BACKWARD_TILE = 2048
BACKWARD_PROGRAMS = 2048
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


@triton.jit
def place_tile(
    block_row, block_strip, num_units, row_groups, UNIT: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr
):
    """Of one tile: the int64 number of its first row's first group, and from there, in 32 bits: groups [m, n] and
    elements [m, n, 8], and whether there are such."""
    first = block_row * (ROWS * row_groups)
    # How many elements there are from there on.
    left = tl.minimum(tl.maximum(num_units * UNIT - first * 8, 0), ROWS * row_groups * 8).to(tl.int32)
    group = block_strip * GROUPS + tl.arange(0, GROUPS)
    groups = (tl.arange(0, ROWS) * row_groups)[:, None] + group[None, :]
    elements = groups[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    in_row = (group < row_groups)[None, :]
    return first, groups, elements, in_row & (groups * 8 < left), in_row[:, :, None] & (elements < left)


@triton.jit
def load_sum(
    x_ptr, bias_ptr, first, elements, inside, block_strip, bias_size,
    HAS_BIAS: tl.constexpr, WRAPS: tl.constexpr, ROUNDS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """x + bias in float32, rounded to x's dtype first where ROUNDS; -1e4, far left of GELU's minimum, where there is
    no x."""
    total = tl.load(x_ptr + first * 8 + elements, mask=inside, other=-1e4).to(tl.float32)
    if HAS_BIAS:
        if WRAPS:
            total += tl.load(bias_ptr + (first * 8 + elements) % bias_size, mask=inside, other=0.0).to(tl.float32)
        else:
            column = (block_strip * GROUPS + tl.arange(0, GROUPS))[:, None] * 8 + tl.arange(0, 8)[None, :]
            total += tl.load(bias_ptr + column, mask=column < bias_size, other=0.0).to(tl.float32)[None, :, :]
        if ROUNDS:
            total = total.to(x_ptr.dtype.element_ty).to(tl.float32)
    return total


@triton.jit
def store_sums(partial_ptr, total, chunk, block_strip, row_groups, GROUPS: tl.constexpr):
    """The sum of total [m, n, 8] over its rows, to row `chunk` of partial."""
    column = (block_strip * GROUPS + tl.arange(0, GROUPS))[:, None] * 8 + tl.arange(0, 8)[None, :]
    partial = partial_ptr + chunk * row_groups * 8 + column
    tl.store(partial, tl.sum(total, axis=0), mask=column < row_groups * 8)


class Tiling(NamedTuple):
    has_columns: bool
    """Whether the kernel's columns are x's."""
    row_blocks: int
    strips: int
    sizes: dict[str, int]
    """The launch arguments that all kernels share."""


def plan_tiles(x: Tensor, needs_columns: bool, tile_elements: int) -> Tiling:
    """Strips of 256 to 1024 columns that divide a row, and as many rows as fill tile_elements.

    Rows of an odd length would share bytes of bits: then, as without a bias, the tensor is read as one long row, cut
    into pieces.
    """
    numel = x.numel()
    has_columns = needs_columns and x.size(-1) % 8 == 0
    num_columns = x.size(-1) if has_columns else FLAT_COLUMNS
    block_columns = max(256, min(1024, num_columns & -num_columns))
    block_rows = tile_elements // block_columns
    num_rows = -(-numel // num_columns) if numel else 0
    unit = 1 if numel % 8 else 8
    return Tiling(
        has_columns,
        -(-num_rows // block_rows),
        -(-num_columns // block_columns),
        {
            "num_units": numel // unit,
            "row_groups": num_columns // 8,
            "UNIT": unit,
            "BLOCK_ROWS": block_rows,
            "BLOCK_GROUPS": block_columns // 8,
        },
    )


def bias_arguments(bias: Tensor | None, tiling: Tiling) -> dict[str, Any]:
    """The launch arguments of load_sum."""
    return {
        "bias_size": 1 if bias is None else bias.numel(),
        "HAS_BIAS": bias is not None,
        "WRAPS": not tiling.has_columns,
    }


def launch_forward(kernel: Any, tensors: tuple[Tensor | None, ...], tiling: Tiling, arguments: dict[str, Any]) -> None:
    """One program per tile; the first of the tensors says on which GPU."""
    with torch.cuda.device_of(tensors[0]):
        kernel[(tiling.row_blocks * tiling.strips,)](*tensors, **tiling.sizes, **arguments, **OPTIONS)


def launch_backward(
    kernel: Any,
    tensors: tuple[Tensor | None, ...],
    like: Tensor,
    tiling: Tiling,
    has_grad_bias: bool,
    arguments: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """grad_x in the shape of `like`, and its sum over all dimensions but the last in float32 [f]."""
    grad_x = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    tiles_per_program = max(1, -(-tiling.row_blocks * tiling.strips // BACKWARD_PROGRAMS))
    num_chunks = -(-tiling.row_blocks // tiles_per_program)
    sums = has_grad_bias and tiling.has_columns
    partial = torch.empty(num_chunks, like.size(-1), dtype=torch.float32, device=like.device) if sums else None
    if like.numel():
        with torch.cuda.device_of(like):
            kernel[(num_chunks * tiling.strips,)](
                *tensors,
                grad_x,
                partial,
                **tiling.sizes,
                **arguments,
                tiles_per_program=tiles_per_program,
                HAS_GRAD_BIAS=sums,
                **OPTIONS,
            )
    if not has_grad_bias:
        return grad_x, None
    if partial is None:
        # A dimension more, since no dimensions at all would mean every one.
        return grad_x, grad_x.unsqueeze(0).sum(tuple(range(like.dim())), dtype=torch.float32)
    return grad_x, partial.sum(0)


def check_dtype(operation: str, x: Tensor) -> None:
    """Raise ValueError for a dtype that the kernels do not compute."""
    if x.dtype not in DTYPES:
        raise ValueError(f"{operation}: x is {x.dtype}; expected float32, float16 or bfloat16 on a GPU; cast it")

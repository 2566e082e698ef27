"""Tiles for kernels of pointwise operations: where they lie, how they load and store, their sums and launches.

A kernel reads its tensors as [rows, row_groups, 8]. A group is eight neighbours, which one thread holds: 16 bytes of a
16-bit type, the widest load that there is, and one byte of packed bits. A tile is a few rows by a strip of groups. With
a bias, a row is a row of x; without one, any FLAT_COLUMNS neighbours make a row.

A bias gradient is summed in two stages of fixed order: a program sums its tiles, which lie below one another, in
registers and writes a row of float32; the last program of a strip adds up these rows (kernel_sums.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels import kernel_sums
from tempo_kernels.kernel_launch import launch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLAT_COLUMNS = 1024
FORWARD_TILE = {2: 8192, 4: 2048}
"""Elements of a tile by the bytes of each: float32's erf takes more registers."""
BACKWARD_TILE_BYTES = 4096
BACKWARD_PROGRAMS = 6
"""How many programs share a multiprocessor, at 80 registers a thread."""
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


@triton.jit
def find_program(row_groups, GROUPS: tl.constexpr):
    """Returns this program's block of rows, or chunk of such blocks, as int64, and its strip of columns."""
    num_strips = tl.cdiv(row_groups, GROUPS)
    return (tl.program_id(0) // num_strips).to(tl.int64), tl.program_id(0) % num_strips


@triton.jit
def start_chunk(row_groups, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Returns this program's chunk of blocks of rows and its strip, and zeros [m, n, 8] to sum its gradients in."""
    chunk, strip = find_program(row_groups, GROUPS)
    return chunk, strip, tl.zeros((ROWS, GROUPS, 8), dtype=tl.float32)


@triton.jit
def place_tile(row, strip, num_units, row_groups, UNIT: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Locates a tile: `row` counts blocks of rows, `strip` strips of groups.

    A tensor may have more than 2**31 elements, but a tile has few: only its first group is counted in 64 bits, and
    everything else in 32 bits from there.

    Returns:
        first: the index of the first group of the tile's first row in the tensor, int64.
        groups [m, n] and elements [m, n, 8]: their indices, counted from that first group.
        has_group [m, n] and inside [m, n, 8]: whether the tensor has such groups and elements.
    """
    first = row * (ROWS * row_groups)
    # How many elements there are from there on.
    left = tl.minimum(tl.maximum(num_units.to(tl.int64) * UNIT - first * 8, 0), ROWS * row_groups * 8).to(tl.int32)
    group = strip * GROUPS + tl.arange(0, GROUPS)
    groups = (tl.arange(0, ROWS) * row_groups)[:, None] + group[None, :]
    elements = groups[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    in_row = (group < row_groups)[None, :]
    return first, groups, elements, in_row & (groups * 8 < left), in_row[:, :, None] & (elements < left)


@triton.jit
def load_tile(ptr, first, elements, inside):
    """Loads a tile [m, n, 8] in float32, with 0 where the tensor has no elements."""
    return tl.load(ptr + first * 8 + elements, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_sum(
    x_ptr, bias_ptr, first, elements, inside, strip, bias_size,
    HAS_BIAS: tl.constexpr, WRAPS: tl.constexpr, ROUNDS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Loads x + bias in float32, with ROUNDS rounded to x's dtype first. Where the tensor has no elements it is -1e4,
    far left of GELU's minimum, so that the bits there are 0."""
    total = tl.load(x_ptr + first * 8 + elements, mask=inside, other=-1e4).to(tl.float32)
    if HAS_BIAS:
        if WRAPS:
            total += tl.load(bias_ptr + (first * 8 + elements) % bias_size, mask=inside, other=0.0).to(tl.float32)
        else:
            column = (strip * GROUPS + tl.arange(0, GROUPS))[:, None] * 8 + tl.arange(0, 8)[None, :]
            total += tl.load(bias_ptr + column, mask=column < bias_size, other=0.0).to(tl.float32)[None, :, :]
        if ROUNDS:
            total = total.to(x_ptr.dtype.element_ty).to(tl.float32)
    return total


@triton.jit
def store_gradient(grad_y_ptr, slope, grad_x_ptr, first, elements, inside):
    """Stores the tile grad_x = grad_y slope, and returns it unrounded."""
    grad_x = load_tile(grad_y_ptr, first, elements, inside) * slope
    tl.store(grad_x_ptr + first * 8 + elements, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
    return grad_x


@triton.jit
def finish_sums(
    partial_ptr, counters_ptr, out_ptr, total, chunk, strip, row_groups,
    BLOCK_ROWS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """Sums total [m, n, 8] over its rows into row `chunk` of partial; the strip's last program also sums partial's rows
    into `out`."""
    num_columns = row_groups * 8
    column = strip * (BLOCK_GROUPS * 8) + tl.arange(0, BLOCK_GROUPS * 8)
    sums = tl.sum(tl.reshape(total, (BLOCK_ROWS, BLOCK_GROUPS * 8)), axis=0)
    kernel_sums.store_sums(partial_ptr, sums, chunk, column, num_columns)
    num_chunks = tl.num_programs(0) // tl.cdiv(row_groups, BLOCK_GROUPS)
    if kernel_sums.is_last(counters_ptr + strip, num_chunks):
        kernel_sums.add_up(partial_ptr, out_ptr, column, num_chunks, num_columns, num_columns)


class Tiling(NamedTuple):
    has_columns: bool
    """Whether the kernel's columns are x's."""
    row_blocks: int
    strips: int
    sizes: dict[str, int]
    """The launch arguments that all kernels share."""


class Sizes(NamedTuple):
    """What a plan depends on."""

    numel: int
    num_columns: int
    """The last size; 1 without dimensions."""
    dtype: torch.dtype


def describe(x: Tensor) -> Sizes:
    """Returns the sizes of x."""
    shape = x.shape
    return Sizes(shape.numel(), shape[-1] if shape else 1, x.dtype)


def allocate_like(x: Tensor) -> Tensor:
    """Allocates a contiguous tensor of x's shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def plan_tiles(sizes: Sizes, needs_columns: bool, tile_elements: int, sums_rows: bool = False) -> Tiling:
    """Chooses strips of 256 to 1024 columns that divide a row, or STRIP_COLUMNS where rows are summed, and as many rows
    as fill tile_elements.

    Rows whose length is no multiple of 8 would share bytes of bits. Then, as without a bias, the tensor is read as one
    long row cut into pieces.
    """
    numel = sizes.numel
    has_columns = needs_columns and sizes.num_columns % 8 == 0
    num_columns = sizes.num_columns if has_columns else FLAT_COLUMNS
    block_columns = max(256, min(1024, num_columns & -num_columns))
    if sums_rows and has_columns:
        block_columns = kernel_sums.STRIP_COLUMNS
    rows = tile_elements // block_columns
    num_rows = -(-numel // num_columns) if numel else 0
    unit = 1 if numel % 8 else 8
    return Tiling(
        has_columns,
        -(-num_rows // rows),
        -(-num_columns // block_columns),
        {
            "num_units": numel // unit,
            "row_groups": num_columns // 8,
            "UNIT": unit,
            "BLOCK_ROWS": rows,
            "BLOCK_GROUPS": block_columns // 8,
        },
    )


def plan_backward(
    tiling: Tiling, has_grad_bias: bool, device: torch.device, **arguments: Any
) -> kernel_sums.BackwardPlan:
    """Plans `launch_backward`; the arguments are the kernel's own beside those that all kernels share."""
    row_blocks, strips = tiling.row_blocks, tiling.strips
    tiles_per_program = kernel_sums.choose_tiles_per_program(row_blocks, strips, BACKWARD_PROGRAMS, device)
    sums_rows = has_grad_bias and tiling.has_columns
    named = tiling.sizes | OPTIONS | arguments
    return kernel_sums.plan_chunks(row_blocks, strips, tiles_per_program, sums_rows, **named)


def launch_backward(
    kernel: Any, plan: kernel_sums.BackwardPlan, tensors: tuple[Tensor | None, ...], like: Tensor, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns grad_x in the shape of `like`, and its sum over all dimensions but the last, [f] in its dtype."""
    grad_x, grad_bias = allocate_like(like), None
    if plan.num_chunks:
        sums = plan.allocate_sums(like.shape[-1:].numel(), like.dtype, like.device)
        launch(kernel, plan.launch, (*tensors, grad_x, *sums))
        grad_bias = sums[-1]
    elif plan.sums_rows:  # without rows no kernel runs, and the sums are 0
        grad_bias = grad_x.new_zeros(like.size(-1))
    if not has_grad_bias:
        return grad_x, None
    if not plan.sums_rows:
        # unsqueeze: sum over an empty tuple of dimensions would sum over all of them.
        return grad_x, grad_x.unsqueeze(0).sum(tuple(range(like.dim())))
    return grad_x, grad_bias


def check_dtype(operation: str, x: Tensor) -> None:
    """Raises ValueError for a dtype that the kernels do not compute."""
    if x.dtype not in DTYPES:
        raise ValueError(f"{operation}: x is {x.dtype}; expected float32, float16 or bfloat16 on a GPU; cast it")

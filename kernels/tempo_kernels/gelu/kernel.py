"""GELU from its output and one bit, and from its input, in Triton; eager.py is the specification.

Tensors are read as [rows, row_groups, 8], groups of eight neighbours that are 16 bytes of a 16-bit type and one byte of
bits, in tiles of a few rows by a strip of groups. Rows are the rows of x where a bias has to meet them, and of any
length elsewhere. Arithmetic is float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.gelu.kernel_inverse import X_MIN, formula_of, slope_at_output
from tempo_kernels.pointwise.kernel_activations import gelu_gate, gelu_slope

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLAT_COLUMNS = 1024
FORWARD_TILE = 4096
BACKWARD_TILE = 2048
BACKWARD_PROGRAMS = 2048
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


@triton.jit
def _tile(block_row, block_strip, num_units, row_groups, UNIT: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr):
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
def _biased(
    x_ptr, bias_ptr, first, elements, inside, block_strip, bias_size,
    HAS_BIAS: tl.constexpr, WRAPS: tl.constexpr, ROUNDS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """x + bias in float32, rounded to x's dtype first where ROUNDS; far left of the minimum where there is no x."""
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
def _store_sums(partial_ptr, total, chunk, block_strip, row_groups, GROUPS: tl.constexpr):
    """The sum of total [m, n, 8] over its rows, to row `chunk` of partial."""
    column = (block_strip * GROUPS + tl.arange(0, GROUPS))[:, None] * 8 + tl.arange(0, 8)[None, :]
    partial = partial_ptr + chunk * row_groups * 8 + column
    tl.store(partial, tl.sum(total, axis=0), mask=column < row_groups * 8)


@triton.jit(do_not_specialize=["num_units"])
def _forward_kernel(
    x_ptr, bias_ptr, y_ptr, bits_ptr,
    num_units, row_groups, bias_size,
    UNIT: tl.constexpr, IS_TANH: tl.constexpr, IS_NARROW: tl.constexpr, HAS_BIAS: tl.constexpr, WRAPS: tl.constexpr,
    HAS_BITS: tl.constexpr, X_MIN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """One program: one tile."""
    num_strips = tl.cdiv(row_groups, BLOCK_GROUPS)
    block_row, block_strip = (tl.program_id(0) // num_strips).to(tl.int64), tl.program_id(0) % num_strips
    first, groups, elements, has_group, inside = _tile(
        block_row, block_strip, num_units, row_groups, UNIT, BLOCK_ROWS, BLOCK_GROUPS
    )
    x = _biased(
        x_ptr, bias_ptr, first, elements, inside, block_strip, bias_size, HAS_BIAS, WRAPS, not IS_TANH, BLOCK_GROUPS
    )
    y = x * gelu_gate(x, IS_TANH, IS_NARROW)
    tl.store(y_ptr + first * 8 + elements, y.to(y_ptr.dtype.element_ty), mask=inside)
    if HAS_BITS:
        byte = tl.sum(tl.where(x >= X_MIN, (128 >> tl.arange(0, 8))[None, None, :], 0), axis=2)
        tl.store(bits_ptr + first + groups, byte.to(tl.uint8), mask=has_group)


@triton.jit(do_not_specialize=["num_units", "tiles_per_program"])
def _backward_kernel(
    grad_y_ptr, y_ptr, bits_ptr, grad_x_ptr, partial_ptr,
    num_units, row_groups, tiles_per_program,
    UNIT: tl.constexpr, NEEDS_SUMS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    Y_MIN: tl.constexpr, Y_MIN_LOW: tl.constexpr, ROOT_ZERO: tl.constexpr, TOP: tl.constexpr,
    P7: tl.constexpr, P6: tl.constexpr, P5: tl.constexpr, P4: tl.constexpr, P3: tl.constexpr, P2: tl.constexpr,
    P1: tl.constexpr, P0: tl.constexpr, Q9: tl.constexpr, Q8: tl.constexpr, Q7: tl.constexpr, Q6: tl.constexpr,
    Q5: tl.constexpr, Q4: tl.constexpr, Q3: tl.constexpr, Q2: tl.constexpr, Q1: tl.constexpr,
):  # fmt: skip
    """One program: tiles_per_program tiles below one another, and their sum over rows into its row of partial."""
    num_strips = tl.cdiv(row_groups, BLOCK_GROUPS)
    chunk, block_strip = (tl.program_id(0) // num_strips).to(tl.int64), tl.program_id(0) % num_strips
    total = tl.zeros((BLOCK_ROWS, BLOCK_GROUPS, 8), dtype=tl.float32)
    for block_row in range(chunk * tiles_per_program, (chunk + 1) * tiles_per_program):
        first, groups, elements, has_group, inside = _tile(
            block_row, block_strip, num_units, row_groups, UNIT, BLOCK_ROWS, BLOCK_GROUPS
        )
        y = tl.load(y_ptr + first * 8 + elements, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_y_ptr + first * 8 + elements, mask=inside, other=0.0).to(tl.float32)
        byte = tl.load(bits_ptr + first + groups, mask=has_group, other=0).to(tl.int32)
        is_left = (~byte)[:, :, None] << (24 + tl.arange(0, 8))[None, None, :]
        grad *= slope_at_output(
            y, is_left,
            Y_MIN, Y_MIN_LOW, ROOT_ZERO, TOP, P7, P6, P5, P4, P3, P2, P1, P0, Q9, Q8, Q7, Q6, Q5, Q4, Q3, Q2, Q1,
        )  # fmt: skip
        tl.store(grad_x_ptr + first * 8 + elements, grad.to(grad_x_ptr.dtype.element_ty), mask=inside)
        if NEEDS_SUMS:
            total += grad
    if NEEDS_SUMS:
        _store_sums(partial_ptr, total, chunk, block_strip, row_groups, BLOCK_GROUPS)


@triton.jit(do_not_specialize=["num_units", "tiles_per_program"])
def _backward_from_input_kernel(
    grad_y_ptr, x_ptr, bias_ptr, grad_x_ptr, partial_ptr,
    num_units, row_groups, bias_size, tiles_per_program,
    UNIT: tl.constexpr, IS_TANH: tl.constexpr, IS_NARROW: tl.constexpr, HAS_BIAS: tl.constexpr, WRAPS: tl.constexpr,
    NEEDS_SUMS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """One program: as above."""
    num_strips = tl.cdiv(row_groups, BLOCK_GROUPS)
    chunk, block_strip = (tl.program_id(0) // num_strips).to(tl.int64), tl.program_id(0) % num_strips
    total = tl.zeros((BLOCK_ROWS, BLOCK_GROUPS, 8), dtype=tl.float32)
    for block_row in range(chunk * tiles_per_program, (chunk + 1) * tiles_per_program):
        first, _, elements, _, inside = _tile(
            block_row, block_strip, num_units, row_groups, UNIT, BLOCK_ROWS, BLOCK_GROUPS
        )
        x = _biased(
            x_ptr, bias_ptr, first, elements, inside, block_strip, bias_size,
            HAS_BIAS, WRAPS, not IS_TANH, BLOCK_GROUPS,
        )  # fmt: skip
        grad = tl.load(grad_y_ptr + first * 8 + elements, mask=inside, other=0.0).to(tl.float32)
        grad *= gelu_slope(x, IS_TANH, IS_NARROW)
        tl.store(grad_x_ptr + first * 8 + elements, grad.to(grad_x_ptr.dtype.element_ty), mask=inside)
        if NEEDS_SUMS:
            total += grad
    if NEEDS_SUMS:
        _store_sums(partial_ptr, total, chunk, block_strip, row_groups, BLOCK_GROUPS)


def forward(
    x: Tensor, bias: Tensor | None, approximate: str, has_bits: bool = True, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """y = GELU(x + bias), contiguous, and the bits as eager.py packs them."""
    _check(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    bits = torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device) if has_bits else None
    if x.numel() == 0:
        return y, bits
    tiling = _tiling(x, bias is not None, FORWARD_TILE)
    with torch.cuda.device_of(x):
        _forward_kernel[(tiling.row_blocks * tiling.strips,)](
            x.contiguous(),
            None if bias is None else bias.contiguous(),
            y,
            bits,
            **tiling.sizes,
            **_input_arguments(x, bias, approximate, tiling),
            HAS_BITS=has_bits,
            X_MIN=X_MIN[approximate],
            **OPTIONS,
        )
    return y, bits


def backward(
    grad_y: Tensor, y: Tensor, bits: Tensor, approximate: str, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """grad_x = grad_y GELU'(x(y)), contiguous, and its sum over all dimensions but the last in float32 [f].

    The sum has two stages, each in a fixed order: the same bits every time on every GPU.
    """
    tiling = _tiling(y, has_grad_bias, BACKWARD_TILE)
    tensors = (grad_y.contiguous(), y, bits)
    formula = formula_of(approximate, y.dtype.itemsize == 2)
    return _launch_backward(_backward_kernel, tensors, y, tiling, has_grad_bias, formula)


def backward_from_input(
    grad_y: Tensor, x: Tensor, bias: Tensor | None, approximate: str, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """grad_x = grad_y GELU'(x + bias), and its sum likewise."""
    tiling = _tiling(x, bias is not None, BACKWARD_TILE)
    tensors = (grad_y.contiguous(), x.contiguous(), None if bias is None else bias.contiguous())
    arguments = _input_arguments(x, bias, approximate, tiling)
    return _launch_backward(_backward_from_input_kernel, tensors, x, tiling, has_grad_bias, arguments)


def _launch_backward(
    kernel: Any,
    tensors: tuple[Tensor | None, ...],
    like: Tensor,
    tiling: _Tiling,
    has_grad_bias: bool,
    arguments: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    grad_x = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    tiles_per_program = max(1, -(-tiling.row_blocks * tiling.strips // BACKWARD_PROGRAMS))
    num_chunks = -(-tiling.row_blocks // tiles_per_program)
    needs_sums = has_grad_bias and tiling.has_columns
    partial = torch.empty(num_chunks, like.size(-1), dtype=torch.float32, device=like.device) if needs_sums else None
    if like.numel():
        with torch.cuda.device_of(like):
            kernel[(num_chunks * tiling.strips,)](
                *tensors,
                grad_x,
                partial,
                **tiling.sizes,
                **arguments,
                tiles_per_program=tiles_per_program,
                NEEDS_SUMS=needs_sums,
                **OPTIONS,
            )
    if not has_grad_bias:
        return grad_x, None
    if partial is None:
        return grad_x, grad_x.view(-1, like.size(-1)).sum(0, dtype=torch.float32)
    return grad_x, partial.sum(0)


class _Tiling(NamedTuple):
    has_columns: bool
    """Whether the kernel's columns are x's."""
    row_blocks: int
    strips: int
    sizes: dict[str, int]
    """The launch arguments that all kernels share."""


def _tiling(x: Tensor, wants_columns: bool, tile_elements: int) -> _Tiling:
    """Strips of 256 to 1024 columns that divide a row, and as many rows as fill tile_elements.

    Rows of an odd length would share bytes of bits: then, as without a bias, the tensor is read as one long row, cut
    into pieces.
    """
    numel = x.numel()
    has_columns = wants_columns and x.size(-1) % 8 == 0
    num_columns = x.size(-1) if has_columns else FLAT_COLUMNS
    block_columns = max(256, min(1024, num_columns & -num_columns))
    block_rows = tile_elements // block_columns
    num_rows = -(-numel // num_columns) if numel else 0
    unit = 1 if numel % 8 else 8
    return _Tiling(
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


def _input_arguments(x: Tensor, bias: Tensor | None, approximate: str, tiling: _Tiling) -> dict[str, Any]:
    return {
        "bias_size": 1 if bias is None else bias.numel(),
        "IS_TANH": approximate == "tanh",
        "IS_NARROW": x.dtype.itemsize == 2,
        "HAS_BIAS": bias is not None,
        "WRAPS": not tiling.has_columns,
    }


def _check(x: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"gelu: x is {x.dtype}; float32, float16 or bfloat16 is wanted on a GPU; cast it")

"""Device functions that the norms' kernels share: reading tensors and parameters, and storing sums over rows."""

from __future__ import annotations

import triton
import triton.language as tl

from tempo_kernels.kernel_numbers import IS_COMPILED


@triton.jit
def widen(x):
    """Converts x to float32. A pair of bfloat16 takes two instructions; Triton's own conversion takes the upper one out
    first and needs a third."""
    if IS_COMPILED and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], tl.float32, True, 2
        )
    return x.to(tl.float32)


@triton.jit
def load_parameters(weight_ptr, bias_ptr, column, inside, HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """Loads gamma and beta in float32, with 1 and 0 outside."""
    if ZERO_CENTERED:
        gamma = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32) + 1.0
    else:
        gamma = tl.load(weight_ptr + column, mask=inside, other=1.0).to(tl.float32)
    beta = tl.zeros_like(gamma)
    if HAS_BIAS:
        beta = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return gamma, beta


@triton.jit
def place_tile(tile, column, inside, num_rows, num_columns, BLOCK_ROWS: tl.constexpr):
    """Returns row [m] and offset [m, n] in int64 and the mask [m, n] of a tile of whole rows or of a strip."""
    row = tile * tl.full((1,), BLOCK_ROWS, tl.int64) + tl.arange(0, BLOCK_ROWS)
    offset = row[:, None] * num_columns + column[None, :]
    return row, offset, (row < num_rows)[:, None] & inside[None, :]


@triton.jit
def store_sums(partial_ptr, grad_gamma, grad_beta, column, inside, num_columns, num_chunks, HAS_BIAS: tl.constexpr):
    """Sums grad_gamma [m, n] over its rows into this program's row of partial [1, num_chunks, h], or with a bias
    grad_gamma and grad_beta into partial [2, num_chunks, h]."""
    partial = partial_ptr + tl.program_id(0).to(tl.int64) * num_columns + column
    tl.store(partial, tl.sum(grad_gamma, axis=0), mask=inside)
    if HAS_BIAS:
        partial += num_chunks.to(tl.int64) * num_columns
        tl.store(partial, tl.sum(grad_beta, axis=0), mask=inside)

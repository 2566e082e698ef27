"""Device functions that the norms' kernels share: their parameters, and their sums over rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_parameters(weight_ptr, bias_ptr, column, inside, HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """gamma and beta in float32; 1 and 0 outside."""
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
    """Of one tile of whole rows or of a strip: row [m] and offset [m, n] in int64, and the mask [m, n]."""
    row = tile * tl.full((1,), BLOCK_ROWS, tl.int64) + tl.arange(0, BLOCK_ROWS)
    offset = row[:, None] * num_columns + column[None, :]
    return row, offset, (row < num_rows)[:, None] & inside[None, :]


@triton.jit
def store_sums(partial_ptr, grad_gamma, grad_beta, column, inside, num_columns, HAS_BIAS: tl.constexpr):
    """Adds grad_gamma [m, n] up over its rows, and stores the sum in this program's row of partial
    [1, programs, h]; likewise grad_beta where there is a bias, in partial [2, programs, h]."""
    partial = partial_ptr + tl.program_id(0).to(tl.int64) * num_columns + column
    tl.store(partial, tl.sum(grad_gamma, axis=0), mask=inside)
    if HAS_BIAS:
        partial += tl.num_programs(0).to(tl.int64) * num_columns
        tl.store(partial, tl.sum(grad_beta, axis=0), mask=inside)

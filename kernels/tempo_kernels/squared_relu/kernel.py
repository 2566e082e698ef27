"""Computes squared ReLU's gradient from its output in Triton; eager.py is the specification.

y = r**2 with r = relu(x + bias) (So et al., "Primer", 2021), so grad_x = 2 sqrt(y) grad_y needs y alone. The root of
the rounded square, rounded to the dtype of y, is r again bit for bit; eager.py says why. For a 16-bit y an approximate
float32 root suffices, because the rounding hides its error; a float32 y needs the correctly rounded root.
Forward, and the derivative from the input, are in activation/kernel.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels import kernel_tiles as tiles
from tempo_kernels.kernel_launch import cache_plans
from tempo_kernels.kernel_sums import BackwardPlan


@triton.jit(do_not_specialize=["num_units", "tiles_per_program"])
def _backward_kernel(
    grad_y_ptr, y_ptr, grad_x_ptr, partial_ptr, counters_ptr, grad_bias_ptr,
    num_units, row_groups, tiles_per_program,
    UNIT: tl.constexpr, IS_NARROW: tl.constexpr, HAS_GRAD_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """One program computes tiles_per_program tiles below one another, and their sum over rows."""
    chunk, strip, total = tiles.start_chunk(row_groups, BLOCK_ROWS, BLOCK_GROUPS)
    for row in range(chunk * tiles_per_program, (chunk + 1) * tiles_per_program):
        first, _, elements, _, inside = tiles.place_tile(
            row, strip, num_units, row_groups, UNIT, BLOCK_ROWS, BLOCK_GROUPS
        )
        y = tiles.load_tile(y_ptr, first, elements, inside)
        root = tl.sqrt(y).to(y_ptr.dtype.element_ty).to(tl.float32) if IS_NARROW else tl.sqrt_rn(y)
        total += tiles.store_gradient(grad_y_ptr, 2.0 * root, grad_x_ptr, first, elements, inside)
    if HAS_GRAD_BIAS:
        tiles.finish_sums(
            partial_ptr, counters_ptr, grad_bias_ptr, total, chunk, strip, row_groups, BLOCK_ROWS, BLOCK_GROUPS
        )


def backward(grad_y: Tensor, y: Tensor, has_grad_bias: bool) -> tuple[Tensor, Tensor | None]:
    """As in eager.py, but the sum is in grad_x's dtype; its order is fixed, so every GPU gives the same bits."""
    plan = _plan_backward(tiles.describe(y), y.device, has_grad_bias)
    return tiles.launch_backward(_backward_kernel, plan, (grad_y.contiguous(), y), y, has_grad_bias)


@cache_plans
def _plan_backward(sizes: tiles.Sizes, device: torch.device, has_grad_bias: bool) -> BackwardPlan:
    tile = tiles.BACKWARD_TILE_BYTES // sizes.dtype.itemsize
    tiling = tiles.plan_tiles(sizes, has_grad_bias, tile, has_grad_bias)
    return tiles.plan_backward(tiling, has_grad_bias, device, IS_NARROW=sizes.dtype.itemsize == 2)

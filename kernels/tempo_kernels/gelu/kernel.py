"""Computes GELU's gradient from its output and one bit per element in Triton; eager.py is the specification.

Backward reads y and the bit of the branch, eight bits to a byte, and evaluates GELU'(x(y)) by the rational function of
inverse.py. The idea is Tempo's (Andoorveedu et al., NeurIPS 2022); one quotient in the signed root of y - minimum takes
the place of its piecewise polynomials. The bit becomes the sign of the root without a comparison or a branch. Forward,
which writes y and the bits, is in activation/kernel.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels import kernel_tiles as tiles
from tempo_kernels.gelu.kernel_inverse import find_slope, list_coefficients
from tempo_kernels.kernel_launch import cache_plans
from tempo_kernels.kernel_sums import BackwardPlan


@triton.jit(do_not_specialize=["num_units", "tiles_per_program"])
def _backward_kernel(
    grad_y_ptr, y_ptr, bits_ptr, grad_x_ptr, partial_ptr, counters_ptr, grad_bias_ptr,
    num_units, row_groups, tiles_per_program,
    UNIT: tl.constexpr, HAS_GRAD_BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    Y_MIN: tl.constexpr, Y_MIN_LOW: tl.constexpr, ROOT_ZERO: tl.constexpr, TOP: tl.constexpr,
    NUMERATOR: tl.constexpr, DENOMINATOR: tl.constexpr,
):  # fmt: skip
    """One program computes tiles_per_program tiles below one another, and their sum over rows."""
    chunk, strip, total = tiles.start_chunk(row_groups, BLOCK_ROWS, BLOCK_GROUPS)
    for row in range(chunk * tiles_per_program, (chunk + 1) * tiles_per_program):
        first, groups, elements, has_group, inside = tiles.place_tile(
            row, strip, num_units, row_groups, UNIT, BLOCK_ROWS, BLOCK_GROUPS
        )
        y = tiles.load_tile(y_ptr, first, elements, inside)
        byte = tl.load(bits_ptr + first + groups, mask=has_group, other=0).to(tl.int32)
        is_left = (~byte)[:, :, None] << (24 + tl.arange(0, 8))[None, None, :]
        slope = find_slope(y, is_left, Y_MIN, Y_MIN_LOW, ROOT_ZERO, TOP, NUMERATOR, DENOMINATOR)
        total += tiles.store_gradient(grad_y_ptr, slope, grad_x_ptr, first, elements, inside)
    if HAS_GRAD_BIAS:
        tiles.finish_sums(
            partial_ptr, counters_ptr, grad_bias_ptr, total, chunk, strip, row_groups, BLOCK_ROWS, BLOCK_GROUPS
        )


def backward(
    grad_y: Tensor, y: Tensor, bits: Tensor, approximate: str, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """As in eager.py, but the sum is in grad_x's dtype; its order is fixed, so every GPU gives the same bits."""
    plan = _plan_backward(tiles.describe(y), y.device, approximate, has_grad_bias)
    return tiles.launch_backward(_backward_kernel, plan, (grad_y.contiguous(), y, bits), y, has_grad_bias)


@cache_plans
def _plan_backward(sizes: tiles.Sizes, device: torch.device, approximate: str, has_grad_bias: bool) -> BackwardPlan:
    tile = tiles.BACKWARD_TILE_BYTES // sizes.dtype.itemsize
    tiling = tiles.plan_tiles(sizes, has_grad_bias, tile, has_grad_bias)
    return tiles.plan_backward(tiling, has_grad_bias, device, **list_coefficients(approximate, sizes.dtype))

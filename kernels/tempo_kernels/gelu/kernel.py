"""GELU' from GELU's output and one bit per element in Triton; eager.py is the specification.

Backward reads y and the bit of the branch, eight bits to a byte, and evaluates GELU'(x(y)) by the rational function of
inverse.py: the idea of Tempo (Andoorveedu et al., NeurIPS 2022), with one quotient in the signed root of y - minimum in
place of piecewise polynomials. The bit goes into the sign of the root without a comparison or a branch. Forward, which
writes y and the bits, is pointwise/kernel.py's.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.gelu.kernel_inverse import find_slope, list_coefficients
from tempo_kernels.pointwise import kernel_tiles as tiles


@triton.jit(do_not_specialize=["num_units", "tiles_per_program"])
def _backward_kernel(
    grad_y_ptr, y_ptr, bits_ptr, grad_x_ptr, partial_ptr,
    num_units, row_groups, tiles_per_program,
    UNIT: tl.constexpr, HAS_GRAD_BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    Y_MIN: tl.constexpr, Y_MIN_LOW: tl.constexpr, ROOT_ZERO: tl.constexpr, TOP: tl.constexpr,
    P7: tl.constexpr, P6: tl.constexpr, P5: tl.constexpr, P4: tl.constexpr, P3: tl.constexpr, P2: tl.constexpr,
    P1: tl.constexpr, P0: tl.constexpr, Q9: tl.constexpr, Q8: tl.constexpr, Q7: tl.constexpr, Q6: tl.constexpr,
    Q5: tl.constexpr, Q4: tl.constexpr, Q3: tl.constexpr, Q2: tl.constexpr, Q1: tl.constexpr,
):  # fmt: skip
    """One program: a chunk of tiles_per_program tiles, which lie below one another, and the sum over their rows."""
    chunk, strip, total = tiles.start_chunk(row_groups, BLOCK_ROWS, BLOCK_GROUPS)
    for row in range(chunk * tiles_per_program, (chunk + 1) * tiles_per_program):
        first, groups, elements, has_group, inside = tiles.place_tile(
            row, strip, num_units, row_groups, UNIT, BLOCK_ROWS, BLOCK_GROUPS
        )
        y = tiles.load_tile(y_ptr, first, elements, inside)
        byte = tl.load(bits_ptr + first + groups, mask=has_group, other=0).to(tl.int32)
        is_left = (~byte)[:, :, None] << (24 + tl.arange(0, 8))[None, None, :]
        slope = find_slope(
            y, is_left,
            Y_MIN, Y_MIN_LOW, ROOT_ZERO, TOP, P7, P6, P5, P4, P3, P2, P1, P0, Q9, Q8, Q7, Q6, Q5, Q4, Q3, Q2, Q1,
        )  # fmt: skip
        total += tiles.store_gradient(grad_y_ptr, slope, grad_x_ptr, first, elements, inside)
    if HAS_GRAD_BIAS:
        tiles.store_sums(partial_ptr, total, chunk, strip, row_groups, BLOCK_GROUPS)


def backward(
    grad_y: Tensor, y: Tensor, bits: Tensor, approximate: str, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """grad_x = grad_y GELU'(x(y)), contiguous, and its sum over all dimensions but the last in float32 [f].

    The sum has two stages, each in a fixed order: the same bits every time on every GPU.
    """
    tiling = tiles.plan_tiles(y, has_grad_bias, tiles.BACKWARD_TILE)
    coefficients = list_coefficients(approximate, y.dtype.itemsize == 2)
    tensors = (grad_y.contiguous(), y, bits)
    return tiles.launch_backward(_backward_kernel, tensors, y, tiling, has_grad_bias, coefficients)

"""Squared ReLU in Triton, from its output (in place) or from its input; eager.py is the specification.

y = r**2 with r = relu(x + bias) (So et al., "Primer", 2021), so that grad_x = 2 sqrt(y) grad_y: y is all that backward
needs. The root of the rounded square, rounded to the dtype of y, is r again bit for bit: eager.py says why. A 16-bit r
comes from an approximate float32 root, whose error that rounding hides; a float32 r needs the correctly rounded one.
From the input, both directions are those of pointwise/kernel.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.pointwise import kernel as of_input
from tempo_kernels.pointwise.kernel_tiles import BACKWARD_TILE, launch_backward, place_tile, plan_tiles, store_sums


@triton.jit(do_not_specialize=["num_units", "tiles_per_program"])
def _backward_kernel(
    grad_y_ptr, y_ptr, grad_x_ptr, partial_ptr,
    num_units, row_groups, tiles_per_program,
    UNIT: tl.constexpr, IS_NARROW: tl.constexpr, HAS_GRAD_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """One program: tiles_per_program tiles below one another, and their sum over rows into its row of partial."""
    num_strips = tl.cdiv(row_groups, BLOCK_GROUPS)
    chunk, block_strip = (tl.program_id(0) // num_strips).to(tl.int64), tl.program_id(0) % num_strips
    total = tl.zeros((BLOCK_ROWS, BLOCK_GROUPS, 8), dtype=tl.float32)
    for block_row in range(chunk * tiles_per_program, (chunk + 1) * tiles_per_program):
        first, _, elements, _, inside = place_tile(
            block_row, block_strip, num_units, row_groups, UNIT, BLOCK_ROWS, BLOCK_GROUPS
        )
        y = tl.load(y_ptr + first * 8 + elements, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_y_ptr + first * 8 + elements, mask=inside, other=0.0).to(tl.float32)
        # Rounded to the dtype of y, the root is exact.
        root = tl.sqrt(y).to(y_ptr.dtype.element_ty).to(tl.float32) if IS_NARROW else tl.sqrt_rn(y)
        grad *= 2.0 * root
        tl.store(grad_x_ptr + first * 8 + elements, grad.to(grad_x_ptr.dtype.element_ty), mask=inside)
        if HAS_GRAD_BIAS:
            total += grad
    if HAS_GRAD_BIAS:
        store_sums(partial_ptr, total, chunk, block_strip, row_groups, BLOCK_GROUPS)


def forward(x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """y = relu(x + bias)**2, contiguous."""
    return of_input.forward(x, bias, "squared_relu", out)


def backward(grad_y: Tensor, y: Tensor, has_grad_bias: bool) -> tuple[Tensor, Tensor | None]:
    """grad_x = 2 sqrt(y) grad_y, contiguous, and its sum over all dimensions but the last in float32 [f].

    The sum has two stages, each in a fixed order: the same bits every time on every GPU.
    """
    tiling = plan_tiles(y, has_grad_bias, BACKWARD_TILE)
    arguments = {"IS_NARROW": y.dtype.itemsize == 2}
    return launch_backward(_backward_kernel, (grad_y.contiguous(), y), y, tiling, has_grad_bias, arguments)


def backward_from_input(
    grad_y: Tensor, x: Tensor, bias: Tensor | None, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """grad_x = 2 relu(x + bias) grad_y, contiguous, and its sum likewise."""
    return of_input.backward(grad_y, x, bias, "squared_relu", has_grad_bias)

"""GELU in Triton, from its output and one bit per element (in place) or from its input; eager.py is the specification.

Forward writes y and the bits x + bias >= x_min, eight to a byte, for 8 times less than a byte mask: a thread holds the
eight elements of a byte, so that packing moves nothing between threads. Backward reads y and the bit of the branch and
evaluates GELU'(x(y)) by the rational function of inverse.py: the idea of Tempo (Andoorveedu et al., NeurIPS 2022),
with one quotient in the signed root of y - minimum in place of piecewise polynomials. From the input, the derivative
is that of pointwise/kernel.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.gelu.kernel_inverse import X_MIN, formula_of, slope_at_output
from tempo_kernels.pointwise import kernel as of_input
from tempo_kernels.pointwise.kernel_activations import gelu_gate
from tempo_kernels.pointwise.kernel_tiles import (
    BACKWARD_TILE,
    FORWARD_TILE,
    bias_arguments,
    check_dtype,
    launch_backward,
    launch_forward,
    load_sum,
    place_tile,
    plan_tiles,
    store_sums,
)


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
    first, groups, elements, has_group, inside = place_tile(
        block_row, block_strip, num_units, row_groups, UNIT, BLOCK_ROWS, BLOCK_GROUPS
    )
    x = load_sum(
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
    UNIT: tl.constexpr, HAS_GRAD_BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
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
        first, groups, elements, has_group, inside = place_tile(
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
        if HAS_GRAD_BIAS:
            total += grad
    if HAS_GRAD_BIAS:
        store_sums(partial_ptr, total, chunk, block_strip, row_groups, BLOCK_GROUPS)


def forward(
    x: Tensor, bias: Tensor | None, approximate: str, has_bits: bool = True, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """y = GELU(x + bias), contiguous, and the bits as eager.py packs them."""
    check_dtype("gelu", x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    bits = torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device) if has_bits else None
    if x.numel() == 0:
        return y, bits
    tiling = plan_tiles(x, bias is not None, FORWARD_TILE)
    arguments = {
        "IS_TANH": approximate == "tanh",
        "IS_NARROW": x.dtype.itemsize == 2,
        "HAS_BITS": has_bits,
        "X_MIN": X_MIN[approximate],
        **bias_arguments(bias, tiling),
    }
    tensors = (x.contiguous(), None if bias is None else bias.contiguous(), y, bits)
    launch_forward(_forward_kernel, tensors, tiling, arguments)
    return y, bits


def backward(
    grad_y: Tensor, y: Tensor, bits: Tensor, approximate: str, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """grad_x = grad_y GELU'(x(y)), contiguous, and its sum over all dimensions but the last in float32 [f].

    The sum has two stages, each in a fixed order: the same bits every time on every GPU.
    """
    tiling = plan_tiles(y, has_grad_bias, BACKWARD_TILE)
    tensors = (grad_y.contiguous(), y, bits)
    formula = formula_of(approximate, y.dtype.itemsize == 2)
    return launch_backward(_backward_kernel, tensors, y, tiling, has_grad_bias, formula)


def backward_from_input(
    grad_y: Tensor, x: Tensor, bias: Tensor | None, approximate: str, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """grad_x = grad_y GELU'(x + bias), and its sum likewise."""
    activation = "gelu_tanh" if approximate == "tanh" else "gelu"
    return of_input.backward(grad_y, x, bias, activation, has_grad_bias)

"""A pointwise activation in Triton, differentiated from its input: y = f(x + bias), grad_x = grad_y f'(x + bias).

f and f' come together from kernel_activations.py, in float32; the compiler drops what a kernel does not use of them.
One tensor is read and one written in forward, two and one in backward: the time is that of the memory, as long as the
formula stays within some 30 and 45 instructions per element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.pointwise.kernel_activations import activate
from tempo_kernels.pointwise.kernel_tiles import (
    BACKWARD_TILE,
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
    x_ptr, bias_ptr, y_ptr,
    num_units, row_groups, bias_size,
    UNIT: tl.constexpr, ACTIVATION: tl.constexpr, IS_NARROW: tl.constexpr, HAS_BIAS: tl.constexpr, WRAPS: tl.constexpr,
    ROUNDS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """One program: one tile."""
    num_strips = tl.cdiv(row_groups, BLOCK_GROUPS)
    block_row, block_strip = (tl.program_id(0) // num_strips).to(tl.int64), tl.program_id(0) % num_strips
    first, _, elements, _, inside = place_tile(
        block_row, block_strip, num_units, row_groups, UNIT, BLOCK_ROWS, BLOCK_GROUPS
    )
    x = load_sum(
        x_ptr, bias_ptr, first, elements, inside, block_strip, bias_size, HAS_BIAS, WRAPS, ROUNDS, BLOCK_GROUPS
    )
    y, _ = activate(x, ACTIVATION, IS_NARROW)
    tl.store(y_ptr + first * 8 + elements, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_units", "tiles_per_program"])
def _backward_kernel(
    grad_y_ptr, x_ptr, bias_ptr, grad_x_ptr, partial_ptr,
    num_units, row_groups, bias_size, tiles_per_program,
    UNIT: tl.constexpr, ACTIVATION: tl.constexpr, IS_NARROW: tl.constexpr, HAS_BIAS: tl.constexpr, WRAPS: tl.constexpr,
    ROUNDS: tl.constexpr, HAS_GRAD_BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """One program: tiles_per_program tiles below one another, and their sum over rows into its row of partial."""
    num_strips = tl.cdiv(row_groups, BLOCK_GROUPS)
    chunk, block_strip = (tl.program_id(0) // num_strips).to(tl.int64), tl.program_id(0) % num_strips
    total = tl.zeros((BLOCK_ROWS, BLOCK_GROUPS, 8), dtype=tl.float32)
    for block_row in range(chunk * tiles_per_program, (chunk + 1) * tiles_per_program):
        first, _, elements, _, inside = place_tile(
            block_row, block_strip, num_units, row_groups, UNIT, BLOCK_ROWS, BLOCK_GROUPS
        )
        x = load_sum(
            x_ptr, bias_ptr, first, elements, inside, block_strip, bias_size, HAS_BIAS, WRAPS, ROUNDS, BLOCK_GROUPS
        )
        grad = tl.load(grad_y_ptr + first * 8 + elements, mask=inside, other=0.0).to(tl.float32)
        _, slope = activate(x, ACTIVATION, IS_NARROW)
        grad *= slope
        tl.store(grad_x_ptr + first * 8 + elements, grad.to(grad_x_ptr.dtype.element_ty), mask=inside)
        if HAS_GRAD_BIAS:
            total += grad
    if HAS_GRAD_BIAS:
        store_sums(partial_ptr, total, chunk, block_strip, row_groups, BLOCK_GROUPS)


def forward(x: Tensor, bias: Tensor | None, activation: str, out: Tensor | None = None) -> Tensor:
    """y = f(x + bias), contiguous; the sum is rounded to x's dtype, in gelu_tanh not: see gelu/eager.py."""
    check_dtype(activation, x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if x.numel():
        tiling = plan_tiles(x, bias is not None, BACKWARD_TILE)
        tensors = (x.contiguous(), None if bias is None else bias.contiguous(), y)
        arguments = {"ACTIVATION": activation, "IS_NARROW": x.dtype.itemsize == 2, "ROUNDS": activation != "gelu_tanh"}
        launch_forward(_forward_kernel, tensors, tiling, arguments | bias_arguments(bias, tiling))
    return y


def backward(
    grad_y: Tensor, x: Tensor, bias: Tensor | None, activation: str, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """grad_x = grad_y f'(x + bias), contiguous, and its sum over all dimensions but the last in float32 [f]."""
    tiling = plan_tiles(x, bias is not None, BACKWARD_TILE)
    tensors = (grad_y.contiguous(), x.contiguous(), None if bias is None else bias.contiguous())
    arguments = {"ACTIVATION": activation, "IS_NARROW": x.dtype.itemsize == 2, "ROUNDS": activation != "gelu_tanh"}
    return launch_backward(
        _backward_kernel, tensors, x, tiling, has_grad_bias, arguments | bias_arguments(bias, tiling)
    )

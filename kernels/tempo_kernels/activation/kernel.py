"""Computes a pointwise activation, differentiated from its input, in Triton; eager.py is the specification.

y = f(x + bias) and grad_x = grad_y f'(x + bias), with f and f' from kernel_activations.py, in float32. Forward reads
one tensor and writes one, backward reads two and writes one, so memory bounds the time as long as the formula is short.
For operations that differentiate from their output, forward also writes the bits x + bias >= threshold, an eighth of a
byte mask. A thread holds the eight elements of a byte, so that packing moves nothing between threads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels import kernel_tiles as tiles
from tempo_kernels.activation.activations import ACTIVATIONS
from tempo_kernels.activation.eager import smallest_at_least
from tempo_kernels.activation.kernel_activations import activate, differentiate
from tempo_kernels.kernel_launch import Plan, cache_plans, launch
from tempo_kernels.kernel_sums import BackwardPlan


@triton.jit(do_not_specialize=["num_units"])
def _forward_kernel(
    x_ptr, bias_ptr, y_ptr, bits_ptr,
    num_units, row_groups, bias_size,
    UNIT: tl.constexpr, ACTIVATION: tl.constexpr, IS_NARROW: tl.constexpr, HAS_BIAS: tl.constexpr, WRAPS: tl.constexpr,
    ROUNDS: tl.constexpr, HAS_BITS: tl.constexpr, THRESHOLD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """One program computes one tile."""
    row, strip = tiles.find_program(row_groups, BLOCK_GROUPS)
    first, groups, elements, has_group, inside = tiles.place_tile(
        row, strip, num_units, row_groups, UNIT, BLOCK_ROWS, BLOCK_GROUPS
    )
    x = tiles.load_sum(
        x_ptr, bias_ptr, first, elements, inside, strip, bias_size, HAS_BIAS, WRAPS, ROUNDS, BLOCK_GROUPS
    )
    y = activate(x, ACTIVATION, IS_NARROW)
    tl.store(y_ptr + first * 8 + elements, y.to(y_ptr.dtype.element_ty), mask=inside)
    if HAS_BITS:
        byte = tl.sum(tl.where(x >= THRESHOLD, (128 >> tl.arange(0, 8))[None, None, :], 0), axis=2)
        tl.store(bits_ptr + first + groups, byte.to(tl.uint8), mask=has_group)


@triton.jit(do_not_specialize=["num_units", "tiles_per_program"])
def _backward_kernel(
    grad_y_ptr, x_ptr, bias_ptr, grad_x_ptr, partial_ptr, counters_ptr, grad_bias_ptr,
    num_units, row_groups, bias_size, tiles_per_program,
    UNIT: tl.constexpr, ACTIVATION: tl.constexpr, IS_NARROW: tl.constexpr, HAS_BIAS: tl.constexpr, WRAPS: tl.constexpr,
    ROUNDS: tl.constexpr, HAS_GRAD_BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """One program computes tiles_per_program tiles below one another, and their sum over rows."""
    chunk, strip, total = tiles.start_chunk(row_groups, BLOCK_ROWS, BLOCK_GROUPS)
    for row in range(chunk * tiles_per_program, (chunk + 1) * tiles_per_program):
        first, _, elements, _, inside = tiles.place_tile(
            row, strip, num_units, row_groups, UNIT, BLOCK_ROWS, BLOCK_GROUPS
        )
        x = tiles.load_sum(
            x_ptr, bias_ptr, first, elements, inside, strip, bias_size, HAS_BIAS, WRAPS, ROUNDS, BLOCK_GROUPS
        )
        _, slope = differentiate(x, ACTIVATION, IS_NARROW)
        total += tiles.store_gradient(grad_y_ptr, slope, grad_x_ptr, first, elements, inside)
    if HAS_GRAD_BIAS:
        tiles.finish_sums(
            partial_ptr, counters_ptr, grad_bias_ptr, total, chunk, strip, row_groups, BLOCK_ROWS, BLOCK_GROUPS
        )


def forward(x: Tensor, bias: Tensor | None, activation: str, out: Tensor | None = None) -> Tensor:
    """As in eager.py."""
    y = tiles.allocate_like(x) if out is None else out
    _launch_forward(x, bias, activation, y, None, 0.0)
    return y


def forward_with_bits(x: Tensor, bias: Tensor | None, activation: str, threshold: float) -> tuple[Tensor, Tensor]:
    """As in eager.py."""
    y = tiles.allocate_like(x)
    bits = torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device)
    _launch_forward(x, bias, activation, y, bits, threshold)
    return y, bits


def _launch_forward(
    x: Tensor, bias: Tensor | None, activation: str, y: Tensor, bits: Tensor | None, threshold: float
) -> None:
    tiles.check_dtype(activation, x)
    if x.numel() == 0:
        return
    plan = _plan_forward(tiles.describe(x), bias is not None, activation, bits is not None, threshold)
    launch(_forward_kernel, plan, (x.contiguous(), None if bias is None else bias.contiguous(), y, bits))


@cache_plans
def _plan_forward(sizes: tiles.Sizes, has_bias: bool, activation: str, has_bits: bool, threshold: float) -> Plan:
    tiling = tiles.plan_tiles(sizes, has_bias, tiles.FORWARD_TILE[sizes.dtype.itemsize])
    return Plan(
        (tiling.row_blocks * tiling.strips,),
        HAS_BITS=has_bits,
        THRESHOLD=smallest_at_least(threshold, torch.float32),
        **_list_arguments(sizes, has_bias, activation, tiling),
    )


def backward(
    grad_y: Tensor, x: Tensor, bias: Tensor | None, activation: str, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """As in eager.py, but the sum is in grad_x's dtype; its order is fixed, so every GPU gives the same bits."""
    plan = _plan_backward(tiles.describe(x), x.device, bias is not None, activation, has_grad_bias)
    tensors = (grad_y.contiguous(), x.contiguous(), None if bias is None else bias.contiguous())
    return tiles.launch_backward(_backward_kernel, plan, tensors, x, has_grad_bias)


@cache_plans
def _plan_backward(
    sizes: tiles.Sizes, device: torch.device, has_bias: bool, activation: str, has_grad_bias: bool
) -> BackwardPlan:
    tiling = tiles.plan_tiles(sizes, has_bias, tiles.BACKWARD_TILE_BYTES // sizes.dtype.itemsize, has_grad_bias)
    arguments = _list_arguments(sizes, has_bias, activation, tiling)
    return tiles.plan_backward(tiling, has_grad_bias, device, **arguments)


def _list_arguments(sizes: tiles.Sizes, has_bias: bool, activation: str, tiling: tiles.Tiling) -> dict[str, Any]:
    """Lists the launch arguments that both kernels share."""
    return {
        "bias_size": sizes.num_columns if has_bias else 1,
        "ACTIVATION": activation,
        "IS_NARROW": sizes.dtype.itemsize == 2,
        "HAS_BIAS": has_bias,
        "WRAPS": not tiling.has_columns,
        "ROUNDS": ACTIVATIONS[activation].rounds_sum,
        **tiling.sizes,
        **tiles.OPTIONS,
    }

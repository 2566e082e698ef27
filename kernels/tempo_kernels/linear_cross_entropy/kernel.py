"""Computes the cross entropy and the entropy of one chunk of logits in Triton; eager.py is the specification.

A row's statistics take one read: the online softmax (Milakov and Gimelshein, arXiv 1805.02867) keeps a running maximum
and the sum scaled to it. A thread reads groups of eight columns, 16 bytes of a 16-bit type. Each group has a maximum
and sums of its own, which are joined at the end, so that no strip costs a reduction over threads. The gradient takes
one read and one write, in place of the logits, so that a chunk needs no second buffer. Arithmetic is float32.

exp(x - top) is computed as exp2((x - top) log2(e)). exp2(x log2(e) - top log2(e)) would save an instruction, but its
relative error is 6e-5 for logits around 1000, and beyond 2e38 top log2(e) overflows.

The cap, the temperature, the exclusion of padding and the entropy are compiled in only where they are asked for. Their
values do not compile a kernel again.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.kernel_launch import Plan, cache_plans, launch
from tempo_kernels.kernel_numbers import check_dtype
from tempo_kernels.linear_cross_entropy.settings import Rows, Shares

BLOCK = 4096
OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}


@triton.jit
def _tanh(x):
    """Computes tanh to 3 units in the last place; near 0 by a polynomial, as the exponential loses digits there."""
    size = tl.where(tl.abs(x) > 15.0, 15.0, tl.abs(x))  # tanh(15) rounds to 1; NaN stays NaN
    square = size * size
    near = 0.02096818803 - 0.006053698563 * square
    near = ((near * square - 0.05384498929) * square + 0.1333273279) * square - 0.3333332861
    near = size + size * square * near
    far = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    value = tl.where(square < 0.4, near, far)
    return tl.where(x < 0.0, -value, value)


@triton.jit
def _scale(values, softcap, temperature, HAS_CAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr):
    """Returns l, the scaled logits that the softmax takes, and the derivative of the cap."""
    slope_of_cap = 1.0
    if HAS_CAP:
        bent = _tanh(values / softcap)
        values, slope_of_cap = bent * softcap, 1.0 - bent * bent
    if HAS_TEMPERATURE:
        # div_rn rounds to nearest; the default's error would go straight into the logarithm of the probability.
        values = tl.div_rn(values, tl.zeros_like(values) + temperature)
    return values, slope_of_cap


@triton.jit
def _load_strip(
    row_ptr, start, num_columns, num_real, softcap, temperature,
    HAS_CAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, EXCLUDES_PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns columns [m, 8] from start on, whether they exist, their scaled values in float32 (-inf where the softmax
    excludes them), and the derivative of the cap."""
    column = start + tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = column < num_columns
    values = tl.load(row_ptr + column, mask=inside, other=float("-inf")).to(tl.float32)
    values, slope_of_cap = _scale(values, softcap, temperature, HAS_CAP, HAS_TEMPERATURE)
    if EXCLUDES_PADDING:
        values = tl.where(column < num_real, values, float("-inf"))
    elif HAS_CAP:
        values = tl.where(inside, values, float("-inf"))
    return column, inside, values, slope_of_cap


@triton.jit
def _exp(x):
    """Computes exp(x), with 0 for -inf and for results below 2**-126."""
    return tl.exp2(1.442695041 * x)


@triton.jit
def _make_finite(top):
    """Returns the maximum, or 0 for -inf, because -inf - -inf is NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _move_origin(weighted, total, top, new_top, factor):
    """Rebases sums of exp(x - top) (x - top) to another top: every x - top changes by the shift top - new_top. The sums
    are never positive, and 0 where exp(x - top) vanishes; the shift may be -inf."""
    shift = (_make_finite(top) - _make_finite(new_top))[:, None]
    return (weighted + total * tl.where(factor > 0.0, shift, 0.0)) * factor


# What changes from chunk to chunk is in do_not_specialize: its values do not compile another kernel.
@triton.jit(do_not_specialize=("columns_ptr", "statistics_ptr", "num_rows"))
def _statistics_kernel(
    logits_ptr, columns_ptr, statistics_ptr, num_rows, column_units, num_real, softcap, temperature,
    UNIT: tl.constexpr, HAS_OTHERS: tl.constexpr, HAS_ENTROPY: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr, EXCLUDES_PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program reads one row once; the grid is rows."""
    row, num_rows = tl.program_id(0).to(tl.int64), num_rows.to(tl.int64)
    num_columns = column_units * UNIT
    row_ptr = logits_ptr + row * num_columns
    top = tl.full((BLOCK // 8,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK // 8, 8), dtype=tl.float32)
    if HAS_ENTROPY:
        weighted = tl.zeros((BLOCK // 8, 8), dtype=tl.float32)
    if HAS_OTHERS:
        # Sum differences to the first logit, so that an offset common to all logits costs no digits.
        origin = _scale(tl.load(row_ptr).to(tl.float32), softcap, temperature, HAS_CAP, HAS_TEMPERATURE)[0]
        sums = tl.zeros((BLOCK // 8, 8), dtype=tl.float32)
    for start in range(0, num_columns, BLOCK):
        column, _, values, _ = _load_strip(
            row_ptr, start, num_columns, num_real, softcap, temperature,
            HAS_CAP, HAS_TEMPERATURE, EXCLUDES_PADDING, BLOCK,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(values, axis=1))
        factor, above = _exp(top - _make_finite(new_top))[:, None], values - _make_finite(new_top)[:, None]
        exponentials = _exp(above)
        if HAS_ENTROPY:
            weighted = _move_origin(weighted, total, top, new_top, factor)
            # Where the exponential has vanished, above may be -inf, and 0 * -inf is NaN.
            weighted += exponentials * tl.where(exponentials > 0.0, above, 0.0)
        total = total * factor + exponentials
        top = new_top
        if HAS_OTHERS:
            sums += tl.where(column < num_real, values - origin, 0.0)
    target = tl.load(columns_ptr + row)
    is_here = (target >= 0) & (target < (num_real if EXCLUDES_PADDING else num_columns))
    of_target = tl.load(row_ptr + target, mask=is_here, other=float("-inf")).to(tl.float32)
    of_target, _ = _scale(of_target, softcap, temperature, HAS_CAP, HAS_TEMPERATURE)
    if HAS_CAP:
        of_target = tl.where(is_here, of_target, float("-inf"))
    row_top = tl.max(top, axis=0)
    factor = _exp(top - _make_finite(row_top))[:, None]
    tl.store(statistics_ptr + row, row_top)
    tl.store(statistics_ptr + num_rows + row, tl.sum(tl.sum(total * factor, axis=1), axis=0))
    tl.store(statistics_ptr + 2 * num_rows + row, of_target)
    if HAS_OTHERS:
        tl.store(
            statistics_ptr + 3 * num_rows + row, tl.sum(tl.sum(sums, axis=1), axis=0) + num_real * (origin - row_top)
        )
    if HAS_ENTROPY:
        weighted = _move_origin(weighted, total, top, row_top, factor)
        place = (4 if HAS_OTHERS else 3) * num_rows + row
        tl.store(statistics_ptr + place, tl.sum(tl.sum(weighted, axis=1), axis=0))


@triton.jit(do_not_specialize=("columns_ptr", "top_ptr", "scale_ptr", "grad_ptr", "slope_ptr"))
def _gradient_kernel(
    logits_ptr, columns_ptr, top_ptr, scale_ptr, grad_ptr, slope_ptr,
    column_units, num_real, target_share, other_share, softcap, temperature,
    UNIT: tl.constexpr, HAS_OTHERS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    EXCLUDES_PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes one strip of one row; the grid is rows x strips."""
    num_columns = column_units * UNIT
    num_strips = tl.cdiv(num_columns, BLOCK)
    row, strip = (tl.program_id(0) // num_strips).to(tl.int64), tl.program_id(0) % num_strips
    row_ptr = logits_ptr + row * num_columns
    column, inside, values, slope_of_cap = _load_strip(
        row_ptr, strip * BLOCK, num_columns, num_real, softcap, temperature,
        HAS_CAP, HAS_TEMPERATURE, EXCLUDES_PADDING, BLOCK,
    )  # fmt: skip
    grad, scale = tl.load(grad_ptr + row), tl.load(scale_ptr + row)
    is_ignored = grad == 0.0
    above = values - tl.load(top_ptr + row)
    values = _exp(above)
    if slope_ptr is not None:
        slope = tl.load(slope_ptr + row)
        is_ignored &= slope == 0.0
        values *= scale + slope * tl.where(values > 0.0, above, 0.0)
    else:
        values *= scale
    if HAS_OTHERS:
        values -= tl.where(column < num_real, grad * other_share, 0.0)
    # A branch, because only one strip of a row holds the target.
    target = tl.load(columns_ptr + row) - strip * BLOCK
    if (target >= 0) & (target < BLOCK):
        values -= tl.where(column == target + strip * BLOCK, grad * target_share, 0.0)
    if HAS_CAP:
        values *= slope_of_cap
    if EXCLUDES_PADDING:
        values = tl.where(column < num_real, values, 0.0)
    # Last, so that a row without a gradient becomes 0 even if its logits are NaN or infinite.
    values = tl.where(is_ignored, 0.0, values)
    tl.store(row_ptr + column, values.to(logits_ptr.dtype.element_ty), mask=inside)


def compute_statistics(logits: Tensor, columns: Tensor, shares: Shares) -> Tensor:
    """As in eager.py; logits are contiguous."""
    check_dtype("linear_cross_entropy", logits, "logits are", "cast hidden and weight")
    num_rows, num_columns = logits.shape
    statistics = torch.empty(shares.num_statistics, num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        plan = _plan_statistics(num_rows, num_columns, shares)
        launch(_statistics_kernel, plan, (logits, columns.contiguous(), statistics))
    return statistics


def write_gradient_(logits: Tensor, rows: Rows, shares: Shares) -> None:
    """As in eager.py; logits are contiguous, and those that compute_statistics took."""
    num_rows, num_columns = logits.shape
    if num_rows:
        vectors = (None if t is None else t.contiguous() for t in rows)
        launch(_gradient_kernel, _plan_gradient(num_rows, num_columns, shares), (logits, *vectors))


@cache_plans
def _plan_statistics(num_rows: int, num_columns: int, shares: Shares) -> Plan:
    arguments = _list_arguments(num_columns, shares)
    return Plan((num_rows,), num_rows=num_rows, HAS_ENTROPY=shares.has_entropy, **arguments)


@cache_plans
def _plan_gradient(num_rows: int, num_columns: int, shares: Shares) -> Plan:
    arguments = _list_arguments(num_columns, shares) | {"target_share": shares.target, "other_share": shares.other}
    return Plan((num_rows * -(-num_columns // BLOCK),), **arguments)


def _list_arguments(num_columns: int, shares: Shares) -> dict[str, Any]:
    """Lists the launch arguments of both kernels; v in units of 8 tells the compiler that rows are aligned."""
    unit = 1 if num_columns % 8 else 8
    return {
        "column_units": num_columns // unit,
        "num_real": shares.num_real,
        "softcap": shares.softcap,
        "temperature": shares.temperature,
        "UNIT": unit,
        "HAS_OTHERS": shares.other != 0.0,
        "HAS_CAP": shares.softcap != 0.0,
        "HAS_TEMPERATURE": shares.temperature != 1.0,
        "EXCLUDES_PADDING": shares.excludes_padding,
        "BLOCK": BLOCK,
        **OPTIONS,
    }

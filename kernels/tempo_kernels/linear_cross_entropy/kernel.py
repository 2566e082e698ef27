"""Computes the cross entropy and the entropy of one chunk of logits in Triton; eager.py is the specification.

A row's statistics take one read: the online softmax (Milakov and Gimelshein, arXiv 1805.02867) keeps a running maximum
and the sum scaled to it. A thread reads groups of eight columns, 16 bytes of a 16-bit type. Each group has a maximum
and sums of its own, which are joined at the end, so that no strip costs a reduction over threads. The gradient takes
one read and one write, in place of the logits, so that a chunk needs no second buffer. Arithmetic is float32.

exp(x - top) is computed as exp2((x - top) log2(e)). exp2(x log2(e) - top log2(e)) would save an instruction, but its
relative error is 6e-5 for logits around 1000, and beyond 2e38 top log2(e) overflows.

Two small kernels turn the statistics into losses, and a gradient by the losses into the numbers that each row of the
gradient needs. Both are a launch each, where torch's operations are a dozen.

The cap, the temperature, the exclusion of padding and the entropy are compiled in only where they are asked for. Their
values do not compile a kernel anew.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.kernel_launch import Plan, cache_plans, launch
from tempo_kernels.linear_cross_entropy.settings import Rows, Settings, Shares

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK = 4096
ROWS = 256
OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}
SMALL_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}

# Arguments that change from chunk to chunk. Their values do not compile a kernel anew.
VARYING = ("columns_ptr", "found_ptr", "num_rows", "top_ptr", "scale_ptr", "grad_ptr", "slope_ptr")
ORDER = ("batch", "length")
"""With HAS_BATCH a caller's [batch, length] is read in the order of the rows, which have the batch last."""


@triton.jit
def _find_place(row, batch, length, HAS_BATCH: tl.constexpr):
    """Returns where the number of a row lies in [batch, length], or without a batch in the order of the rows."""
    if HAS_BATCH:
        row = (row % batch) * length + row // batch
    return row


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


@triton.jit(do_not_specialize=(*VARYING[:3], *ORDER))
def _statistics_kernel(
    logits_ptr, columns_ptr, found_ptr,
    num_rows, column_units, num_real, softcap, temperature, batch, length,
    UNIT: tl.constexpr, HAS_BATCH: tl.constexpr, HAS_OTHERS: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, EXCLUDES_PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program reads one row once."""
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
    target = tl.load(columns_ptr + _find_place(tl.program_id(0), batch, length, HAS_BATCH))
    is_here = (target >= 0) & (target < (num_real if EXCLUDES_PADDING else num_columns))
    of_target = tl.load(row_ptr + target, mask=is_here, other=float("-inf")).to(tl.float32)
    of_target, _ = _scale(of_target, softcap, temperature, HAS_CAP, HAS_TEMPERATURE)
    if HAS_CAP:
        of_target = tl.where(is_here, of_target, float("-inf"))
    row_top = tl.max(top, axis=0)
    factor = _exp(top - _make_finite(row_top))[:, None]
    tl.store(found_ptr + row, row_top)
    tl.store(found_ptr + num_rows + row, tl.sum(tl.sum(total * factor, axis=1), axis=0))
    tl.store(found_ptr + 2 * num_rows + row, of_target)
    if HAS_OTHERS:
        tl.store(found_ptr + 3 * num_rows + row, tl.sum(tl.sum(sums, axis=1), axis=0) + num_real * (origin - row_top))
    if HAS_ENTROPY:
        weighted = _move_origin(weighted, total, top, row_top, factor)
        place = (4 if HAS_OTHERS else 3) * num_rows + row
        tl.store(found_ptr + place, tl.sum(tl.sum(weighted, axis=1), axis=0))


@triton.jit(do_not_specialize=(VARYING[0], *VARYING[3:], *ORDER))
def _gradient_kernel(
    logits_ptr, columns_ptr, top_ptr, scale_ptr, grad_ptr, slope_ptr,
    column_units, num_real, target_share, other_share, softcap, temperature, batch, length,
    UNIT: tl.constexpr, HAS_BATCH: tl.constexpr, HAS_OTHERS: tl.constexpr, HAS_SLOPE: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, EXCLUDES_PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes one strip of one row."""
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
    if HAS_SLOPE:
        slope = tl.load(slope_ptr + row)
        is_ignored &= slope == 0.0
        values *= scale + slope * tl.where(values > 0.0, above, 0.0)
    else:
        values *= scale
    if HAS_OTHERS:
        values -= tl.where(column < num_real, grad * other_share, 0.0)
    # A branch, because only one strip of a row holds the target.
    target = tl.load(columns_ptr + _find_place(row.to(tl.int32), batch, length, HAS_BATCH)) - strip * BLOCK
    if (target >= 0) & (target < BLOCK):
        values -= tl.where(column == target + strip * BLOCK, grad * target_share, 0.0)
    if HAS_CAP:
        values *= slope_of_cap
    if EXCLUDES_PADDING:
        values = tl.where(column < num_real, values, 0.0)
    # Last, so that a row without a gradient becomes 0 even if its logits are NaN or infinite.
    values = tl.where(is_ignored, 0.0, values)
    tl.store(row_ptr + column, values.to(logits_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _log(x):
    """Computes log(x) of x >= 0 to 2 units in the last place; tl.log has only an absolute error near 1.

    x = 2**e m with m in [sqrt(1/2), sqrt(2)), and log(m) = 2 atanh((m - 1) / (m + 1)).
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    s = tl.div_rn(m - 1.0, m + 1.0)
    square = s * s
    series = ((square * (1.0 / 9.0) + 1.0 / 7.0) * square + 0.2) * square + 1.0 / 3.0
    value = exponent.to(tl.float32) * 0.693147181 + 2.0 * (s + s * square * series)
    # Infinity and NaN have no such exponent.
    return tl.where(x == 0.0, float("-inf"), tl.where(x < float("inf"), value, x))


@triton.jit(do_not_specialize=["num_rows", "ignore_index", *ORDER])
def _results_kernel(
    found_ptr, labels_ptr, losses_ptr, entropies_ptr, kept_ptr,
    num_rows, ignore_index, batch, length, target_share, other_share, z_loss,
    HAS_BATCH: tl.constexpr, HAS_OTHERS: tl.constexpr, HAS_Z: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """One program computes the results of ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    num_rows = num_rows.to(tl.int64)
    top = tl.load(found_ptr + row, mask=inside, other=0.0)
    total = tl.load(found_ptr + num_rows + row, mask=inside, other=1.0)
    of_target = tl.load(found_ptr + 2 * num_rows + row, mask=inside, other=0.0) - top
    place = _find_place(row.to(tl.int32), batch, length, HAS_BATCH)
    is_used = tl.load(labels_ptr + place, mask=inside, other=0) != ignore_index
    log_total = _log(total)
    if HAS_OTHERS:
        losses = log_total - of_target * target_share
        losses -= other_share * tl.load(found_ptr + 3 * num_rows + row, mask=inside, other=0.0)
    else:
        losses = log_total - of_target
    if HAS_Z:
        losses += z_loss * (top + log_total) * (top + log_total)
    tl.store(losses_ptr + place, tl.where(is_used, losses, 0.0), mask=inside)
    tl.store(kept_ptr + row, top, mask=inside)
    tl.store(kept_ptr + num_rows + row, total, mask=inside)
    if HAS_ENTROPY:
        weighted = tl.load(found_ptr + (4 if HAS_OTHERS else 3) * num_rows + row, mask=inside, other=0.0)
        expected = tl.div_rn(weighted, total)
        tl.store(entropies_ptr + place, tl.where(is_used, log_total - expected, 0.0), mask=inside)
        tl.store(kept_ptr + 2 * num_rows + row, expected, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "kept_stride", "ignore_index", *ORDER])
def _rows_kernel(
    labels_ptr, grad_ptr, grad_entropy_ptr, kept_ptr, scale_ptr, weighed_ptr, slope_ptr,
    num_rows, kept_stride, ignore_index, batch, length, z_loss, temperature,
    HAS_BATCH: tl.constexpr, HAS_Z: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_SLOPE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """One program computes scale, grad and slope of ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    kept_stride = kept_stride.to(tl.int64)
    total = tl.load(kept_ptr + kept_stride + row, mask=inside, other=1.0)
    place = _find_place(row.to(tl.int32), batch, length, HAS_BATCH)
    is_used = tl.load(labels_ptr + place, mask=inside, other=0) != ignore_index
    grad = tl.where(is_used, tl.load(grad_ptr + place, mask=inside, other=0.0), 0.0)
    if HAS_TEMPERATURE:
        grad = tl.div_rn(grad, tl.zeros_like(grad) + temperature)
    scale = tl.div_rn(grad, total)
    if HAS_Z:
        scale *= 1.0 + 2.0 * z_loss * (tl.load(kept_ptr + row, mask=inside, other=0.0) + _log(total))
    if HAS_SLOPE:
        grad_entropy = tl.where(is_used, tl.load(grad_entropy_ptr + place, mask=inside, other=0.0), 0.0)
        if HAS_TEMPERATURE:
            grad_entropy = tl.div_rn(grad_entropy, tl.zeros_like(grad) + temperature)
        # A gradient of 0 stays 0, even where the row's total is 0, infinite or NaN.
        slope = tl.where(grad_entropy == 0.0, 0.0, tl.div_rn(-grad_entropy, total))
        scale -= slope * tl.load(kept_ptr + 2 * kept_stride + row, mask=inside, other=0.0)
        tl.store(slope_ptr + row, slope, mask=inside)
    tl.store(scale_ptr + row, scale, mask=inside)
    tl.store(weighed_ptr + row, grad, mask=inside)


def find_statistics(logits: Tensor, columns: Tensor, shares: Shares, batch: int = 1) -> Tensor:
    """As in eager.py; logits are contiguous. In all four functions a batch of more than 1 says that columns, labels and
    the gradients of losses and entropies are [batch, n / batch], for rows that have the batch last."""
    _check(logits)
    num_rows, num_columns = logits.shape
    found = torch.empty(shares.num_statistics, num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        plan = _plan_statistics(num_rows, num_columns, shares, batch > 1)
        launch(_statistics_kernel, plan, (logits, columns.contiguous(), found), (batch, num_rows // batch))
    return found


def write_gradient_(logits: Tensor, rows: Rows, shares: Shares, batch: int = 1) -> None:
    """As in eager.py; logits are contiguous."""
    _check(logits)
    num_rows, num_columns = logits.shape
    if num_rows:
        plan = _plan_gradient(num_rows, num_columns, shares, rows.slope is not None, batch > 1)
        columns, top, scale, grad, slope = rows
        slope = grad if slope is None else slope
        tensors = (columns, top, scale, grad, slope)
        launch(_gradient_kernel, plan, (logits, *[t.contiguous() for t in tensors]), (batch, num_rows // batch))


def find_results(
    found: Tensor, labels: Tensor, settings: Settings, batch: int = 1
) -> tuple[tuple[Tensor, ...], Tensor]:
    """As in eager.py; found is contiguous. What is kept has the order of the rows."""
    num_rows, shape, has_entropy = labels.numel(), labels.shape, settings.has_entropy
    losses, kept = found.new_empty(shape), found.new_empty(2 + has_entropy, *shape)
    entropies = found.new_empty(shape) if has_entropy else None
    if num_rows:
        other = settings.other_share
        plan = _plan_results(num_rows, settings.target_share, other, settings.z_loss, has_entropy, batch > 1)
        numbers = (num_rows, settings.ignore_index, batch, num_rows // batch)
        launch(_results_kernel, plan, (found, labels.contiguous(), losses, entropies, kept), numbers)
    return (losses,) if entropies is None else (losses, entropies), kept


def list_rows(
    columns: Tensor,
    labels: Tensor,
    grad: Tensor,
    grad_entropy: Tensor | None,
    kept: Tensor,
    settings: Settings,
    batch: int = 1,
) -> Rows:
    """As in eager.py; a row of kept may be part of a longer one, and have more dimensions."""
    num_rows, has_slope = labels.numel(), grad_entropy is not None
    scale, weighed = kept.new_empty(num_rows), kept.new_empty(num_rows)
    slope = kept.new_empty(num_rows) if has_slope else None
    if num_rows:
        plan = _plan_rows(num_rows, settings.z_loss, settings.temperature, has_slope, batch > 1)
        entropy = None if grad_entropy is None else grad_entropy.contiguous()
        tensors = (labels.contiguous(), grad.contiguous(), entropy, kept, scale, weighed, slope)
        numbers = (num_rows, kept.stride(0), settings.ignore_index, batch, num_rows // batch)
        launch(_rows_kernel, plan, tensors, numbers)
    # A whole `kept` begins with top, and the kernel reads no further.
    return Rows(columns, kept if kept.is_contiguous() else kept[0], scale, weighed, slope)


@cache_plans
def _plan_results(
    num_rows: int, target_share: float, other_share: float, z_loss: float, has_entropy: bool, has_batch: bool
) -> Plan:
    numbers = {"target_share": target_share, "other_share": other_share, "HAS_OTHERS": other_share != 0.0}
    numbers |= {"HAS_ENTROPY": has_entropy, "HAS_BATCH": has_batch}
    return _plan_small(num_rows, ("num_rows", "ignore_index", *ORDER), z_loss, **numbers)


@cache_plans
def _plan_rows(num_rows: int, z_loss: float, temperature: float, has_slope: bool, has_batch: bool) -> Plan:
    numbers = {"temperature": temperature, "HAS_TEMPERATURE": temperature != 1.0}
    numbers |= {"HAS_SLOPE": has_slope, "HAS_BATCH": has_batch}
    return _plan_small(num_rows, ("num_rows", "kept_stride", "ignore_index", *ORDER), z_loss, **numbers)


def _plan_small(num_rows: int, varying: tuple[str, ...], z_loss: float, **numbers: Any) -> Plan:
    """The plan of a kernel whose programs have ROWS rows each."""
    grid = (-(-num_rows // ROWS),)
    return Plan(grid, varying, z_loss=z_loss, HAS_Z=z_loss != 0.0, ROWS=ROWS, **numbers, **SMALL_OPTIONS)


@cache_plans
def _plan_statistics(num_rows: int, num_columns: int, shares: Shares, has_batch: bool) -> Plan:
    numbers = _list_arguments(num_columns, shares)
    numbers |= {"HAS_ENTROPY": shares.has_entropy, "HAS_BATCH": has_batch}
    return Plan((num_rows,), ORDER, num_rows=num_rows, **numbers)


@cache_plans
def _plan_gradient(num_rows: int, num_columns: int, shares: Shares, has_slope: bool, has_batch: bool) -> Plan:
    numbers = _list_arguments(num_columns, shares)
    numbers |= {
        "HAS_SLOPE": has_slope,
        "HAS_BATCH": has_batch,
        "target_share": shares.target,
        "other_share": shares.other,
    }
    return Plan((num_rows * -(-num_columns // BLOCK),), ORDER, **numbers)


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


def _check(logits: Tensor) -> None:
    if logits.dtype not in DTYPES:
        raise ValueError(
            f"linear_cross_entropy: logits are {logits.dtype}; expected float32, float16 or bfloat16 on a GPU; cast "
            "hidden and weight"
        )

"""Cross entropy of one chunk of logits in Triton; eager.py is the specification.

A row's statistics take one read: the online softmax (Milakov and Gimelshein, arXiv 1805.02867) keeps a running maximum
and the sum scaled to it. Each lane has a sum of its own, added up at the end: a strip costs one reduction, the maximum.
The gradient takes one read and one write, over the logits themselves, so that a chunk needs no second memory. A thread
holds eight neighbouring columns: 16 bytes of a 16-bit type in one access. Arithmetic is float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.linear_cross_entropy.settings import Rows, Shares

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK = 4096
OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}

# Arguments that change from chunk to chunk. No value of theirs compiles a kernel anew.
VARYING = ("columns_ptr", "found_ptr", "num_rows", "top_ptr", "scale_ptr", "grad_ptr")


@triton.jit
def _load_strip(row_ptr, start, num_columns, BLOCK: tl.constexpr):
    """Columns from start on, whether they exist, and their values in float32, -inf where they do not."""
    column = start + tl.arange(0, BLOCK)
    inside = column < num_columns
    return column, inside, tl.load(row_ptr + column, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit
def _make_finite(top):
    """The maximum, or 0 for -inf: subtracting -inf from itself would give NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit(do_not_specialize=VARYING[:3])
def _statistics_kernel(
    logits_ptr, columns_ptr, found_ptr,
    num_rows, column_units, num_real,
    UNIT: tl.constexpr, HAS_OTHERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program reads one row once."""
    row = tl.program_id(0).to(tl.int64)
    num_columns = column_units * UNIT
    row_ptr = logits_ptr + row * num_columns
    top = float("-inf")
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if HAS_OTHERS:
        # Differences to the first logit: their sum loses no digits to what all logits have in common.
        origin = tl.load(row_ptr).to(tl.float32)
        sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, num_columns, BLOCK):
        column, _, values = _load_strip(row_ptr, start, num_columns, BLOCK)
        new_top = tl.maximum(top, tl.max(values, axis=0))
        total = total * tl.exp(top - _make_finite(new_top)) + tl.exp(values - _make_finite(new_top))
        top = new_top
        if HAS_OTHERS:
            sums += tl.where(column < num_real, values - origin, 0.0)
    target = tl.load(columns_ptr + row)
    is_here = (target >= 0) & (target < num_columns)
    of_target = tl.load(row_ptr + target, mask=is_here, other=float("-inf")).to(tl.float32)
    tl.store(found_ptr + row, top)
    tl.store(found_ptr + num_rows + row, tl.sum(total, axis=0))
    tl.store(found_ptr + 2 * num_rows + row, of_target)
    if HAS_OTHERS:
        tl.store(found_ptr + 3 * num_rows + row, tl.sum(sums, axis=0) + num_real * (origin - top))


@triton.jit(do_not_specialize=(VARYING[0], *VARYING[3:]))
def _gradient_kernel(
    logits_ptr, columns_ptr, top_ptr, scale_ptr, grad_ptr,
    column_units, num_real, target_share, other_share,
    UNIT: tl.constexpr, HAS_OTHERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes one strip of one row."""
    num_columns = column_units * UNIT
    num_strips = tl.cdiv(num_columns, BLOCK)
    row, strip = (tl.program_id(0) // num_strips).to(tl.int64), tl.program_id(0) % num_strips
    row_ptr = logits_ptr + row * num_columns
    column, inside, values = _load_strip(row_ptr, strip * BLOCK, num_columns, BLOCK)
    grad = tl.load(grad_ptr + row)
    values = tl.exp(values - tl.load(top_ptr + row)) * tl.load(scale_ptr + row)
    if HAS_OTHERS:
        values -= tl.where(column < num_real, grad * other_share, 0.0)
    values -= tl.where(column == tl.load(columns_ptr + row), grad * target_share, 0.0)
    values = tl.where(grad == 0.0, 0.0, values)
    tl.store(row_ptr + column, values.to(logits_ptr.dtype.element_ty), mask=inside)


def find_statistics(logits: Tensor, columns: Tensor, shares: Shares) -> Tensor:
    """As in eager.py; logits are contiguous."""
    _check(logits)
    found = torch.empty(4 if shares.other else 3, logits.size(0), dtype=torch.float32, device=logits.device)
    if logits.size(0):
        with torch.cuda.device_of(logits):
            _statistics_kernel[(logits.size(0),)](
                logits,
                columns.contiguous(),
                found,
                num_rows=logits.size(0),
                **_collect_arguments(logits, shares),
            )
    return found


def write_gradient_(logits: Tensor, rows: Rows, shares: Shares) -> None:
    """As in eager.py; logits are contiguous."""
    _check(logits)
    if logits.size(0):
        with torch.cuda.device_of(logits):
            _gradient_kernel[(logits.size(0) * -(-logits.size(1) // BLOCK),)](
                logits,
                *(t.contiguous() for t in rows),
                target_share=shares.target,
                other_share=shares.other,
                **_collect_arguments(logits, shares),
            )


def _collect_arguments(logits: Tensor, shares: Shares) -> dict[str, Any]:
    """The launch arguments of both kernels. v is in units of 8 where it can be: the compiler then knows a multiple."""
    unit = 1 if logits.size(1) % 8 else 8
    return {
        "column_units": logits.size(1) // unit,
        "num_real": shares.num_real,
        "UNIT": unit,
        "HAS_OTHERS": shares.other != 0.0,
        "BLOCK": BLOCK,
        **OPTIONS,
    }


def _check(logits: Tensor) -> None:
    if logits.dtype not in DTYPES:
        raise ValueError(
            f"linear_cross_entropy: logits are {logits.dtype}; expected float32, float16 or bfloat16 on a GPU; cast "
            "hidden and weight"
        )

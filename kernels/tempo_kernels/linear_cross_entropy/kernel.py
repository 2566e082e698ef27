"""Cross entropy of one chunk of logits in Triton; eager.py is the specification.

One program per row, in strips of BLOCK columns, of which a thread holds eight neighbours at a time: 16 bytes of a
16-bit type. The statistics take one read: the running maximum and the sum scaled to it of the online softmax (Milakov
and Gimelshein, arXiv 1805.02867), one sum per lane, added up at the end. The gradient takes one read and one write,
over the logits themselves. Arithmetic is float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK = 4096
OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}

# Arguments that change from chunk to chunk: no value of theirs compiles a kernel anew.
VARYING = ("columns_ptr", "found_ptr", "num_rows", "top_ptr", "scale_ptr", "grad_ptr")


@triton.jit
def _strip(row_ptr, start, num_columns, BLOCK: tl.constexpr):
    """Columns from start on, whether there are such, and their values in float32, -inf where not."""
    column = start + tl.arange(0, BLOCK)
    inside = column < num_columns
    return column, inside, tl.load(row_ptr + column, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit
def _finite(top):
    """A number to subtract in place of a maximum of -inf."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit(do_not_specialize=VARYING[:3])
def _statistics_kernel(
    logits_ptr, columns_ptr, found_ptr,
    num_rows, column_units, num_real,
    UNIT: tl.constexpr, NEEDS_SUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one row, once."""
    row = tl.program_id(0).to(tl.int64)
    num_columns = column_units * UNIT
    row_ptr = logits_ptr + row * num_columns
    top = float("-inf")
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if NEEDS_SUM:
        # Differences to one of the first logits: their sum loses no digits to what all of them have in common.
        origin = tl.load(row_ptr).to(tl.float32)
        sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, num_columns, BLOCK):
        column, _, values = _strip(row_ptr, start, num_columns, BLOCK)
        new_top = tl.maximum(top, tl.max(values, axis=0))
        total = total * tl.exp(top - _finite(new_top)) + tl.exp(values - _finite(new_top))
        top = new_top
        if NEEDS_SUM:
            sums += tl.where(column < num_real, values - origin, 0.0)
    target = tl.load(columns_ptr + row)
    is_here = (target >= 0) & (target < num_columns)
    of_target = tl.load(row_ptr + target, mask=is_here, other=float("-inf")).to(tl.float32)
    tl.store(found_ptr + row, top)
    tl.store(found_ptr + num_rows + row, tl.sum(total, axis=0))
    tl.store(found_ptr + 2 * num_rows + row, of_target)
    if NEEDS_SUM:
        tl.store(found_ptr + 3 * num_rows + row, tl.sum(sums, axis=0) + num_real * (origin - top))


@triton.jit(do_not_specialize=(VARYING[0], *VARYING[3:]))
def _gradient_kernel(
    logits_ptr, columns_ptr, top_ptr, scale_ptr, grad_ptr,
    column_units, num_real, target_share, other_share,
    UNIT: tl.constexpr, HAS_OTHERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one strip of one row."""
    num_columns = column_units * UNIT
    num_strips = tl.cdiv(num_columns, BLOCK)
    row, strip = (tl.program_id(0) // num_strips).to(tl.int64), tl.program_id(0) % num_strips
    row_ptr = logits_ptr + row * num_columns
    column, inside, values = _strip(row_ptr, strip * BLOCK, num_columns, BLOCK)
    grad = tl.load(grad_ptr + row)
    values = tl.exp(values - tl.load(top_ptr + row)) * tl.load(scale_ptr + row)
    if HAS_OTHERS:
        values -= tl.where(column < num_real, grad * other_share, 0.0)
    values -= tl.where(column == tl.load(columns_ptr + row), grad * target_share, 0.0)
    values = tl.where(grad == 0.0, 0.0, values)
    tl.store(row_ptr + column, values.to(logits_ptr.dtype.element_ty), mask=inside)


def statistics(logits: Tensor, columns: Tensor, num_real: int, needs_sum: bool) -> Tensor:
    """[3 or 4, n] of logits [n, v], contiguous: top, total, the target's logit, sum_real (l - top)."""
    _check(logits)
    found = torch.empty(3 + needs_sum, logits.size(0), dtype=torch.float32, device=logits.device)
    if logits.size(0):
        with torch.cuda.device_of(logits):
            _statistics_kernel[(logits.size(0),)](
                logits,
                columns.contiguous(),
                found,
                num_rows=logits.size(0),
                num_real=num_real,
                NEEDS_SUM=needs_sum,
                **_sizes(logits),
                **OPTIONS,
            )
    return found


def gradient_(
    logits: Tensor,
    columns: Tensor,
    top: Tensor,
    scale: Tensor,
    grad: Tensor,
    target_share: float,
    other_share: float,
    num_real: int,
) -> None:
    """Writes grad_l over logits [n, v], contiguous; a row whose grad is 0 becomes 0 whatever it holds."""
    _check(logits)
    if logits.size(0):
        with torch.cuda.device_of(logits):
            _gradient_kernel[(logits.size(0) * -(-logits.size(1) // BLOCK),)](
                logits,
                *(t.contiguous() for t in (columns, top, scale, grad)),
                num_real=num_real,
                target_share=target_share,
                other_share=other_share,
                HAS_OTHERS=other_share != 0.0,
                **_sizes(logits),
                **OPTIONS,
            )


def _sizes(logits: Tensor) -> dict[str, Any]:
    """v in units of 8 where possible, so that the compiler knows it for a multiple."""
    unit = 1 if logits.size(1) % 8 else 8
    return {"column_units": logits.size(1) // unit, "UNIT": unit, "BLOCK": BLOCK}


def _check(logits: Tensor) -> None:
    if logits.dtype not in DTYPES:
        raise ValueError(
            f"linear_cross_entropy: logits are {logits.dtype}; expected float32, float16 or bfloat16 on a GPU; cast "
            "hidden and weight"
        )

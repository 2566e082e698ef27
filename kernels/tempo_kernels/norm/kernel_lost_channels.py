"""The channels that y cannot carry, on the GPU: which they are, how their xhat is kept and how it is found again.

slots (int32 [h]) is each channel's column in lost_xhat [rows, capacity] (x's dtype), or -1 where y carries it. Both are
empty while capacity, the host's part (see reserve.py), is 0. Which channels are lost is decided here, in every forward,
exactly as eager.lost_channels does. Lost channels beyond the capacity are recovered from y as well as it can be: xhat
is then off by about 1 at most, which is its standard deviation.

counts (int32 [2]) is what the host is told: the candidates, and the most that were lost beyond the capacity so far.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.norm import eager
from tempo_kernels.norm.reserve import reserve_of

MAX_OFFSET = tl.constexpr(eager.MAX_OFFSET)
CLOSE_OFFSET = tl.constexpr(eager.CLOSE_OFFSET)
SMALL_SHARE = tl.constexpr(eager.SMALL_SHARE)
ALMOST_ZERO = tl.constexpr(2.0**-100)
MARK = tl.constexpr(2.0**127)  # swallows any y but inf and NaN
# The constants by which a kernel tells what a y of each type carries.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALLEST = {dtype: eager.smallest_carried(dtype) for dtype in DTYPES}
RESOLUTION = {dtype: {"EPS": torch.finfo(dtype).eps, "TINY": torch.finfo(dtype).tiny} for dtype in DTYPES}
OPTIONS: dict[str, Any] = {"BLOCK_COLUMNS": 4096, "num_warps": 8, "enable_fp_fusion": True}


class Lost(NamedTuple):
    slots: Tensor
    capacity: int
    counts: Tensor


@triton.jit
def parameters(weight_ptr, bias_ptr, column, inside, HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """gamma and beta in float32; 1 and 0 outside."""
    if ZERO_CENTERED:
        gamma = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32) + 1.0
    else:
        gamma = tl.load(weight_ptr + column, mask=inside, other=1.0).to(tl.float32)
    beta = tl.zeros_like(gamma)
    if HAS_BIAS:
        beta = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return gamma, beta


@triton.jit
def find_channels(
    weight_ptr, bias_ptr, slots_ptr, counts_ptr, num_columns, capacity,
    HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr, HAS_LOST: tl.constexpr, SMALLEST: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Fills counts and, where HAS_LOST, slots, in the order of the channels; for one program alone."""
    total = 0.0
    for block in range(0, num_columns, BLOCK_COLUMNS):
        column = block + tl.arange(0, BLOCK_COLUMNS)
        inside = column < num_columns
        gamma, _ = parameters(weight_ptr, bias_ptr, column, inside, False, ZERO_CENTERED)
        total += tl.sum(tl.where(inside, tl.abs(gamma), 0.0), axis=0)
    found, candidates = 0, 0
    for block in range(0, num_columns, BLOCK_COLUMNS):
        column = block + tl.arange(0, BLOCK_COLUMNS)
        inside = column < num_columns
        gamma, beta = parameters(weight_ptr, bias_ptr, column, inside, HAS_BIAS, ZERO_CENTERED)
        # Neither is true outside, where gamma is 1 and beta 0.
        lost = ~(tl.abs(gamma) > SMALLEST) | (tl.abs(beta) > MAX_OFFSET * tl.abs(gamma))
        is_close = (tl.abs(beta) > CLOSE_OFFSET * tl.abs(gamma)) & inside
        is_small = (tl.abs(gamma) < total / num_columns * SMALL_SHARE) & inside
        candidates += tl.sum((lost | is_close | is_small).to(tl.int32), axis=0)
        if HAS_LOST:
            slot = found + tl.cumsum(lost.to(tl.int32), axis=0) - 1
            tl.store(slots_ptr + column, tl.where(lost & (slot < capacity), slot, -1), mask=inside)
        found += tl.sum(lost.to(tl.int32), axis=0)
    tl.store(counts_ptr, candidates)
    tl.atomic_max(counts_ptr + 1, tl.maximum(found - capacity, 0))


@triton.jit
def marked(gamma, beta, EPS: tl.constexpr, TINY: tl.constexpr):
    """gamma without zeros, and beta with MARK where y, rounded, says no more of xhat than that it is about 0.

    A mark inside beta, because a vector of flags would take registers that backward does not have.
    """
    readable = tl.abs(gamma) > EPS * (tl.abs(beta) + TINY)
    return tl.where(gamma == 0.0, ALMOST_ZERO, gamma), tl.where(readable, beta, MARK)


@triton.jit
def recovered(y, beta):
    """gamma * xhat [m, n] from y, with 0 in the channels that `marked` marked."""
    scaled = y - beta[None, :]
    return tl.where(scaled == -MARK, 0.0, scaled)


@triton.jit
def store_lost(slots_ptr, lost_xhat_ptr, row, column, inside, xhat, num_rows, capacity):
    """Keeps the lost channels of xhat [m, n]; row [m] is int64."""
    slot = tl.load(slots_ptr + column, mask=inside, other=-1)[None, :]
    kept = (row < num_rows)[:, None] & (slot >= 0)
    tl.store(lost_xhat_ptr + row[:, None] * capacity + slot, xhat.to(lost_xhat_ptr.dtype.element_ty), mask=kept)


@triton.jit
def restored(xhat, slots_ptr, lost_xhat_ptr, row, column, inside, num_rows, capacity):
    """xhat [m, n] with the lost channels from what was kept; row [m] is int64."""
    slot = tl.load(slots_ptr + column, mask=inside, other=-1)[None, :]
    kept = (row < num_rows)[:, None] & (slot >= 0)
    lost = tl.load(lost_xhat_ptr + row[:, None] * capacity + slot, mask=kept, other=0.0)
    return tl.where(slot >= 0, lost.to(tl.float32), xhat)


@triton.jit(do_not_specialize=["capacity"])
def _slots_kernel(
    weight_ptr, bias_ptr, slots_ptr, counts_ptr, num_columns, capacity,
    HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr, SMALLEST: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """A single program: the slots of all channels."""
    find_channels(
        weight_ptr, bias_ptr, slots_ptr, counts_ptr, num_columns, capacity,
        HAS_BIAS, ZERO_CENTERED, True, SMALLEST, BLOCK_COLUMNS,
    )  # fmt: skip


def find_lost(x: Tensor, weight: Tensor, bias: Tensor | None, zero_centered: bool) -> Lost:
    """What a forward of x needs to keep its lost channels; without waiting for the GPU, see reserve.py.

    Where the capacity is 0, as with every common initialisation, nothing is launched: a program of the forward kernel
    has to call find_channels then, for the counts.
    """
    reserve = reserve_of(weight, bias, x.dtype, zero_centered)
    capacity = reserve.capacity
    if not capacity:
        return Lost(reserve.no_slots, 0, reserve.counts)
    slots = torch.empty(weight.numel(), dtype=torch.int32, device=x.device)
    _slots_kernel[(1,)](
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        slots,
        reserve.counts,
        num_columns=weight.numel(),
        capacity=capacity,
        HAS_BIAS=bias is not None,
        ZERO_CENTERED=zero_centered,
        SMALLEST=SMALLEST[x.dtype],
        **OPTIONS,
    )
    return Lost(slots, capacity, reserve.counts)

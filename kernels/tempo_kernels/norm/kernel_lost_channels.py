"""Finds, keeps and restores on the GPU the channels that a norm's output cannot carry; lost_channels.py defines them.

Backward from the output needs xhat = (y - beta) / gamma, which y does not carry where gamma is small beside beta.
1. Every forward decides on the device which channels are lost; the host would have to wait for the parameters. One
   program finds them in two passes over gamma and beta.
2. slots (int32 [h]) gives each lost channel a column of lost_xhat [rows, capacity] (y's dtype), in the order of the
   channels, by a running sum. A slot is -1 if y carries the channel. The host chooses capacity, see reserve.py.
3. affine (float32 [2, h], or [1, h] without a bias) holds gamma and beta of that forward for its backward, because the
   parameters may have changed by then. Backward finds the lost channels in affine by the same rule.
4. Backward starts with NaN in every lost channel, and a kept column takes its place. A channel that was lost beyond the
   capacity therefore has NaN gradients instead of wrong ones.
5. counts (int32 [2]) tells the host afterwards how many candidates there are, and how many channels had no column.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tempo_kernels.kernel_launch import Plan, cache_plans, launch
from tempo_kernels.norm import lost_channels
from tempo_kernels.norm.kernel_rows import load_parameters
from tempo_kernels.norm.operands import Norm
from tempo_kernels.norm.reserve import find_reserve

MAX_OFFSET = tl.constexpr(lost_channels.MAX_OFFSET)
SMALLEST_DRIFT = tl.constexpr(lost_channels.SMALLEST_DRIFT)
DRIFT_SHARE = tl.constexpr(lost_channels.DRIFT_SHARE)
LARGEST = tl.constexpr(lost_channels.LARGEST)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALLEST = {dtype: lost_channels.find_smallest_carried(dtype) for dtype in DTYPES}
OPTIONS: dict[str, Any] = {"BLOCK_COLUMNS": 4096, "num_warps": 8, "enable_fp_fusion": True}


class LostChannels(NamedTuple):
    """The arguments of a forward's launch; the module's docstring explains them."""

    slots: Tensor
    capacity: int
    counts: Tensor
    affine: Tensor


@triton.jit
def is_lost(gamma, beta, SMALLEST: tl.constexpr):
    """Whether a rounded y does not carry xhat. A channel also counts as lost if gamma is NaN, or so large that `invert`
    gives 0."""
    return ~((gamma > SMALLEST) & (gamma <= LARGEST)) | (beta > MAX_OFFSET * gamma)


@triton.jit
def find_channels(
    weight_ptr, bias_ptr, affine_ptr, slots_ptr, counts_ptr, num_columns, capacity,
    HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr, HAS_LOST: tl.constexpr, SMALLEST: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Fills affine, counts and, with HAS_LOST, slots in the order of the channels. Exactly one program must call it.

    A channel is a candidate if it would be lost once gamma and beta each moved by `drift` in the wrong direction.
    """
    total = 0.0
    for block in range(0, num_columns, BLOCK_COLUMNS):
        column = block + tl.arange(0, BLOCK_COLUMNS)
        inside = column < num_columns
        gamma, beta = load_parameters(weight_ptr, bias_ptr, column, inside, HAS_BIAS, ZERO_CENTERED)
        tl.store(affine_ptr + column, gamma, mask=inside)
        if HAS_BIAS:
            tl.store(affine_ptr + num_columns + column, beta, mask=inside)
        total += tl.sum(tl.where(inside, tl.abs(gamma), 0.0), axis=0)
    drift = tl.maximum(total / num_columns * DRIFT_SHARE, SMALLEST_DRIFT)
    found, candidates = 0, 0
    for block in range(0, num_columns, BLOCK_COLUMNS):
        column = block + tl.arange(0, BLOCK_COLUMNS)
        inside = column < num_columns
        gamma, beta = load_parameters(weight_ptr, bias_ptr, column, inside, HAS_BIAS, ZERO_CENTERED)
        gamma, beta = tl.abs(gamma), tl.abs(beta)
        candidates += tl.sum((is_lost(gamma - drift, beta + drift, SMALLEST) & inside).to(tl.int32), axis=0)
        lost = is_lost(gamma, beta, SMALLEST) & inside
        if HAS_LOST:
            slot = found + tl.cumsum(lost.to(tl.int32), axis=0) - 1
            tl.store(slots_ptr + column, tl.where(lost & (slot < capacity), slot, -1), mask=inside)
        found += tl.sum(lost.to(tl.int32), axis=0)
    tl.store(counts_ptr, candidates)
    tl.atomic_max(counts_ptr + 1, tl.maximum(found - capacity, 0))


@triton.jit
def poison_lost(gamma, beta, HAS_LOST: tl.constexpr, SMALLEST: tl.constexpr):
    """Returns gamma and beta with NaN in the lost channels: in beta with HAS_LOST, otherwise in gamma.

    A NaN in beta makes y - beta and all that follows NaN until a kept column takes its place; kernels recognise lost
    channels by `beta != beta`. A NaN in gamma makes xhat and the gradients NaN for good. Separate flags would take
    registers that backward does not have.
    """
    lost = is_lost(tl.abs(gamma), tl.abs(beta), SMALLEST)
    if HAS_LOST:
        beta = tl.where(lost, float("nan"), beta)
    else:
        gamma = tl.where(lost, float("nan"), gamma)
    return gamma, beta


@triton.jit
def choose_divisor(gamma, beta, HAS_LOST: tl.constexpr):
    """Returns the divisor of y - beta: gamma, but 1 in the lost channels, whose xhat itself was kept."""
    if HAS_LOST:
        gamma = tl.where(beta == beta, gamma, 1.0)
    return gamma


@triton.jit
def store_lost(slots_ptr, lost_xhat_ptr, row, column, inside, xhat, num_rows, capacity):
    """Stores the lost channels of xhat [m, n]; row [m] is int64."""
    slot = tl.load(slots_ptr + column, mask=inside, other=-1)[None, :]
    kept = (row < num_rows)[:, None] & (slot >= 0)
    tl.store(lost_xhat_ptr + row[:, None] * capacity + slot, xhat.to(lost_xhat_ptr.dtype.element_ty), mask=kept)


@triton.jit
def restore_lost(xhat, slots_ptr, lost_xhat_ptr, row, column, inside, num_rows, capacity):
    """Returns xhat [m, n] with its lost channels replaced by the kept ones; row [m] is int64."""
    slot = tl.load(slots_ptr + column, mask=inside, other=-1)[None, :]
    kept = (row < num_rows)[:, None] & (slot >= 0)
    lost = tl.load(lost_xhat_ptr + row[:, None] * capacity + slot, mask=kept, other=0.0)
    return tl.where(slot >= 0, lost.to(tl.float32), xhat)


@triton.jit(do_not_specialize=["capacity"])
def _slots_kernel(
    weight_ptr, bias_ptr, affine_ptr, slots_ptr, counts_ptr, num_columns, capacity,
    HAS_BIAS: tl.constexpr, ZERO_CENTERED: tl.constexpr, SMALLEST: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """A single program finds the slots of all channels."""
    find_channels(
        weight_ptr, bias_ptr, affine_ptr, slots_ptr, counts_ptr, num_columns, capacity,
        HAS_BIAS, ZERO_CENTERED, True, SMALLEST, BLOCK_COLUMNS,
    )  # fmt: skip


def prepare_lost_channels(norm: Norm, y: Tensor, needs_grad: bool, keeps_lost: bool = True) -> LostChannels:
    """Prepares a forward to keep the channels that y cannot carry; see reserve.py for when it waits for the GPU.

    With a capacity of 0, as after every common initialisation, it launches nothing, and a program of the forward kernel
    has to call find_channels for affine and the counts.
    """
    weight, bias = norm.weight, norm.bias
    reserve = find_reserve(weight, bias, y.dtype, norm.zero_centered, needs_grad)
    counts = reserve.counts if needs_grad else reserve.unread_counts
    num_columns, capacity = weight.numel(), reserve.capacity if keeps_lost else 0
    affine = torch.empty(1 if bias is None else 2, num_columns, dtype=torch.float32, device=y.device)
    if not capacity:
        return LostChannels(reserve.no_slots, 0, counts, affine)
    slots = torch.empty(num_columns, dtype=torch.int32, device=y.device)
    plan = _plan_slots(num_columns, capacity, bias is not None, norm.zero_centered, y.dtype)
    parameters = weight.contiguous(), None if bias is None else bias.contiguous()
    launch(_slots_kernel, plan, (*parameters, affine, slots, counts))
    return LostChannels(slots, capacity, counts, affine)


@cache_plans
def _plan_slots(num_columns: int, capacity: int, has_bias: bool, zero_centered: bool, dtype: torch.dtype) -> Plan:
    return Plan(
        (1,),
        num_columns=num_columns,
        capacity=capacity,
        HAS_BIAS=has_bias,
        ZERO_CENTERED=zero_centered,
        SMALLEST=SMALLEST[dtype],
        **OPTIONS,
    )

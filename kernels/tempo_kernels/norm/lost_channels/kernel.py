"""The channels that y cannot carry, inside the kernels: how their xhat is kept and found again.

slots (int32 [h]) is each channel's column in lost_xhat [rows, capacity], or -1 where y carries it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def parameters(weight_ptr, bias_ptr, column, inside, HAS_BIAS: tl.constexpr):
    """gamma and beta in float32; 1 and 0 outside."""
    gamma = tl.load(weight_ptr + column, mask=inside, other=1.0).to(tl.float32)
    beta = tl.zeros_like(gamma)
    if HAS_BIAS:
        beta = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return gamma, beta


@triton.jit
def store_lost(slots_ptr, lost_xhat_ptr, row, column, inside, xhat, num_rows, capacity):
    """Keeps the lost channels of xhat [m, n]."""
    slot = tl.load(slots_ptr + column, mask=inside, other=-1)[None, :]
    place = lost_xhat_ptr + row.to(tl.int64)[:, None] * capacity + slot
    kept = (row < num_rows)[:, None] & (slot >= 0)
    tl.store(place, xhat.to(lost_xhat_ptr.dtype.element_ty), mask=kept)


@triton.jit
def restored(xhat, slots_ptr, lost_xhat_ptr, row, column, inside, num_rows, capacity):
    """xhat [m, n] with the lost channels from what was kept."""
    slot = tl.load(slots_ptr + column, mask=inside, other=-1)[None, :]
    place = lost_xhat_ptr + row.to(tl.int64)[:, None] * capacity + slot
    kept = (row < num_rows)[:, None] & (slot >= 0)
    return tl.where(slot >= 0, tl.load(place, mask=kept, other=0.0).to(tl.float32), xhat)


@triton.jit
def inverse_of(gamma):
    """1 / gamma; 1 for 0, which is lost."""
    return 1.0 / tl.where(gamma == 0.0, 1.0, gamma)

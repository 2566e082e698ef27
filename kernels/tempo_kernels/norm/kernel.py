"""LayerNorm and RMSNorm on a GPU, in Triton; eager.py is the specification.

Rows up to FORWARD_ROW_BYTES and BACKWARD_ROW_BYTES stay in the registers of a program (kernel_whole_rows.py); longer
ones are read more than once (kernel_long_rows.py). Kernels have the code that keeps lost channels only where channels
may be lost: it takes registers. reserve.py says when the host waits for the GPU, and why.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tempo_kernels.norm import kernel_long_rows as long_rows
from tempo_kernels.norm import kernel_whole_rows as whole_rows
from tempo_kernels.norm.kernel_lost_channels import DTYPES, SMALLEST, prepare_lost_channels
from tempo_kernels.norm.operands import Kept, Norm, Statistics, choose_output_dtype
from tempo_kernels.norm.reserve import check_after_backward

FORWARD_ROW_BYTES = 32768
BACKWARD_ROW_BYTES = 16384


def forward(x: Tensor, norm: Norm, needs_grad: bool = True, keeps_lost: bool = True) -> tuple[Tensor, Kept]:
    """As in eager.py; `lost` holds each channel's slot, as kernel_lost_channels.py describes it.

    Without keeps_lost there is no room for lost channels; the backward of one that was needed raises.
    """
    y, rstd = _allocate(x, norm)
    if x.numel() == 0:
        affine = rstd.new_empty(1 if norm.bias is None else 2, x.size(-1))
        return y, Kept(rstd, affine, rstd.new_empty(0, dtype=torch.int32), y.new_empty(rstd.numel(), 0))
    with torch.cuda.device_of(x):
        lost = prepare_lost_channels(norm, y, needs_grad, keeps_lost)
        kept = Kept(rstd, lost.affine, lost.slots, y.new_empty(rstd.numel(), lost.capacity))
        _choose_rows(x, lost.capacity > 0, FORWARD_ROW_BYTES).forward(
            x_ptr=x.contiguous(),
            y_ptr=y,
            affine_ptr=lost.affine,
            counts_ptr=lost.counts,
            eps=norm.eps,
            REFILLS=False,
            **_arguments_of_output(y, kept),
            **_arguments_of_norm(x, norm),
        )
    return y, kept


def backward(
    grad_y: Tensor, y: Tensor, kept: Kept, subtracts_mean: bool, x_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As in eager.py.

    The sums over rows have two stages, each in a fixed order: the same bits every time on the same GPU.
    """
    with torch.cuda.device_of(y):
        check_after_backward(y.device)
    gamma, *beta = kept.affine
    norm = Norm(gamma, beta[0] if beta else None, 0.0, subtracts_mean, zero_centered=False)
    return _differentiate(grad_y, y, norm, x_dtype, _arguments_of_output(y, kept))


def forward_from_input(x: Tensor, norm: Norm) -> tuple[Tensor, Statistics]:
    """As in eager.py."""
    y, rstd = _allocate(x, norm)
    statistics = Statistics(rstd, torch.empty_like(rstd) if norm.subtracts_mean else None)
    _fill(y, x, norm, statistics, refills=False)
    return y, statistics


def refill(out: Tensor, x: Tensor, norm: Norm, statistics: Statistics) -> None:
    """As in eager.py."""
    _fill(out, x, norm, statistics, refills=True)


def backward_from_input(grad_y: Tensor, x: Tensor, norm: Norm, statistics: Statistics) -> tuple[Tensor, Tensor]:
    """As in eager.py."""
    return _differentiate(grad_y, x.contiguous(), norm, x.dtype, _arguments_of_input(x, statistics))


def _allocate(x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Memory for y and rstd; raises ValueError for a dtype that the kernels do not compute."""
    if x.dtype not in DTYPES:
        raise ValueError(f"norm: x is {x.dtype}; expected float32, float16 or bfloat16 on a GPU; cast it")
    y = torch.empty(x.shape, dtype=choose_output_dtype(x.dtype, norm.weight.dtype), device=x.device)
    return y, torch.empty(math.prod(x.shape[:-1]), dtype=torch.float32, device=x.device)


def _fill(y: Tensor, x: Tensor, norm: Norm, statistics: Statistics, refills: bool) -> None:
    if x.numel() == 0:
        return
    with torch.cuda.device_of(x):
        _choose_rows(x, False, FORWARD_ROW_BYTES).forward(
            x_ptr=x.contiguous(),
            y_ptr=y,
            affine_ptr=None,
            counts_ptr=None,
            eps=norm.eps,
            REFILLS=refills,
            **_arguments_of_input(x, statistics),
            **_arguments_of_norm(x, norm),
        )


def _differentiate(
    grad_y: Tensor, source: Tensor, norm: Norm, x_dtype: torch.dtype, kept: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """grad_x and the sums, from `source`, which is y or x, and the launch arguments for what was kept beside it."""
    grad_x = torch.empty(source.shape, dtype=x_dtype, device=source.device)
    if source.numel() == 0:
        num_sums = 1 if norm.bias is None else 2
        return grad_x, torch.zeros(num_sums, source.size(-1), dtype=torch.float32, device=source.device)
    with torch.cuda.device_of(source):
        partial = _choose_rows(grad_x, kept["HAS_LOST"], BACKWARD_ROW_BYTES).backward(
            grad_y_ptr=grad_y.contiguous(),
            source_ptr=source,
            grad_x_ptr=grad_x,
            **kept,
            **_arguments_of_norm(source, norm),
        )
        return grad_x, partial.sum(1)


def _choose_rows(x: Tensor, has_lost: bool, limit: int) -> ModuleType:
    """The kernels for rows of x, whose dtype is the widest: a program's registers hold `limit` bytes of a row, or half
    of that where channels are lost."""
    is_long = x.size(-1) * x.element_size() * (2 if has_lost else 1) > limit
    return long_rows if is_long else whole_rows


def _arguments_of_output(y: Tensor, kept: Kept) -> dict[str, Any]:
    """The launch arguments for what is kept beside y."""
    capacity = kept.lost_xhat.size(1)
    return {
        "rstd_ptr": kept.rstd,
        "mean_ptr": None,
        "slots_ptr": kept.lost,
        "lost_xhat_ptr": kept.lost_xhat,
        "capacity": capacity,
        "HAS_LOST": capacity > 0,
        "FROM_INPUT": False,
        "SMALLEST": SMALLEST[y.dtype],
    }


def _arguments_of_input(x: Tensor, statistics: Statistics) -> dict[str, Any]:
    """The launch arguments for what is kept beside x."""
    return {
        "rstd_ptr": statistics.rstd,
        "mean_ptr": statistics.mean,
        "slots_ptr": None,
        "lost_xhat_ptr": None,
        "capacity": 0,
        "HAS_LOST": False,
        "FROM_INPUT": True,
        "SMALLEST": SMALLEST[x.dtype],
    }


def _arguments_of_norm(x: Tensor, norm: Norm) -> dict[str, Any]:
    """The launch arguments of every kernel; h in units of 8, so that the compiler knows it for a multiple."""
    hidden_size = x.size(-1)
    unit = 1 if hidden_size % 8 else 8
    return {
        "hidden_size": hidden_size,
        "num_rows": x.numel() // hidden_size,
        "column_units": hidden_size // unit,
        "weight_ptr": norm.weight.contiguous(),
        "bias_ptr": None if norm.bias is None else norm.bias.contiguous(),
        "UNIT": unit,
        "SUBTRACTS_MEAN": norm.subtracts_mean,
        "HAS_BIAS": norm.bias is not None,
        "ZERO_CENTERED": norm.zero_centered,
    }

"""Computes LayerNorm and RMSNorm on a GPU in Triton: chooses kernels and launches them; eager.py is the specification.

Rows up to FORWARD_ROW_BYTES and BACKWARD_ROW_BYTES stay in the registers of a program (kernel_whole_rows.py); longer
ones are read more than once (kernel_long_rows.py). The code that keeps lost channels takes registers, so it is compiled
in only where channels may be lost. reserve.py says when the host waits for the GPU, and why.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tempo_kernels.kernel_launch import Plan, cache_plans, guard_device
from tempo_kernels.kernel_numbers import check_dtype
from tempo_kernels.norm import kernel_long_rows as long_rows
from tempo_kernels.norm import kernel_whole_rows as whole_rows
from tempo_kernels.norm.kernel_lost_channels import SMALLEST, prepare_lost_channels
from tempo_kernels.norm.operands import Kept, Norm, Statistics, choose_output_dtype
from tempo_kernels.norm.reserve import check_after_backward

FORWARD_ROW_BYTES = 32768
BACKWARD_ROW_BYTES = 16384
_NONE_LOST = (None, None, None)
"""affine, slots and lost_xhat of a form that keeps its input."""


def forward(x: Tensor, norm: Norm, needs_grad: bool = True, keeps_lost: bool = True) -> tuple[Tensor, Kept]:
    """As in eager.py; `lost` holds each channel's slot, as kernel_lost_channels.py describes it.

    Without keeps_lost there is no room for lost channels; if there are any, backward raises.
    """
    y, rstd = _allocate(x, norm)
    if x.numel() == 0:
        affine = rstd.new_empty(1 if norm.bias is None else 2, x.size(-1))
        return y, Kept(rstd, affine, rstd.new_empty(0, dtype=torch.int32), y.new_empty(rstd.numel(), 0))
    with guard_device(x):
        lost = prepare_lost_channels(norm, y, needs_grad, keeps_lost)
    kept = Kept(rstd, lost.affine, lost.slots, _allocate_columns(rstd.numel(), lost.capacity, y.dtype, y.device))
    _launch_forward(x, norm, y, (rstd, None, *kept[1:], lost.counts), lost.capacity)
    return y, kept


def backward(
    grad_y: Tensor, y: Tensor, kept: Kept, subtracts_mean: bool, x_dtype: torch.dtype, sums_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As in eager.py; the order of the sums over rows is fixed, so the same GPU gives the same bits every time."""
    with guard_device(y):
        check_after_backward(y.device)
    # Kernels take gamma by its pointer, and affine begins with gamma.
    affine = kept.affine
    norm = Norm(affine, affine[1] if affine.size(0) == 2 else None, 0.0, subtracts_mean, zero_centered=False)
    return _differentiate(grad_y, y, norm, (x_dtype, sums_dtype), (kept.rstd, None), kept[2:])


def forward_from_input(x: Tensor, norm: Norm) -> tuple[Tensor, Statistics]:
    """As in eager.py."""
    y, rstd = _allocate(x, norm)
    statistics = Statistics(rstd, torch.empty_like(rstd) if norm.subtracts_mean else None)
    if x.numel():
        _launch_forward(x, norm, y, (*statistics, *_NONE_LOST, None), 0, from_input=True)
    return y, statistics


def refill(out: Tensor, x: Tensor, norm: Norm, statistics: Statistics) -> None:
    """As in eager.py."""
    if x.numel():
        _launch_forward(x, norm, out, (*statistics, *_NONE_LOST, None), 0, from_input=True, refills=True)


def backward_from_input(grad_y: Tensor, x: Tensor, norm: Norm, statistics: Statistics) -> tuple[Tensor, Tensor]:
    """As in eager.py."""
    return _differentiate(grad_y, x.contiguous(), norm, (x.dtype, norm.sums_dtype), statistics, None)


def _allocate(x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Allocates y and rstd; raises ValueError for a dtype that the kernels do not compute."""
    check_dtype("norm", x)
    dtype = choose_output_dtype(x.dtype, norm.weight.dtype)
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    rows = x.numel() // x.size(-1) if x.size(-1) else math.prod(x.shape[:-1])
    return y, torch.empty(rows, dtype=torch.float32, device=x.device)


def _allocate_columns(num_rows: int, capacity: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates lost_xhat [rows, capacity]; for the usual capacity of 0 it returns the same empty tensor every time."""
    if not capacity:
        return _hold_no_columns(num_rows, dtype, device)
    return torch.empty(num_rows, capacity, dtype=dtype, device=device)


@cache_plans
def _hold_no_columns(num_rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # training keeps this tensor for backward, too
        return torch.empty(num_rows, 0, dtype=dtype, device=device)


def _launch_forward(
    x: Tensor,
    norm: Norm,
    y: Tensor,
    kept: tuple[Tensor | None, ...],
    capacity: int,
    from_input: bool = False,
    refills: bool = False,
) -> None:
    """Fills y and what is kept: rstd, mean, affine, slots, lost_xhat and counts, None for those the form lacks."""
    weight, bias, eps, subtracts_mean, zero_centered = norm
    form = _Form(capacity, from_input, bias is not None, subtracts_mean, zero_centered)
    rows, plan = _plan_forward(x.shape, x.dtype, y.dtype, form, eps, refills)
    bias = None if bias is None else bias.contiguous()
    rows.launch_forward(plan, (x.contiguous(), weight.contiguous(), bias, y, *kept))


class _Form(NamedTuple):
    """The properties of a norm and of what it keeps that its launches depend on."""

    capacity: int
    from_input: bool
    has_bias: bool
    subtracts_mean: bool
    zero_centered: bool


@cache_plans
def _plan_forward(
    shape: torch.Size, x_dtype: torch.dtype, dtype: torch.dtype, form: _Form, eps: float, refills: bool
) -> tuple[ModuleType, Plan]:
    """Chooses the kernels for rows of this shape and plans their launch; dtype is y's."""
    rows = _choose_rows(shape[-1] * x_dtype.itemsize, form.capacity > 0, FORWARD_ROW_BYTES)
    return rows, rows.plan_forward(shape[-1], eps=eps, REFILLS=refills, **_list_arguments(shape, dtype, form))


def _differentiate(
    grad_y: Tensor,
    source: Tensor,
    norm: Norm,
    dtypes: tuple[torch.dtype, torch.dtype],
    statistics: tuple[Tensor, Tensor | None],
    lost: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Returns grad_x and the sums in these dtypes. `source` is y if `lost` (slots and columns) is given, else x."""
    grad_x = torch.empty_like(source, dtype=dtypes[0])
    sums_shape = (1 if norm.bias is None else 2, source.size(-1))
    if source.numel() == 0:
        return grad_x, source.new_zeros(sums_shape, dtype=dtypes[1])
    sums = torch.empty(*sums_shape, dtype=dtypes[1], device=source.device)
    weight, bias, _, subtracts_mean, zero_centered = norm
    capacity = 0 if lost is None else lost[1].size(1)
    form = _Form(capacity, lost is None, bias is not None, subtracts_mean, zero_centered)
    rows, plan = _plan_backward(source.shape, dtypes[0], source.dtype, source.device, form)
    bias = None if bias is None else bias.contiguous()
    tensors = (grad_y.contiguous(), source, *statistics, weight.contiguous(), bias, *(lost or _NONE_LOST[1:]))
    rows.launch_backward(plan, tensors, grad_x, sums)
    return grad_x, sums


@cache_plans
def _plan_backward(
    shape: torch.Size, x_dtype: torch.dtype, dtype: torch.dtype, device: torch.device, form: _Form
) -> tuple[ModuleType, Any]:
    """Plans backward; x_dtype is grad_x's dtype and dtype that of the source."""
    rows = _choose_rows(shape[-1] * x_dtype.itemsize, form.capacity > 0, BACKWARD_ROW_BYTES)
    return rows, rows.plan_backward(shape[-1], x_dtype.itemsize, device, **_list_arguments(shape, dtype, form))


def _choose_rows(row_bytes: int, has_lost: bool, limit: int) -> ModuleType:
    """Chooses kernels by the bytes of a row: a program's registers hold `limit`, or half of it with lost channels."""
    return long_rows if row_bytes * (2 if has_lost else 1) > limit else whole_rows


def _list_arguments(shape: torch.Size, dtype: torch.dtype, form: _Form) -> dict[str, Any]:
    """Lists the launch arguments of every kernel; h in units of 8 tells the compiler that rows are aligned."""
    hidden_size = shape[-1]
    unit = 1 if hidden_size % 8 else 8
    return {
        "num_rows": shape.numel() // hidden_size,
        "column_units": hidden_size // unit,
        "capacity": form.capacity,
        "UNIT": unit,
        "SUBTRACTS_MEAN": form.subtracts_mean,
        "HAS_BIAS": form.has_bias,
        "ZERO_CENTERED": form.zero_centered,
        "HAS_LOST": form.capacity > 0,
        "FROM_INPUT": form.from_input,
        "SMALLEST": SMALLEST[dtype],
    }

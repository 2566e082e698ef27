"""LayerNorm and RMSNorm on a GPU, in Triton; eager.py is the specification.

Rows up to FORWARD_ROW_BYTES and BACKWARD_ROW_BYTES stay in registers (kernel_whole_rows.py); longer ones are read more
than once (kernel_long_rows.py). When the host waits for the GPU, and why, is said in reserve.py. Only
where channels may be lost, kernels are compiled with the code that keeps them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tempo_kernels.norm import kernel_long_rows as long_rows
from tempo_kernels.norm import kernel_whole_rows as whole_rows
from tempo_kernels.norm.kernel_lost_channels import DTYPES, SMALLEST, find_lost
from tempo_kernels.norm.reserve import check_after_backward

FORWARD_ROW_BYTES = 32768
BACKWARD_ROW_BYTES = 16384


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    subtracts_mean: bool,
    zero_centered: bool,
    needs_grad: bool = True,
    keeps_lost: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y [..., h], rstd [rows] (float32), affine, slots and lost_xhat as kernel_lost_channels.py describes them.

    Without keeps_lost there is no room for lost channels; the backward of one that was needed raises.
    """
    _check(x)
    num_rows = math.prod(x.shape[:-1])
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        affine = rstd.new_empty(1 + (bias is not None), x.size(-1))
        return y, rstd, affine, rstd.new_empty(0, dtype=torch.int32), x.new_empty(num_rows, 0)
    with torch.cuda.device_of(x):
        slots, capacity, counts, affine = find_lost(x, weight, bias, zero_centered, needs_grad, keeps_lost)
        lost_xhat = torch.empty(num_rows, capacity, dtype=x.dtype, device=x.device)
        rows = long_rows if _is_long(x, capacity > 0, FORWARD_ROW_BYTES) else whole_rows
        rows.forward(
            x_ptr=x.contiguous(),
            y_ptr=y,
            affine_ptr=affine,
            counts_ptr=counts,
            eps=eps,
            REFILLS=False,
            SMALLEST=SMALLEST[x.dtype],
            **_from_output(rstd, slots, lost_xhat),
            **_shared(x, num_rows, weight, bias, subtracts_mean, zero_centered),
        )
    return y, rstd, affine, slots, lost_xhat


def backward(
    grad_y: Tensor,
    y: Tensor,
    rstd: Tensor,
    affine: Tensor,
    slots: Tensor,
    lost_xhat: Tensor,
    subtracts_mean: bool,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """grad_x [..., h] in y's dtype; grad_weight and, where there is a bias, grad_bias [h] in these dtypes.

    The sums over rows have two stages, each in a fixed order: the same bits every time on the same GPU.
    """
    kept, parameters = _from_output(rstd, slots, lost_xhat), (affine[0], None if bias_dtype is None else affine[1])
    with torch.cuda.device_of(y):
        check_after_backward(y.device)
    return _backward(grad_y, y, kept, *parameters, subtracts_mean, False, weight_dtype, bias_dtype)


def forward_from_input(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, subtracts_mean: bool, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """y [..., h], rstd [rows] and, where it is subtracted, mean [rows] (float32)."""
    _check(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(math.prod(x.shape[:-1]), dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if subtracts_mean else None
    _fill(y, x, rstd, mean, weight, bias, zero_centered, eps=eps, REFILLS=False)
    return y, rstd, mean


def refill(
    out: Tensor, x: Tensor, rstd: Tensor, mean: Tensor | None, weight: Tensor, bias: Tensor | None, zero_centered: bool
) -> None:
    """Writes y into `out` again, the same bits as forward_from_input, from what that kept."""
    _fill(out, x, rstd, mean, weight, bias, zero_centered, eps=0.0, REFILLS=True)


def backward_from_input(
    grad_y: Tensor,
    x: Tensor,
    rstd: Tensor,
    mean: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As backward, from what forward_from_input kept."""
    form = (mean is not None, zero_centered, weight.dtype, None if bias is None else bias.dtype)
    return _backward(grad_y, x.contiguous(), _from_input(rstd, mean), weight, bias, *form)


def _fill(
    y: Tensor,
    x: Tensor,
    rstd: Tensor,
    mean: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    zero_centered: bool,
    **mode: Any,
) -> None:
    if x.numel() == 0:
        return
    rows = long_rows if _is_long(x, False, FORWARD_ROW_BYTES) else whole_rows
    with torch.cuda.device_of(x):
        rows.forward(
            x_ptr=x.contiguous(),
            y_ptr=y,
            affine_ptr=None,
            counts_ptr=None,
            **mode,
            SMALLEST=SMALLEST[x.dtype],
            **_from_input(rstd, mean),
            **_shared(x, rstd.numel(), weight, bias, mean is not None, zero_centered),
        )


def _backward(
    grad_y: Tensor,
    source: Tensor,
    kept: dict[str, Any],
    weight: Tensor,
    bias: Tensor | None,
    subtracts_mean: bool,
    zero_centered: bool,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    grad_x = torch.empty(source.shape, dtype=source.dtype, device=source.device)
    if source.numel() == 0:
        grad_bias = None if bias_dtype is None else torch.zeros_like(weight, dtype=bias_dtype)
        return grad_x, torch.zeros_like(weight, dtype=weight_dtype), grad_bias
    rows = long_rows if _is_long(source, kept["HAS_LOST"], BACKWARD_ROW_BYTES) else whole_rows
    with torch.cuda.device_of(source):
        partial = rows.backward(
            grad_y_ptr=grad_y.contiguous(),
            source_ptr=source,
            grad_x_ptr=grad_x,
            SMALLEST=SMALLEST[source.dtype],
            **kept,
            **_shared(source, kept["rstd_ptr"].numel(), weight, bias, subtracts_mean, zero_centered),
        )
        sums = partial.sum(1)
    if bias_dtype is None:
        return grad_x, sums[0].to(weight_dtype), None
    if bias_dtype == weight_dtype:
        sums = sums.to(weight_dtype)  # one launch for both
    return grad_x, sums[0].to(weight_dtype), sums[1].to(bias_dtype)


def _is_long(x: Tensor, has_lost: bool, limit: int) -> bool:
    """Whether a row takes more registers than a program has; lost channels take some too."""
    return x.size(-1) * x.element_size() * (2 if has_lost else 1) > limit


def _from_output(rstd: Tensor, slots: Tensor, lost_xhat: Tensor) -> dict[str, Any]:
    """The launch arguments for what is kept beside y."""
    capacity = lost_xhat.size(1)
    return {
        "rstd_ptr": rstd,
        "mean_ptr": None,
        "slots_ptr": slots,
        "lost_xhat_ptr": lost_xhat,
        "capacity": capacity,
        "HAS_LOST": capacity > 0,
        "FROM_INPUT": False,
    }


def _from_input(rstd: Tensor, mean: Tensor | None) -> dict[str, Any]:
    """The launch arguments for what is kept beside x."""
    return {
        "rstd_ptr": rstd,
        "mean_ptr": mean,
        "slots_ptr": None,
        "lost_xhat_ptr": None,
        "capacity": 0,
        "HAS_LOST": False,
        "FROM_INPUT": True,
    }


def _shared(
    x: Tensor, num_rows: int, weight: Tensor, bias: Tensor | None, subtracts_mean: bool, zero_centered: bool
) -> dict[str, Any]:
    """The launch arguments of every kernel; h in units of 8, so that the compiler knows it for a multiple."""
    hidden_size = x.size(-1)
    unit = 1 if hidden_size % 8 else 8
    return {
        "hidden_size": hidden_size,
        "num_rows": num_rows,
        "column_units": hidden_size // unit,
        "weight_ptr": weight.contiguous(),
        "bias_ptr": None if bias is None else bias.contiguous(),
        "UNIT": unit,
        "SUBTRACTS_MEAN": subtracts_mean,
        "HAS_BIAS": bias is not None,
        "ZERO_CENTERED": zero_centered,
    }


def _check(x: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"norm: x is {x.dtype}; float32, float16 or bfloat16 is wanted on a GPU; cast it")

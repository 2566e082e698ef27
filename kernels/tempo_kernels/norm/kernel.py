"""Computes LayerNorm and RMSNorm on a GPU: allocates, plans and launches the kernels; eager.py is the specification.

The host never waits for the GPU, which decides in every forward what y does not carry (kernel_forward.py).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tempo_kernels.kernel_launch import guard_device
from tempo_kernels.kernel_numbers import check_dtype
from tempo_kernels.late_check import LateCheck
from tempo_kernels.norm.kernel_backward import launch_backward
from tempo_kernels.norm.kernel_forward import launch_forward
from tempo_kernels.norm.settings import Blocks, Kept, Norm, Statistics, allocate_kept, allocate_output, get_reserve_size

BLOCKS = Blocks()


def forward(
    x: Tensor, norm: Norm, needs_grad: bool = True, has_static_shapes: bool = False, blocks: Blocks = BLOCKS
) -> tuple[Tensor, Kept]:
    """As in eager.py, with a fixed number of columns; Kept says what `lost` holds."""
    check_dtype("norm", x)
    y, kept = allocate_kept(x, norm, get_reserve_size(x.size(-1)) if needs_grad else 0, torch.int32)
    lost = (kept.lost, kept.lost_xhat) if needs_grad else (None, None)
    found = (kept.affine, kept.lost) if needs_grad else ()
    launch_forward(x, norm, y, (kept.rstd, None, *lost), False, blocks, found)
    return y, kept


def backward(
    grad_y: Tensor, y: Tensor, kept: Kept, subtracts_mean: bool, x_dtype: torch.dtype, sums_dtype: torch.dtype,
    blocks: Blocks = BLOCKS, checks: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As in eager.py; the order of the sums over rows is fixed, so the same GPU gives the same bits every time.

    Raises: RuntimeError, with `checks`, once the host knows that lost channels had no column here or in an earlier one.
    """
    norm = Norm(kept.affine, None, 0.0, subtracts_mean, zero_centered=False)
    flag, check = _get_overflow(y.device)
    found = launch_backward(grad_y, y, norm, (kept.rstd, None), (x_dtype, sums_dtype), blocks, (*kept[2:], flag))
    if checks:
        with guard_device(flag):
            check.watch(flag)
    return found


def forward_from_input(x: Tensor, norm: Norm, blocks: Blocks = BLOCKS) -> tuple[Tensor, Statistics]:
    """As in eager.py."""
    check_dtype("norm", x)
    y, rstd = allocate_output(x, norm)
    statistics = Statistics(rstd, torch.empty_like(rstd) if norm.subtracts_mean else None)
    launch_forward(x, norm, y, (*statistics, None, None), False, blocks)
    return y, statistics


def refill(out: Tensor, x: Tensor, norm: Norm, statistics: Statistics, blocks: Blocks = BLOCKS) -> None:
    """As in eager.py."""
    launch_forward(x, norm, out, (*statistics, None, None), True, blocks)


def backward_from_input(
    grad_y: Tensor, x: Tensor, norm: Norm, statistics: Statistics, blocks: Blocks = BLOCKS
) -> tuple[Tensor, Tensor]:
    """As in eager.py."""
    dtypes = (x.dtype, norm.sums_dtype)
    return launch_backward(grad_y, x.contiguous(), norm, statistics, dtypes, blocks)


@functools.cache
def _get_overflow(device: torch.device) -> tuple[Tensor, LateCheck]:
    """Returns the flag that the backwards on a device set where norms lost more channels than they had columns for, and
    what tells the host of it."""
    with torch.inference_mode(False):  # training writes to its flag, too
        flag = torch.zeros((), dtype=torch.int32, device=device)
    return flag, LateCheck(
        "norm: the weights of more than a 64th of the channels are too small compared with their biases for the output "
        "to carry the normalised input, and gradients of a backward were NaN; use "
        'keep="recompute", in Megatron tempo.norm "recompute"'
    )

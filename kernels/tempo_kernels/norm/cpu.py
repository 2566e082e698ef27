"""The norms of eager.py, fast on a CPU, where the cost is passes over memory.

Work goes block by block of rows whose float32 copies stay in the cache, in place where memory is new. Tensors that are
worth it take cpu_compiled.py, whose passes are fewer; keep="input" never does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tempo_kernels.norm import cpu_compiled
from tempo_kernels.norm.lost_channels import list_lost_channels
from tempo_kernels.norm.operands import Kept, Norm, Statistics, choose_output_dtype, view_rows

BLOCK_ELEMENTS = 1 << 18


def forward(x: Tensor, norm: Norm, needs_grad: bool = True, keeps_lost: bool = True) -> tuple[Tensor, Kept]:
    """As in eager.py."""
    rows, affine = view_rows(x), norm.compute_affine(x.dtype)
    dtype = choose_output_dtype(x.dtype, norm.weight.dtype)
    lost = list_lost_channels(norm, dtype, needs_grad, keeps_lost)
    lost_xhat = torch.empty(rows.size(0), lost.numel(), dtype=dtype, device=x.device)
    if cpu_compiled.pays_for(rows):
        y_rows, statistics = cpu_compiled.forward(rows, affine, norm.eps)
        if lost.numel():
            lost_xhat = _normalize_by(rows[:, lost], statistics).to(dtype)
        return y_rows.to(dtype).view(x.shape), Kept(statistics.rstd, affine, lost, lost_xhat)
    y, statistics = _allocate(x, norm)
    for block, xhat in _fill_statistics(rows, norm, statistics):
        if lost.numel():
            lost_xhat[block] = xhat[:, lost].to(dtype)
        view_rows(y)[block] = _scale(xhat, affine)
    return y, Kept(statistics.rstd, affine, lost, lost_xhat)


def backward(
    grad_y: Tensor, y: Tensor, kept: Kept, subtracts_mean: bool, x_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As in eager.py."""
    rows, gamma = view_rows(y), kept.affine[0]
    inverse = gamma.index_fill(0, kept.lost, 1.0).reciprocal_()
    if cpu_compiled.pays_for(rows):
        grad_x, sums = cpu_compiled.backward(view_rows(grad_y), rows, kept, inverse, x_dtype)
        return grad_x.view(y.shape), sums

    def recover_xhat(block: slice) -> Tensor:
        has_bias = kept.affine.size(0) == 2
        xhat = rows[block].to(gamma.dtype, copy=not has_bias)
        if has_bias:
            xhat = xhat - kept.affine[1]
        xhat *= inverse
        if kept.lost.numel():
            xhat.index_copy_(1, kept.lost, kept.lost_xhat[block].to(gamma.dtype))
        return xhat

    return _differentiate(grad_y, recover_xhat, kept.rstd, kept.affine, subtracts_mean, x_dtype)


def forward_from_input(x: Tensor, norm: Norm) -> tuple[Tensor, Statistics]:
    """As in eager.py."""
    affine = norm.compute_affine(x.dtype)
    y, statistics = _allocate(x, norm)
    for block, xhat in _fill_statistics(view_rows(x), norm, statistics):
        view_rows(y)[block] = _scale(xhat, affine)
    return y, statistics


def refill(out: Tensor, x: Tensor, norm: Norm, statistics: Statistics) -> None:
    """As in eager.py."""
    rows, affine = view_rows(x), norm.compute_affine(x.dtype)
    for block in _blocks(rows):
        view_rows(out)[block] = _scale(_normalize_by(rows[block], statistics, block), affine)


def backward_from_input(grad_y: Tensor, x: Tensor, norm: Norm, statistics: Statistics) -> tuple[Tensor, Tensor]:
    """As in eager.py."""
    rows, affine = view_rows(x), norm.compute_affine(x.dtype)

    def recover_xhat(block: slice) -> Tensor:
        return _normalize_by(rows[block], statistics, block)

    return _differentiate(grad_y, recover_xhat, statistics.rstd, affine, norm.subtracts_mean, x.dtype)


def _allocate(x: Tensor, norm: Norm) -> tuple[Tensor, Statistics]:
    """Memory for y and for mean and rstd."""
    y = torch.empty(x.shape, dtype=choose_output_dtype(x.dtype, norm.weight.dtype), device=x.device)
    rstd = torch.empty(view_rows(x).size(0), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    return y, Statistics(rstd, torch.empty_like(rstd) if norm.subtracts_mean else None)


def _fill_statistics(rows: Tensor, norm: Norm, statistics: Statistics) -> Iterator[tuple[slice, Tensor]]:
    """(block, its xhat [rows, h] in new memory) for consecutive blocks, whose mean and rstd it fills in."""
    for block in _blocks(rows):
        xhat = rows[block].to(statistics.rstd.dtype, copy=True)
        if statistics.mean is not None:
            mean = xhat.mean(-1)
            statistics.mean[block] = mean
            xhat -= mean.unsqueeze(-1)
        rstd = xhat.square().mean(-1).add_(norm.eps).rsqrt_()
        statistics.rstd[block] = rstd
        xhat *= rstd.unsqueeze(-1)
        yield block, xhat


def _normalize_by(x: Tensor, statistics: Statistics, block: slice = slice(None)) -> Tensor:
    """xhat of these rows and any columns in new memory, the same bits as _fill_statistics gives."""
    rstd, mean = statistics
    xhat = x.to(rstd.dtype, copy=mean is None)
    if mean is not None:
        xhat = xhat - mean[block].unsqueeze(-1)
    xhat *= rstd[block].unsqueeze(-1)
    return xhat


def _scale(xhat: Tensor, affine: Tensor) -> Tensor:
    """gamma * xhat + beta, over xhat."""
    xhat *= affine[0]
    if affine.size(0) == 2:
        xhat += affine[1]
    return xhat


def _differentiate(
    grad_y: Tensor,
    recover_xhat: Callable[[slice], Tensor],
    rstd: Tensor,
    affine: Tensor,
    subtracts_mean: bool,
    x_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """As backward; recover_xhat gives the xhat of a block of rows, in new memory."""
    grad_x = torch.empty(grad_y.shape, dtype=x_dtype, device=grad_y.device)
    grad_rows, hidden_size = view_rows(grad_y), grad_y.size(-1)
    sums = torch.zeros_like(affine)
    for block in _blocks(grad_rows):
        xhat, grad = recover_xhat(block), grad_rows[block].to(rstd.dtype)
        product = grad * xhat
        sums[0] += product.sum(0)
        if sums.size(0) == 2:
            sums[1] += grad.sum(0)
        xhat *= product.mv(affine[0]).div_(hidden_size).unsqueeze(-1)
        grad = grad * affine[0]
        if subtracts_mean:
            xhat += grad.mean(-1, keepdim=True)
        grad -= xhat
        grad *= rstd[block].unsqueeze(-1)
        view_rows(grad_x)[block] = grad
    return grad_x, sums


def _blocks(rows: Tensor) -> list[slice]:
    """Slices of whole rows whose float32 copies stay in the cache."""
    step = max(1, BLOCK_ELEMENTS // max(1, rows.size(-1)))
    return [slice(start, min(start + step, rows.size(0))) for start in range(0, rows.size(0), step)]

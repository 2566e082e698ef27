"""Specifies LayerNorm and RMSNorm in plain torch, differentiated from their output or from their input.

    y = gamma * xhat + beta,  xhat = (x - mean) * rstd          (RMSNorm: mean = 0, beta = 0)
    grad_x = rstd * (g - mean(g) - xhat * mean(g * xhat)),  g = gamma * grad_y      (RMSNorm: without mean(g))
    grad_gamma = sum over rows of grad_y * xhat,  grad_beta = sum over rows of grad_y

gamma is weight, or 1 + weight if it is zero-centred; the 1 is added in float32, so that a 16-bit weight loses nothing.
From the output, xhat = (y - beta) / gamma, except for the channels of lost_channels.py, whose xhat is kept. Arithmetic
is float32 (float64 for a float64 x), with one rounding at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tempo_kernels.norm.lost_channels import list_lost_channels
from tempo_kernels.norm.operands import Kept, Norm, Statistics, choose_output_dtype, view_rows


def forward(x: Tensor, norm: Norm, needs_grad: bool = True, keeps_lost: bool = True) -> tuple[Tensor, Kept]:
    """Returns y [..., h] and what keep="output" keeps beside it; `lost` holds the indices of the lost channels here."""
    y, statistics = forward_from_input(x, norm)
    affine = norm.compute_affine(x.dtype)
    lost = list_lost_channels(norm, affine, y.dtype, needs_grad, keeps_lost)
    lost_xhat = _normalize(x, statistics)[:, lost].to(y.dtype)
    return y, Kept(statistics.rstd, affine, lost, lost_xhat)


def backward(
    grad_y: Tensor, y: Tensor, kept: Kept, subtracts_mean: bool, x_dtype: torch.dtype, sums_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns grad_x [..., h] in x_dtype, and grad_gamma and, with a beta, grad_beta: [1 or 2, h] in sums_dtype."""
    gamma, beta = kept.affine[0], kept.affine[1:].sum(0)
    xhat = (view_rows(y) - beta) / gamma
    xhat[:, kept.lost] = kept.lost_xhat.to(xhat.dtype)
    return _differentiate(grad_y, xhat, kept.rstd, kept.affine, subtracts_mean, x_dtype, sums_dtype)


def forward_from_input(x: Tensor, norm: Norm) -> tuple[Tensor, Statistics]:
    """Returns y [..., h] and what keep="input" keeps beside x."""
    rows = view_rows(x).to(torch.promote_types(x.dtype, torch.float32))
    mean = rows.mean(-1) if norm.subtracts_mean else None
    centred = rows if mean is None else rows - mean.unsqueeze(-1)
    statistics = Statistics((centred.square().mean(-1) + norm.eps).rsqrt(), mean)
    y = torch.empty(x.shape, dtype=choose_output_dtype(x.dtype, norm.weight.dtype), device=x.device)
    refill(y, x, norm, statistics)
    return y, statistics


def refill(out: Tensor, x: Tensor, norm: Norm, statistics: Statistics) -> None:
    """Writes y into `out` again from what forward_from_input kept, bit for bit."""
    affine = norm.compute_affine(x.dtype)
    view_rows(out).copy_(_normalize(x, statistics) * affine[0] + affine[1:].sum(0))


def backward_from_input(grad_y: Tensor, x: Tensor, norm: Norm, statistics: Statistics) -> tuple[Tensor, Tensor]:
    """As backward, from what forward_from_input kept; the sums are in norm.sums_dtype."""
    xhat, affine = _normalize(x, statistics), norm.compute_affine(x.dtype)
    return _differentiate(grad_y, xhat, statistics.rstd, affine, norm.subtracts_mean, x.dtype, norm.sums_dtype)


def _normalize(x: Tensor, statistics: Statistics) -> Tensor:
    """Computes xhat [rows, h]."""
    rows = view_rows(x).to(statistics.rstd.dtype)
    centred = rows if statistics.mean is None else rows - statistics.mean.unsqueeze(-1)
    return centred * statistics.rstd.unsqueeze(-1)


def _differentiate(
    grad_y: Tensor,
    xhat: Tensor,
    rstd: Tensor,
    affine: Tensor,
    subtracts_mean: bool,
    x_dtype: torch.dtype,
    sums_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    grad = view_rows(grad_y).to(rstd.dtype)
    sums = torch.stack([(grad * xhat).sum(0), grad.sum(0)][: affine.size(0)])
    g = grad * affine[0]
    grad_x = g - xhat * (g * xhat).mean(-1, keepdim=True)
    if subtracts_mean:
        grad_x -= g.mean(-1, keepdim=True)
    return (grad_x * rstd.unsqueeze(-1)).to(x_dtype).view(grad_y.shape), sums.to(sums_dtype)

"""LayerNorm and RMSNorm, differentiated from their output, in plain torch: the specification.

    y = gamma * xhat + beta,  xhat = (x - mean) * rstd          (RMSNorm: mean = 0, beta = 0)
    xhat = (y - beta) / gamma
    grad_x = rstd * (g - mean(g) - xhat * mean(g * xhat)),  g = gamma * grad_y      (RMSNorm: without mean(g))
    grad_gamma = sum over rows of grad_y * xhat,  grad_beta = sum over rows of grad_y

y carries xhat only where gamma is large enough beside beta: y's rounding error, relative to |beta| + |gamma xhat|, is
divided by |gamma|. Channels with |beta| > MAX_OFFSET * |gamma|, or whose gamma is close to the smallest normal number,
are kept as a narrow xhat of their own, so that the gradients are right for every gamma, zero included.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_OFFSET = 2.0
BLOCK_ELEMENTS = 1 << 18


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, subtracts_mean: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y [..., h], rstd [rows] (float32), and the channels [k] that y cannot carry with their xhat [rows, k]."""
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    hidden_size = x.size(-1)
    rows = x.reshape(-1, hidden_size)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows.size(0), dtype=compute_dtype, device=x.device)
    lost = lost_channels(weight, bias, x.dtype)
    lost_xhat = torch.empty(rows.size(0), lost.numel(), dtype=x.dtype, device=x.device)
    gamma = weight.to(compute_dtype)
    for block in _blocks(rows):
        xhat = rows[block].to(compute_dtype, copy=True)
        if subtracts_mean:
            xhat -= xhat.mean(-1, keepdim=True)
        block_rstd = xhat.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        xhat *= block_rstd
        rstd[block] = block_rstd.squeeze(-1)
        if lost.numel():
            lost_xhat[block] = xhat[:, lost].to(x.dtype)
        xhat *= gamma
        if bias is not None:
            xhat += bias
        y.view(-1, hidden_size)[block] = xhat
    return y, rstd, lost, lost_xhat


def backward(
    grad_y: Tensor,
    y: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lost: Tensor,
    lost_xhat: Tensor,
    subtracts_mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad_x [..., h] in y's dtype; grad_weight and grad_bias [h] in float32."""
    hidden_size = y.size(-1)
    y_rows, grad_rows = y.view(-1, hidden_size), grad_y.reshape(-1, hidden_size)
    grad_x = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    gamma = weight.to(rstd.dtype)
    grad_weight, grad_bias = torch.zeros_like(gamma), torch.zeros_like(gamma)
    inverse = gamma.index_fill(0, lost, 1.0).reciprocal_()
    for block in _blocks(y_rows):
        # [rows, h]
        xhat = y_rows[block].to(rstd.dtype, copy=bias is None)
        if bias is not None:
            xhat = xhat - bias
        xhat *= inverse
        if lost.numel():
            xhat.index_copy_(1, lost, lost_xhat[block].to(rstd.dtype))
        grad = grad_rows[block].to(rstd.dtype)
        product = grad * xhat
        grad_weight += product.sum(0)
        grad_bias += grad.sum(0)
        xhat *= product.mv(gamma).div_(hidden_size).unsqueeze(-1)
        grad = grad * gamma
        if subtracts_mean:
            xhat += grad.mean(-1, keepdim=True)
        grad -= xhat
        grad *= rstd[block].unsqueeze(-1)
        grad_x.view(-1, hidden_size)[block] = grad
    return grad_x, grad_weight, grad_bias


def lost_channels(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Indices of the channels whose xhat cannot be recovered from a y of `dtype`."""
    limits = torch.finfo(dtype)
    # float16 has gradual underflow everywhere; elsewhere stay clear of hardware that flushes subnormals to zero.
    smallest = limits.tiny if dtype == torch.float16 else limits.tiny / limits.eps
    magnitude = weight.detach().abs()
    lost = ~(magnitude > smallest)
    if bias is not None:
        lost |= bias.detach().abs() > MAX_OFFSET * magnitude
    return lost.nonzero().squeeze(-1)


def _blocks(rows: Tensor) -> list[slice]:
    """Slices of whole rows whose float32 copies stay in the cache."""
    step = max(1, BLOCK_ELEMENTS // max(1, rows.size(-1)))
    return [slice(start, min(start + step, rows.size(0))) for start in range(0, rows.size(0), step)]

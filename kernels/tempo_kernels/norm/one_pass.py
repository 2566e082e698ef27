"""The norms of eager.py over large tensors on a CPU: in one compiled pass, or by torch's own fused LayerNorm."""

from __future__ import annotations

import torch
from torch import Tensor

from tempo_kernels import compiled
from tempo_kernels.compiled import Compiled

MIN_ELEMENTS = (1 << 18) + 1
"""Elements of a tensor from which on the compiler, asked once, is worth its seconds."""


def pays_for(rows: Tensor) -> bool:
    """Whether rows [n, h] are many enough."""
    return compiled.pays_for(rows, MIN_ELEMENTS, *rows.shape)


def forward(x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float) -> tuple[Tensor, Tensor | None, Tensor]:
    """y [n, h] of x's dtype, mean (LayerNorm only) and rstd [n] in float32. gamma is float32; RMSNorm has no beta."""
    x = x.contiguous()  # strides would be compiled in
    if beta is None:
        y, rstd = _rms_norm(x, gamma, torch.tensor(eps, dtype=torch.float32, device=x.device))
        return y, None, rstd
    if x.dtype == torch.float32:
        y, mean, rstd = torch.native_layer_norm(x, x.shape[1:], gamma, beta.float(), eps)
        return y, mean.view(-1), rstd.view(-1)
    y, mean, rstd = _layer_norm(x, gamma, beta, torch.tensor(eps, dtype=torch.float32, device=x.device))
    return y, mean, rstd


def normalized(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    """xhat [n, k] in float32, of some columns of x."""
    centred = x.float() if mean is None else x.float() - mean.unsqueeze(-1)
    return centred * rstd.unsqueeze(-1)


def backward(
    grad_y: Tensor,
    y: Tensor,
    rstd: Tensor,
    gamma: Tensor,
    inverse: Tensor,
    beta: Tensor | None,
    lost: Tensor,
    lost_xhat: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad_x [n, h] of y's dtype, grad_gamma and grad_beta [h] in float32; inverse is 1 / gamma, 1 where lost."""
    grad_y = grad_y.contiguous()
    beta_or_0 = torch.zeros_like(gamma) if beta is None else beta
    if beta is None or y.dtype != torch.float32:
        xhat = _kept_in(_xhat(y, inverse, beta_or_0), lost, lost_xhat.float())
        grad_x = (_rms_norm_backward if beta is None else _layer_norm_backward)(grad_y, xhat, rstd, gamma)
        # torch adds rows up in pairs, which is more exact than one after the other as compiled.
        return grad_x, xhat.mul_(grad_y).sum(0), grad_y.sum(0, dtype=torch.float32)
    # torch's own backward, given an x that has the same xhat: of mean 0 and standard deviation 1 / rstd.
    x = _kept_in(_centred(y, inverse, beta, rstd), lost, lost_xhat / rstd.unsqueeze(-1))
    mean, shape = torch.zeros_like(rstd).unsqueeze(-1), x.shape[1:]
    return torch.ops.aten.native_layer_norm_backward(
        grad_y, x, shape, mean, rstd.unsqueeze(-1), gamma, beta.float(), [True] * 3
    )


def _kept_in(columns: Tensor, lost: Tensor, kept: Tensor) -> Tensor:
    """columns with the lost ones from what was kept."""
    return columns.index_copy_(1, lost, kept) if lost.numel() else columns


@Compiled
def _layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, eps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.float().mean(-1, keepdim=True)
    centred = x.float() - mean
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (centred * rstd * gamma + beta).to(x.dtype), mean.squeeze(-1), rstd.squeeze(-1)


@Compiled
def _rms_norm(x: Tensor, gamma: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    rstd = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x.float() * rstd * gamma).to(x.dtype), rstd.squeeze(-1)


@Compiled
def _xhat(y: Tensor, inverse: Tensor, beta: Tensor) -> Tensor:
    return (y.float() - beta) * inverse


@Compiled
def _centred(y: Tensor, inverse: Tensor, beta: Tensor, rstd: Tensor) -> Tensor:
    return (y.float() - beta) * inverse / rstd.unsqueeze(-1)


@Compiled
def _layer_norm_backward(grad_y: Tensor, xhat: Tensor, rstd: Tensor, gamma: Tensor) -> Tensor:
    scaled = grad_y.float() * gamma
    grad_x = scaled - scaled.mean(-1, keepdim=True) - xhat * (scaled * xhat).mean(-1, keepdim=True)
    return (grad_x * rstd.unsqueeze(-1)).to(grad_y.dtype)


@Compiled
def _rms_norm_backward(grad_y: Tensor, xhat: Tensor, rstd: Tensor, gamma: Tensor) -> Tensor:
    scaled = grad_y.float() * gamma
    return ((scaled - xhat * (scaled * xhat).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)).to(grad_y.dtype)

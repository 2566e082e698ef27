"""The norms over large tensors on a CPU: in one compiled pass, or by torch's own fused LayerNorm, which is as fast."""

from __future__ import annotations

import torch
from torch import Tensor

from tempo_kernels import compiled
from tempo_kernels.compiled import Compiled
from tempo_kernels.norm.operands import Kept, Statistics

MIN_ELEMENTS = (1 << 18) + 1
"""The size of a tensor for which one compilation, which takes seconds, is worth its time."""


def pays_for(rows: Tensor) -> bool:
    """Whether rows [n, h] are many enough."""
    return compiled.pays_for(rows, MIN_ELEMENTS, *rows.shape)


def forward(x: Tensor, affine: Tensor, eps: float) -> tuple[Tensor, Statistics]:
    """y [n, h] of x's dtype, and its mean (LayerNorm only) and rstd [n] in float32; an RMSNorm has no beta."""
    x = x.contiguous()  # strides would be compiled in
    gamma, has_beta = affine[0], affine.size(0) == 2
    if has_beta and x.dtype == torch.float32:
        y, mean, rstd = torch.native_layer_norm(x, x.shape[1:], gamma, affine[1], eps)
        return y, Statistics(rstd.view(-1), mean.view(-1))
    eps_tensor = torch.tensor(eps, dtype=torch.float32, device=x.device)
    if has_beta:
        y, mean, rstd = _layer_norm(x, gamma, affine[1], eps_tensor)
        return y, Statistics(rstd, mean)
    y, rstd = _rms_norm(x, gamma, eps_tensor)
    return y, Statistics(rstd, None)


def backward(grad_y: Tensor, y: Tensor, kept: Kept, inverse: Tensor, x_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """grad_x [n, h] of x's dtype, and the sums [2 or 1, h] in float32; inverse is 1 / gamma, 1 where lost."""
    # In x's dtype from the start, which is y's or, for a 16-bit y of a float32 x, float32: exact.
    grad_y = grad_y.contiguous().to(x_dtype)
    gamma, has_beta = kept.affine[0], kept.affine.size(0) == 2
    if not has_beta or x_dtype != torch.float32:
        beta = kept.affine[1] if has_beta else torch.zeros_like(gamma)
        xhat = _restore(_recover_xhat(y, inverse, beta), kept.lost, kept.lost_xhat.float())
        grad_x = (_layer_norm_backward if has_beta else _rms_norm_backward)(grad_y, xhat, kept.rstd, gamma)
        # torch adds rows up in pairs, which is more exact than one after the other as compiled.
        sums = [xhat.mul_(grad_y).sum(0)]
        if has_beta:
            sums.append(grad_y.sum(0, dtype=torch.float32))
        return grad_x, torch.stack(sums)
    # torch's own backward, given an x that has the same xhat: of mean 0 and standard deviation 1 / rstd.
    rstd = kept.rstd.unsqueeze(-1)
    x = _restore(_recover_centred(y, inverse, kept.affine[1], kept.rstd), kept.lost, kept.lost_xhat / rstd)
    grad_x, *sums = torch.ops.aten.native_layer_norm_backward(
        grad_y, x, x.shape[1:], torch.zeros_like(rstd), rstd, gamma, kept.affine[1], [True] * 3
    )
    return grad_x, torch.stack(sums)


def _restore(columns: Tensor, lost: Tensor, kept: Tensor) -> Tensor:
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
def _recover_xhat(y: Tensor, inverse: Tensor, beta: Tensor) -> Tensor:
    return (y.float() - beta) * inverse


@Compiled
def _recover_centred(y: Tensor, inverse: Tensor, beta: Tensor, rstd: Tensor) -> Tensor:
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

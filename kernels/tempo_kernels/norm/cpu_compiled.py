"""The norms over large tensors on a CPU in passes that Inductor compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from tempo_kernels import compiled
from tempo_kernels.compiled import Compiled
from tempo_kernels.norm.operands import Statistics

MIN_ELEMENTS = 1 << 18
"""The size of a tensor for which one compilation, which takes seconds, is worth its time."""

_GROUP = 16
"""Rows that one pass adds up one after the other; torch adds the groups' sums up in pairs."""


def pays_for(rows: Tensor) -> bool:
    """Whether rows [n, h] are many enough."""
    return compiled.pays_for(rows, MIN_ELEMENTS, *rows.shape)


def pays_for_backward(rows: Tensor) -> bool:
    """Whether rows [n, h] are many enough, in whole groups, and more than one of these."""
    return rows.size(0) % _GROUP == 0 and pays_for(rows) and rows.size(0) > _GROUP


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Statistics]:
    """y [n, h] of x's dtype, and rstd [n] in float32."""
    # Strides would be compiled in.
    y, rstd = _rms_norm(x.contiguous(), gamma, torch.tensor(eps, dtype=torch.float32, device=x.device))
    return y, Statistics(rstd, None)


def layer_norm_backward(grad_y: Tensor, y: Tensor, affine: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """grad_x [n, h] of grad_y's dtype, and the sums [2, h] in float32."""
    gamma, beta = affine
    grad_x, sums = _layer_norm_backward(grad_y.contiguous(), y.contiguous(), beta, gamma.reciprocal(), rstd, gamma)
    return grad_x, sums.sum(0)


def layer_norm_backward_from_input(
    grad_y: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, gamma: Tensor
) -> tuple[Tensor, Tensor]:
    """As layer_norm_backward."""
    operands = (mean.unsqueeze(-1), rstd.unsqueeze(-1), rstd, gamma)
    grad_x, sums = _layer_norm_backward_from_input(grad_y.contiguous(), x.contiguous(), *operands)
    return grad_x, sums.sum(0)


def rms_norm_backward(grad_y: Tensor, y: Tensor, affine: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """As layer_norm_backward; the sum [1, h]."""
    gamma = affine[0]
    grad_x, sums = _rms_norm_backward(grad_y.contiguous(), y.contiguous(), gamma.reciprocal(), rstd, gamma)
    return grad_x, sums.sum(0)


@Compiled
def _rms_norm(x: Tensor, gamma: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    rstd = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x.float() * rstd * gamma).to(x.dtype), rstd.squeeze(-1)


def _differentiate_layer_norm(
    grad_y: Tensor, values: Tensor, shift: Tensor, factor: Tensor, rstd: Tensor, gamma: Tensor
) -> tuple[Tensor, Tensor]:
    """xhat is (values - shift) * factor, from the output as from the input."""
    grad, xhat = grad_y.float(), (values.float() - shift) * factor
    scaled = grad * gamma
    grad_x = scaled - scaled.mean(-1, keepdim=True) - xhat * (scaled * xhat).mean(-1, keepdim=True)
    sums = [t.view(-1, _GROUP, t.size(1)).sum(1) for t in (grad * xhat, grad)]
    return (grad_x * rstd.unsqueeze(-1)).to(grad_y.dtype), torch.stack(sums, 1)


# Two, since torch compiles one for a limited number of dtypes and shapes.
_layer_norm_backward, _layer_norm_backward_from_input = (Compiled(_differentiate_layer_norm) for _ in range(2))


@Compiled
def _rms_norm_backward(
    grad_y: Tensor, y: Tensor, inverse: Tensor, rstd: Tensor, gamma: Tensor
) -> tuple[Tensor, Tensor]:
    grad, xhat = grad_y.float(), y.float() * inverse
    scaled = grad * gamma
    grad_x = scaled - xhat * (scaled * xhat).mean(-1, keepdim=True)
    sums = (grad * xhat).view(-1, _GROUP, grad.size(1)).sum(1, keepdim=True)
    return (grad_x * rstd.unsqueeze(-1)).to(grad_y.dtype), sums

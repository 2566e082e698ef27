"""Computes the norms of large tensors on a CPU in passes that Inductor compiles."""

from __future__ import annotations

import torch
from torch import Tensor

from tempo_kernels import compiled
from tempo_kernels.compiled import Compiled, split_columns
from tempo_kernels.norm.operands import Statistics

MIN_ELEMENTS = 1 << 18
"""The size of a tensor for which one compilation, which takes seconds, is worth its time."""

_GROUP = 16
"""Rows that one pass adds up one after the other; torch adds the groups' sums up in pairs."""


def pays_for(rows: Tensor) -> bool:
    """Whether rows [n, h] are large enough to compile forward for."""
    return compiled.pays_for(rows, MIN_ELEMENTS, *rows.shape)


def pays_for_backward(rows: Tensor) -> bool:
    """Whether rows [n, h] are large enough to compile backward for, and n is a multiple of at least two groups."""
    return rows.size(0) % _GROUP == 0 and pays_for(rows) and rows.size(0) > _GROUP


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Statistics]:
    """Returns y [n, h] in x's dtype, and rstd [n] in float32."""
    # contiguous: Dynamo would compile strides in.
    operands = (*_split(x.contiguous(), gamma), torch.tensor([eps], dtype=torch.float32, device=x.device))
    y, rstd = _rms_norm(*operands)
    return y.view(x.shape), Statistics(rstd, None)


def layer_norm_backward(grad_y: Tensor, y: Tensor, affine: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Returns grad_x [n, h] in grad_y's dtype, and the sums [2, h] in float32."""
    gamma, beta = affine
    grad_y, y, gamma, beta, factor = _split(grad_y.contiguous(), y.contiguous(), gamma, beta, gamma.reciprocal())
    return _join(*_layer_norm_backward(grad_y, y, beta, factor, rstd.view(-1, 1, 1), gamma))


def layer_norm_backward_from_input(
    grad_y: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, gamma: Tensor
) -> tuple[Tensor, Tensor]:
    """As layer_norm_backward."""
    grad_y, x, gamma = _split(grad_y.contiguous(), x.contiguous(), gamma)
    mean, rstd = (t.view(-1, 1, 1) for t in (mean, rstd))
    return _join(*_layer_norm_backward_from_input(grad_y, x, mean, rstd, rstd, gamma))


def rms_norm_backward(grad_y: Tensor, y: Tensor, affine: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """As layer_norm_backward, with one sum [1, h]."""
    grad_y, y, gamma, factor = _split(grad_y.contiguous(), y.contiguous(), affine[0], affine[0].reciprocal())
    return _join(*_rms_norm_backward(grad_y, y, factor, rstd.view(-1, 1, 1), gamma))


def rms_norm_backward_from_input(grad_y: Tensor, x: Tensor, rstd: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """As rms_norm_backward."""
    grad_y, x, gamma = _split(grad_y.contiguous(), x.contiguous(), gamma)
    rstd = rstd.view(-1, 1, 1)
    return _join(*_rms_norm_backward_from_input(grad_y, x, rstd, rstd, gamma))


def _split(*tensors: Tensor) -> list[Tensor]:
    """Views [..., h] as [..., groups, lanes]."""
    return split_columns(tensors[0].size(-1), *tensors)


def _join(grad_x: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Returns grad_x as [n, h], and sums [groups of rows, k, h] added up over the groups."""
    return grad_x.flatten(1), sums.sum(0).flatten(1)


def _normalize_rms(x: Tensor, gamma: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    rstd = (x.float().square().mean((-2, -1), keepdim=True) + eps).rsqrt()
    return (x.float() * rstd * gamma).to(x.dtype), rstd.flatten()


def _differentiate_layer_norm(
    grad_y: Tensor, values: Tensor, shift: Tensor, factor: Tensor, rstd: Tensor, gamma: Tensor
) -> tuple[Tensor, Tensor]:
    """Differentiates with xhat = (values - shift) * factor, where values are the output or the input."""
    grad, xhat = grad_y.float(), (values.float() - shift) * factor
    scaled = grad * gamma
    slope = (scaled * xhat).mean((-2, -1), keepdim=True)
    grad_x = scaled - scaled.mean((-2, -1), keepdim=True) - xhat * slope
    return (grad_x * rstd).to(grad_y.dtype), torch.stack([_sum_groups(grad * xhat), _sum_groups(grad)], 1)


def _differentiate_rms_norm(
    grad_y: Tensor, values: Tensor, factor: Tensor, rstd: Tensor, gamma: Tensor
) -> tuple[Tensor, Tensor]:
    """Differentiates with xhat = values * factor."""
    grad, xhat = grad_y.float(), values.float() * factor
    scaled = grad * gamma
    grad_x = scaled - xhat * (scaled * xhat).mean((-2, -1), keepdim=True)
    return (grad_x * rstd).to(grad_y.dtype), _sum_groups(grad * xhat).unsqueeze(1)


def _sum_groups(t: Tensor) -> Tensor:
    return t.view(-1, _GROUP, *t.shape[1:]).sum(1)


_rms_norm = Compiled(_normalize_rms, has_lanes=True)
# Separate objects for output and input: torch compiles each for a limited number of dtypes and shapes.
_layer_norm_backward, _layer_norm_backward_from_input = (
    Compiled(_differentiate_layer_norm, has_lanes=True) for _ in range(2)
)
_rms_norm_backward, _rms_norm_backward_from_input = (
    Compiled(_differentiate_rms_norm, has_lanes=True) for _ in range(2)
)

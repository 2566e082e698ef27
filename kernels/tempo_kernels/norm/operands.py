"""Holds what the norms' backends exchange: a norm with its parameters, and what each form keeps for backward."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Norm(NamedTuple):
    """One LayerNorm or RMSNorm."""

    weight: Tensor
    """[h]; gamma is 1 + weight where it is zero-centred."""
    bias: Tensor | None
    """[h]; an RMSNorm has none."""
    eps: float
    subtracts_mean: bool
    zero_centered: bool

    @property
    def sums_dtype(self) -> torch.dtype:
        """The dtype to which the gradients of weight and bias are rounded together: the wider of the two."""
        weight, bias = self.weight.dtype, (self.weight if self.bias is None else self.bias).dtype
        return bias if bias.itemsize > weight.itemsize else weight

    def compute_affine(self, x_dtype: torch.dtype) -> Tensor:
        """Returns gamma and, if there is a bias, beta, [1 or 2, h] in the dtype of a norm's arithmetic on x_dtype."""
        gamma = compute_gamma(self.weight, x_dtype, self.zero_centered)
        return torch.stack([gamma] if self.bias is None else [gamma, self.bias.to(gamma.dtype)])


class Kept(NamedTuple):
    """What keep="output" keeps beside y; each backend has its own form of `lost` and `lost_xhat`."""

    rstd: Tensor
    """[rows], of the dtype that the norm computes in."""
    affine: Tensor
    """gamma and beta as forward used them, [2 or 1, h]: the parameters may have changed since."""
    lost: Tensor
    """Which channels y cannot carry."""
    lost_xhat: Tensor
    """Their normalised x, [rows, number of columns], of y's dtype."""


class Statistics(NamedTuple):
    """What keep="input" keeps beside x, [rows] each; an RMSNorm has no mean."""

    rstd: Tensor
    mean: Tensor | None


def compute_gamma(weight: Tensor, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    """Returns gamma, of weight's shape, in the dtype of a norm's arithmetic on `dtype`; maybe weight itself."""
    gamma = weight.to(torch.promote_types(dtype, torch.float32))
    return gamma + 1.0 if zero_centered else gamma


def choose_output_dtype(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> torch.dtype:
    """Returns x's dtype, or for a float32 x (a float32 residual) weight's, which the linear that follows has."""
    return weight_dtype if x_dtype == torch.float32 else x_dtype


def view_rows(x: Tensor) -> Tensor:
    """Returns x as [rows, h], a view if x is contiguous."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.size(-1))

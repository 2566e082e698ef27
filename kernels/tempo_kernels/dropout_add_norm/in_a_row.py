"""Bias, dropout and residual addition, then the norm: two rooms in a row, by any of their backends.

residual_out = residual + keep * (x + bias) / (1 - p),  y = norm(residual_out)
grad_residual = grad_residual_out + the norm's gradient,  grad_x = keep * grad_residual / (1 - p)
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from tempo_kernels.dropout_add import Draw


class InARow:
    """forward and backward made of those of `dropout_add` and `norm`, each that room's eager.py or kernel.py."""

    def __init__(self, dropout_add: ModuleType, norm: ModuleType) -> None:
        self.dropout_add, self.norm = dropout_add, norm

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        weight: Tensor,
        norm_bias: Tensor | None,
        eps: float,
        subtracts_mean: bool,
        zero_centered: bool,
        draw: Draw,
        needs_grad: bool = True,
    ) -> tuple[Tensor, ...]:
        """residual_out and y [s, b, h], and what the norm keeps beside y."""
        residual_out = self.dropout_add.forward(x, bias, residual, *draw)
        form = (eps, subtracts_mean, zero_centered, needs_grad)
        return residual_out, *self.norm.forward(residual_out, weight, norm_bias, *form)

    def backward(
        self,
        grad_residual_out: Tensor | None,
        grad_y: Tensor | None,
        y: Tensor,
        rstd: Tensor,
        affine: Tensor,
        lost: Tensor,
        lost_xhat: Tensor,
        draw: Draw,
        bias_dtype: torch.dtype | None,
        weight_dtype: torch.dtype,
        norm_bias_dtype: torch.dtype | None,
    ) -> tuple[Tensor | None, ...]:
        """The gradients of x, bias (in bias_dtype, where that is given), residual, weight and norm_bias.

        affine, lost and lost_xhat are as the norm kept them; without a norm_bias_dtype it is RMSNorm.
        One of grad_residual_out and grad_y may be None: that output was not used.
        """
        grad_residual, grad_weight, grad_norm_bias = grad_residual_out, None, None
        if grad_y is not None:
            grad_residual, grad_weight, grad_norm_bias = self.norm.backward(
                grad_y, y, rstd, affine, lost, lost_xhat, norm_bias_dtype is not None, weight_dtype, norm_bias_dtype
            )
            if grad_residual_out is not None:
                grad_residual += grad_residual_out
        grad_x, grad_bias = self.dropout_add.backward(grad_residual, *draw, bias_dtype is not None)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias_dtype)
        return grad_x, grad_bias, grad_residual, grad_weight, grad_norm_bias

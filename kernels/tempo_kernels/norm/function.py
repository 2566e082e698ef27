"""layer_norm and rms_norm: checks and the autograd.Function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tempo_kernels.norm import eager


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, *, zero_centered: bool = False) -> Tensor:
    """LayerNorm over the last dimension: (x - mean) / sqrt(var + eps) * weight + bias.

    Args:
        x: [..., h], floating point, any strides.
        weight, bias: [h], of x's dtype or float32.
        eps: added to the variance.
        zero_centered: use 1 + weight in weight's place (Megatron's `layernorm_zero_centered_gamma`).

    Returns:
        y [..., h] of x's dtype, contiguous.

    Keeps for backward: y itself (one storage with what the next linear keeps, hence free), rstd (4 bytes per row),
        and, for channels where weight is too small beside bias for y to carry the normalised x, that one column of
        it (x's dtype; on a GPU their number is rounded up to a multiple of eight). weight and bias are parameters.
    Error: at most twice torch's own in the same dtype plus one ulp of the largest exact value, for any weight and bias.
    Raises: ValueError for shapes or dtypes that do not fit; RuntimeError on a second derivative.
    """
    _check(x, weight, bias)
    return _Norm.apply(x, weight, bias, eps, zero_centered, True)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5, *, zero_centered: bool = False) -> Tensor:
    """RMSNorm over the last dimension: x / sqrt(mean(x**2) + eps) * weight. See `layer_norm` for all else."""
    _check(x, weight, None)
    return _Norm.apply(x, weight, None, eps, zero_centered, False)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dim() < 1 or not x.is_floating_point():
        raise ValueError(f"x is {x.dtype} of shape {list(x.shape)}; a floating-point [..., h] tensor is wanted")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if parameter.shape != x.shape[-1:]:
            raise ValueError(
                f"{name} has shape {list(parameter.shape)}; [{x.size(-1)}] is wanted, as x's last dimension"
            )
        if parameter.dtype not in (x.dtype, torch.float32):
            raise ValueError(f"{name} is {parameter.dtype}; {x.dtype} (as x) or torch.float32 is wanted")


def _backend(x: Tensor) -> Any:
    if x.is_cuda:
        from tempo_kernels.norm import kernel  # needs triton

        return kernel
    return eager


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        zero_centered: bool,
        subtracts_mean: bool,
    ) -> Tensor:
        gamma = weight + 1 if zero_centered else weight
        y, rstd, lost, lost_xhat = _backend(x).forward(x, gamma, bias, eps, subtracts_mean)
        ctx.save_for_backward(y, rstd, weight, bias, lost, lost_xhat)
        ctx.zero_centered, ctx.subtracts_mean = zero_centered, subtracts_mean
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        y, rstd, weight, bias, lost, lost_xhat = ctx.saved_tensors
        gamma = weight + 1 if ctx.zero_centered else weight
        grad_x, grad_weight, grad_bias = _backend(y).backward(
            grad_y, y, rstd, gamma, bias, lost, lost_xhat, ctx.subtracts_mean
        )
        return (
            grad_x if ctx.needs_input_grad[0] else None,
            grad_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            None if bias is None else grad_bias.to(bias.dtype),
            *[None] * 3,
        )

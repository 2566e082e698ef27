"""layer_norm and rms_norm: checks and the autograd.Functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tempo_kernels.norm import eager


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered: bool = False,
    keep: str = "output",
) -> Tensor:
    """LayerNorm over the last dimension: (x - mean) / sqrt(var + eps) * weight + bias.

    Args:
        x: [..., h], floating point, any strides.
        weight, bias: [h], of x's dtype or float32.
        eps: added to the variance.
        zero_centered: use 1 + weight in weight's place (Megatron's `layernorm_zero_centered_gamma`), added in float32
            as Transformer Engine does; Megatron's own `weight + 1` rounds the sum to weight's dtype.
        keep: "output" or "input".

    Returns:
        y [..., h] of x's dtype, contiguous.

    Keeps for backward: rstd (4 bytes per row) and, with keep="output", y itself (one storage with what the next linear
        keeps, hence free) and, for channels where weight is too small beside bias for y to carry the normalised x,
        that one column of it (x's dtype; on a GPU an eighth more than may soon be needed, in multiples of eight).
        With keep="input" instead x and the mean (4 bytes per row). weight and bias are parameters.
    Error: at most twice torch's own in the same dtype plus one ulp of the largest exact value, for any weight and bias.
        On a GPU, after parameters were replaced and not recounted (see `recount`), a few calls may do worse, and a
        RuntimeWarning says so.
    Raises: ValueError for shapes or dtypes that do not fit; RuntimeError on a second derivative, and where a CUDA graph
        is captured with keep="output" before the first ordinary call.
    """
    _check(x, weight, bias, keep)
    return _FUNCTIONS[keep].apply(x, weight, bias, eps, zero_centered, True)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-5, *, zero_centered: bool = False, keep: str = "output"
) -> Tensor:
    """RMSNorm over the last dimension: x / sqrt(mean(x**2) + eps) * weight. See `layer_norm` for all else."""
    _check(x, weight, None, keep)
    return _FUNCTIONS[keep].apply(x, weight, None, eps, zero_centered, False)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, keep: str) -> None:
    if keep not in _FUNCTIONS:
        raise ValueError(f'keep is "{keep}"; "output" or "input" is wanted')
    if x.dim() < 1 or not x.is_floating_point():
        raise ValueError(
            f"x is {x.dtype} of shape {list(x.shape)}; a floating-point [..., h] tensor is wanted; cast it"
        )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if parameter.shape != x.shape[-1:]:
            raise ValueError(
                f"{name} has shape {list(parameter.shape)}; [{x.size(-1)}] is wanted, as x's last dimension; reshape it"
            )
        if parameter.dtype not in (x.dtype, torch.float32):
            raise ValueError(f"{name} is {parameter.dtype}; x's {x.dtype} or torch.float32 is wanted; cast it")


def _backend(x: Tensor) -> Any:
    if x.is_cuda:
        from tempo_kernels.norm import kernel  # needs triton

        return kernel
    return eager


class _FromOutput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool, subtracts_mean: bool
    ) -> Tensor:
        y, rstd, lost, lost_xhat = _backend(x).forward(x, weight, bias, eps, subtracts_mean, zero_centered)
        ctx.save_for_backward(y, rstd, weight, bias, lost, lost_xhat)
        ctx.form = (subtracts_mean, zero_centered)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        y, rstd, weight, bias, lost, lost_xhat = ctx.saved_tensors
        grads = _backend(y).backward(grad_y, y, rstd, weight, bias, lost, lost_xhat, *ctx.form)
        return (*_needed(ctx, grads), None, None, None)


class _FromInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool, subtracts_mean: bool
    ) -> Tensor:
        y, rstd, mean = _backend(x).forward_from_input(x, weight, bias, eps, subtracts_mean, zero_centered)
        ctx.save_for_backward(x, rstd, mean, weight, bias)
        ctx.zero_centered, ctx.refill = zero_centered, _refill
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, mean, weight, bias = ctx.saved_tensors
        grads = _backend(x).backward_from_input(grad_y, x, rstd, mean, weight, bias, ctx.zero_centered)
        return (*_needed(ctx, grads), None, None, None)


_FUNCTIONS = {"output": _FromOutput, "input": _FromInput}


def _refill(ctx: Any, out: Tensor) -> None:
    """Writes y into `out` again, bit for bit."""
    x, rstd, mean, weight, bias = ctx.saved_tensors
    with torch.no_grad():
        _backend(x).refill(out, x, rstd, mean, weight, bias, ctx.zero_centered)


def _needed(ctx: Any, grads: tuple[Tensor, Tensor, Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False))

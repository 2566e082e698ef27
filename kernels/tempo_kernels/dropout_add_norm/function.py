"""bias_dropout_add_layer_norm and bias_dropout_add_rms_norm: checks and the autograd.Function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tempo_kernels.derivative import first_derivative_only
from tempo_kernels.dropout_add import Draw
from tempo_kernels.dropout_add_norm import eager


def bias_dropout_add_layer_norm(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor,
    eps: float = 1e-5,
    *,
    p: float,
    key: int | Tensor,
    first_sample: int | Tensor = 0,
    first_row: int = 0,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """residual + dropout(x + bias), and the LayerNorm of that, in one pass over memory.

    Args:
        x: [s, b, h], floating point, any strides.
        bias: [h] or None.
        residual: [s, b, h] of x's dtype.
        weight, norm_bias: [h], of x's dtype or float32: the norm's own.
        eps: added to the variance.
        p, key, first_sample, first_row: the mask; see `tempo_kernels.dropout_add.bias_dropout_add`.
        zero_centered: use 1 + weight in weight's place.

    Returns:
        residual_out [s, b, h]: what `bias_dropout_add` returns, rounded to x's dtype.
        y [s, b, h]: what `tempo_kernels.norm.layer_norm` returns for that residual_out.
        Both are new memory of x's dtype. On a CPU each is that function's result bit for bit; on a GPU residual_out
        is, and y may differ where sums over a row are added up in another order.

    Keeps for backward: what those two keep: y itself (one storage with what the next linear keeps, hence free), rstd
        (4 bytes per row), the norm's gamma and beta of this call (8 bytes per channel; RMSNorm 4), one column for each
        channel that y cannot carry, and the numbers of the mask.
    Error: that of `bias_dropout_add` and `layer_norm` with keep="output" in a row.
    Raises: ValueError for shapes, dtypes, devices or a probability that do not fit; RuntimeError on a second
        derivative, and as those two functions do.

    On a GPU rows longer than 8192 (in backward 4096) take more registers than there are: there the two operations run
    in a row.
    """
    return _apply(x, bias, residual, weight, norm_bias, eps, zero_centered, Draw(p, key, first_sample, first_row))


def bias_dropout_add_rms_norm(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    p: float,
    key: int | Tensor,
    first_sample: int | Tensor = 0,
    first_row: int = 0,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """residual + dropout(x + bias), and the RMSNorm of that. See `bias_dropout_add_layer_norm` for all else."""
    return _apply(x, bias, residual, weight, None, eps, zero_centered, Draw(p, key, first_sample, first_row))


def _apply(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    zero_centered: bool,
    draw: Draw,
) -> tuple[Tensor, Tensor]:
    draw.check(x, bias, residual)
    for name, parameter in (("weight", weight), ("norm_bias", norm_bias)):
        if parameter is None:
            continue
        if parameter.shape != x.shape[-1:]:
            raise ValueError(
                f"{name} has shape {list(parameter.shape)}; [{x.size(-1)}] is expected, as x's last dimension"
            )
        if parameter.dtype not in (x.dtype, torch.float32):
            raise ValueError(f"{name} is {parameter.dtype}; {x.dtype} (as x) or torch.float32 is expected")
    tensors = (x, bias, residual, weight, norm_bias)
    # What forward sees of its inputs does not tell whether gradients are on.
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return _BiasDropoutAddNorm.apply(*tensors, eps, zero_centered, draw, needs_grad)


def _backend(x: Tensor) -> Any:
    if x.is_cuda and not eager.has_no_data(x):
        from tempo_kernels.dropout_add_norm import kernel  # needs triton

        return kernel
    return eager


class _BiasDropoutAddNorm(torch.autograd.Function):
    """Without a norm_bias it is RMSNorm."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        weight: Tensor,
        norm_bias: Tensor | None,
        eps: float,
        zero_centered: bool,
        draw: Draw,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        form = (norm_bias is not None, zero_centered)
        outputs = _backend(x).forward(x, bias, residual, weight, norm_bias, eps, *form, draw, needs_grad)
        residual_out, y, *kept = outputs
        ctx.draw, tensors = draw.split()
        ctx.save_for_backward(y, *kept, *tensors)
        ctx.dtypes = [None if t is None else t.dtype for t in (bias, weight, norm_bias)]
        ctx.set_materialize_grads(False)
        return residual_out, y

    @staticmethod
    @first_derivative_only("bias_dropout_add_layer_norm or bias_dropout_add_rms_norm", "norm")
    def backward(ctx: Any, grad_residual_out: Tensor | None, grad_y: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_residual_out is None and grad_y is None:
            return (None,) * 9
        *kept, key, first_sample = ctx.saved_tensors
        draw, needs = ctx.draw.joined(key, first_sample), ctx.needs_input_grad
        bias_dtype, *norm_dtypes = ctx.dtypes
        bias_dtype = bias_dtype if needs[1] else None
        grads = _backend(kept[0]).backward(grad_residual_out, grad_y, *kept, draw, bias_dtype, *norm_dtypes)
        return (*(grad if needed else None for grad, needed in zip(grads, needs, strict=False)), *[None] * 4)

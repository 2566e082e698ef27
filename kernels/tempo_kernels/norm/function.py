"""layer_norm and rms_norm: checks and the autograd.Functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tempo_kernels.derivative import first_derivative_only
from tempo_kernels.norm import eager
from tempo_kernels.opaque import is_traced, opaque


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

    Keeps for backward: with keep="output" y itself (one storage with what the next linear keeps, hence free), rstd
        (4 bytes per row), the gamma and beta of this call (8 bytes per channel, however many rows; RMSNorm 4) and, for
        channels where weight is too small beside bias for y to carry the normalised x, that one column of it (x's
        dtype; on a GPU also where a small change of the parameters would make it so, and an eighth more, in multiples
        of eight). With keep="input" x, rstd and the mean (4 bytes per row each); weight and bias are parameters.
    Error: with keep="input" at most twice torch's own in the same dtype, its sums in float32, plus one ulp of the
        largest exact value, for any weight and bias. With keep="output" the gradients are those of the normalised x
        that y, rounded to its dtype, carries: off by up to half an ulp of y divided by weight. That meets the same
        bound unless the gradient of y follows y or the bound is finer than 16 bits: not where the exact gradient of x
        cancels (RMSNorm with a gradient proportional to y), not for the gradient of a float32 weight beside a 16-bit
        x (0.2 to 1 % of its maximum), not for rows whose variance is far below eps or channels far above all others.
        For these keep="input", Megatron's "recompute".
        If weight or bias changes between forward and backward, keep="output" differentiates at their old values.
    Raises: ValueError for shapes or dtypes that do not fit; RuntimeError on a second derivative; on a GPU with
        keep="output" RuntimeError where a CUDA graph is captured before the first ordinary call, and at the end of a
        backward pass if parameters changed unseen by torch (`.data`, fused optimizers) so much at once that more
        channels were lost than there was room for: the gradients that miss them are NaN, also in a graph's replays.
        A graph of torch.compile has room for none.
    On a GPU with keep="output" the host waits for the GPU in the first forward after parameters changed, once for all
        norms, and at the end of each backward pass, for what was queued before the pass began.
    """
    _check(x, weight, bias, keep)
    return _apply(x, weight, bias, eps, zero_centered, True, keep)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-5, *, zero_centered: bool = False, keep: str = "output"
) -> Tensor:
    """RMSNorm over the last dimension: x / sqrt(mean(x**2) + eps) * weight. See `layer_norm` for all else."""
    _check(x, weight, None, keep)
    return _apply(x, weight, None, eps, zero_centered, False, keep)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, keep: str) -> None:
    if keep not in ("output", "input"):
        raise ValueError(f'keep is "{keep}"; "output" or "input" is expected')
    if x.dim() < 1 or not x.is_floating_point():
        raise ValueError(
            f"x is {x.dtype} of shape {list(x.shape)}; a floating-point [..., h] tensor is expected; cast it"
        )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if parameter.shape != x.shape[-1:]:
            raise ValueError(
                f"{name} has shape {list(parameter.shape)}; [{x.size(-1)}] is expected, as x's last size; reshape it"
            )
        if parameter.dtype not in (x.dtype, torch.float32):
            raise ValueError(f"{name} is {parameter.dtype}; x's {x.dtype} or torch.float32 is expected; cast it")


def _apply(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool, subtracts_mean: bool, keep: str
) -> Tensor:
    form = (eps, zero_centered, subtracts_mean)
    if keep == "input":
        return _FromInput.apply(x, weight, bias, *form)
    # What forward sees of its inputs does not tell whether gradients are on.
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    return _FromOutput.apply(x, weight, bias, *form, needs_grad)


def _backend(x: Tensor) -> Any:
    if x.is_cuda and not eager.has_no_data(x):
        from tempo_kernels.norm import kernel  # needs triton

        return kernel
    return eager


def shapes_kept(y: Tensor, bias: Tensor | None) -> list[Tensor]:
    """rstd, affine and no lost channels of a y [..., h] without data, as the backends keep them."""
    dtype, rows = torch.promote_types(y.dtype, torch.float32), math.prod(y.shape[:-1])
    rstd = y.new_empty(rows, dtype=dtype)
    affine = y.new_empty(1 if bias is None else 2, y.size(-1), dtype=dtype)
    return [rstd, affine, y.new_empty(0, dtype=torch.int32 if y.is_cuda else torch.int64), y.new_empty(rows, 0)]


def _shapes(x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> list[Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return [y, *shapes_kept(y, bias)]


@opaque(
    "norm(Tensor x, Tensor weight, Tensor? bias, float eps, bool subtracts_mean, bool zero_centered, bool needs_grad, "
    "bool keeps_lost) -> Tensor[]",
    _shapes,
)
def _forward(x: Tensor, *arguments: Any) -> Sequence[Tensor]:
    """y and what is kept beside it."""
    return _backend(x).forward(x, *arguments)


def _gradient_shapes(
    grad_y: Tensor,
    y: Tensor,
    rstd: Tensor,
    affine: Tensor,
    lost: Tensor,
    lost_xhat: Tensor,
    subtracts_mean: bool,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> list[Tensor]:
    return _shapes_of_gradients(y, weight_dtype, bias_dtype)


def _shapes_of_gradients(y: Tensor, weight_dtype: torch.dtype, bias_dtype: torch.dtype | None) -> list[Tensor]:
    grad_x = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    dtypes = [weight_dtype] if bias_dtype is None else [weight_dtype, bias_dtype]
    return [grad_x, *(y.new_empty(y.shape[-1:], dtype=dtype) for dtype in dtypes)]


@opaque(
    "norm_backward(Tensor grad_y, Tensor y, Tensor rstd, Tensor affine, Tensor lost, Tensor lost_xhat, "
    "bool subtracts_mean, ScalarType weight_dtype, ScalarType? bias_dtype) -> Tensor[]",
    _gradient_shapes,
)
def _backward(grad_y: Tensor, *arguments: Any) -> list[Tensor]:
    """grad_x, grad_weight and, where there is a bias, grad_bias."""
    return [grad for grad in _backend(grad_y).backward(grad_y, *arguments) if grad is not None]


def _shapes_from_input(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, subtracts_mean: bool, zero_centered: bool
) -> list[Tensor]:
    y, rstd, *_ = _shapes(x, weight, bias)
    return [y, rstd, torch.empty_like(rstd)] if subtracts_mean else [y, rstd]


@opaque(
    "norm_from_input(Tensor x, Tensor weight, Tensor? bias, float eps, bool subtracts_mean, bool zero_centered) "
    "-> Tensor[]",
    _shapes_from_input,
)
def _forward_from_input(x: Tensor, *arguments: Any) -> list[Tensor]:
    """y, rstd and, where it is subtracted, the mean."""
    return [found for found in _backend(x).forward_from_input(x, *arguments) if found is not None]


def _gradient_shapes_from_input(
    grad_y: Tensor,
    x: Tensor,
    rstd: Tensor,
    mean: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    zero_centered: bool,
) -> list[Tensor]:
    return _shapes_of_gradients(x, weight.dtype, None if bias is None else bias.dtype)


@opaque(
    "norm_backward_from_input(Tensor grad_y, Tensor x, Tensor rstd, Tensor? mean, Tensor weight, Tensor? bias, "
    "bool zero_centered) -> Tensor[]",
    _gradient_shapes_from_input,
)
def _backward_from_input(grad_y: Tensor, *arguments: Any) -> list[Tensor]:
    """As _backward, from what the other form keeps."""
    return [grad for grad in _backend(grad_y).backward_from_input(grad_y, *arguments) if grad is not None]


class _FromOutput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        zero_centered: bool,
        subtracts_mean: bool,
        needs_grad: bool,
    ) -> Tensor:
        # How many channels are lost is data: a compiled graph, whose shapes must be known before, has room for none.
        keeps_lost = not is_traced(x)
        y, *kept = _forward(x, weight, bias, eps, subtracts_mean, zero_centered, needs_grad, keeps_lost)
        ctx.save_for_backward(y, *kept)
        ctx.form = (subtracts_mean, weight.dtype, None if bias is None else bias.dtype)
        return y

    @staticmethod
    @first_derivative_only("layer_norm or rms_norm", "norm")
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        y, *kept = ctx.saved_tensors
        grads = _backward(grad_y, y, *kept, *ctx.form)
        return (*_needed(ctx, grads), None, None, None, None)


class _FromInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool, subtracts_mean: bool
    ) -> Tensor:
        y, rstd, *mean = _forward_from_input(x, weight, bias, eps, subtracts_mean, zero_centered)
        ctx.save_for_backward(x, rstd, mean[0] if mean else None, weight, bias)
        ctx.zero_centered, ctx.refill = zero_centered, _refill
        return y

    @staticmethod
    @first_derivative_only("layer_norm or rms_norm", "norm")
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, mean, weight, bias = ctx.saved_tensors
        grads = _backward_from_input(grad_y, x, rstd, mean, weight, bias, ctx.zero_centered)
        return (*_needed(ctx, grads), None, None, None)


def _refill(ctx: Any, out: Tensor) -> None:
    """Writes y into `out` again, bit for bit."""
    x, rstd, mean, weight, bias = ctx.saved_tensors
    with torch.no_grad():
        _backend(x).refill(out, x, rstd, mean, weight, bias, ctx.zero_centered)


def _needed(ctx: Any, grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias that somebody asked for; an RMSNorm has no bias."""
    gradients = [*grads, *[None] * (3 - len(grads))]
    return tuple(grad if needed else None for grad, needed in zip(gradients, ctx.needs_input_grad, strict=False))

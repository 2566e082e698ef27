"""Defines `layer_norm` and `rms_norm`: checks their arguments and holds the autograd.Functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tempo_kernels.backend import choose_backend
from tempo_kernels.derivative import first_derivative_only, takes_plain_tensors
from tempo_kernels.norm import cpu
from tempo_kernels.norm.eager import get_lost_channels
from tempo_kernels.norm.settings import Kept, Norm, Statistics, allocate_kept, allocate_output, get_reserve_size
from tempo_kernels.opaque import is_traced, opaque, run_or_simulate
from tempo_kernels.saved import allow_refill

OPERANDS = "Tensor weight, Tensor? bias, float eps, bool subtracts_mean, bool zero_centered"


@takes_plain_tensors
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5, *, zero_centered: bool = False,
    keep: str = "inplace",
) -> Tensor:  # fmt: skip
    """Computes LayerNorm over the last dimension: (x - mean) / sqrt(var + eps) * weight + bias.

    Args:
        x: [..., h], floating point, any strides.
        weight, bias: [h], of x's dtype or float32; with a float32 x also both bfloat16 or both float16. bias may be
            None, for a LayerNorm without one.
        eps: added to the variance.
        zero_centered: use 1 + weight in weight's place (Megatron's `layernorm_zero_centered_gamma`), added in float32
            as Transformer Engine does; Megatron's own `weight + 1` rounds the sum to weight's dtype.
        keep: "inplace", "recompute" or "recompute statistics".

    Returns:
        y [..., h], contiguous, in x's dtype. With a float32 x and a 16-bit weight, as for Megatron's
        `--fp32-residual-connection`, y has weight's dtype: x is normalised in float32 and rounded once, to the dtype
        of the linear that follows, as in Apex's FastLayerNorm. The gradient of x is float32 then.

    Keeps for backward: with keep="inplace" y itself (one storage with what the next linear keeps, hence free), rstd
        (4 bytes per row), and gamma and beta of this call (8 bytes per channel; RMSNorm 4). A channel is lost if weight
        is too small compared with bias for y to carry the normalised x (eager.py); that column of it is kept in y's
        dtype. A CPU keeps the lost columns. A GPU, whose host does not wait for numbers, keeps a reserve of h / 64
        columns, at least one, whether channels are lost or not. With keep="recompute" x, rstd and the mean (4 bytes per
        row each). With keep="recompute statistics" x: the norm runs once more in backward for its statistics, which
        pays where rows are short.
    Error: with keep="recompute" or "recompute statistics", which are equal bit for bit, at most twice torch's own in
        the same dtype, with sums in float32, plus one ulp of the largest exact value, for any weight and bias. With
        keep="inplace" the normalised x is recovered from y rounded to its dtype, so it is off by up to half an ulp of y
        divided by weight.
        This meets the same bound except
        - where the exact gradient of x cancels (RMSNorm with a gradient proportional to y);
        - for the gradient of a float32 weight of a 16-bit x (off by 0.2 to 1 % of its maximum), and of a float32 x with
          a 16-bit weight (only as exact as that of a 16-bit x);
        - for rows of one channel, of a variance far below eps, or with channels far above all others.
        For these use keep="recompute", which Megatron's "recompute" is.
        On a CPU y is torch's own LayerNorm, which subtracts the mean after the scale: y / weight is off by up to 5e-7
        of abs(mean) / std of the row, and with keep="inplace" so is the normalised x.
        If weight or bias changes between forward and backward, keep="inplace" differentiates at their old values.
    Raises: ValueError for shapes or dtypes that do not fit; RuntimeError on a second derivative. With keep="inplace" on
        a GPU, where more channels are lost than the reserve has columns, gradients are NaN, and one of the next
        backwards raises RuntimeError; on a CPU a compiled graph raises it for any lost channel.
    Source: LayerNorm (Ba et al., 2016), RMSNorm (Zhang and Sennrich, 2019); the backward from the output after In-Place
        Activated BatchNorm (Rota Bulo et al., CVPR 2018) and Tempo (Andoorveedu et al., 2022).
    """
    # Backends have two forms only, LayerNorm with a bias and RMSNorm without. h zeros cost nothing beside x.
    bias = torch.zeros_like(weight, requires_grad=False) if bias is None else bias
    return _apply(x, weight, bias, (eps, True, zero_centered), keep)


@takes_plain_tensors
def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-5, *, zero_centered: bool = False, keep: str = "inplace"
) -> Tensor:
    """Computes RMSNorm over the last dimension: x / sqrt(mean(x**2) + eps) * weight. See `layer_norm` for all else."""
    return _apply(x, weight, None, (eps, False, zero_centered), keep)


def fits_in_place(weight: Tensor, bias: Tensor | None, zero_centered: bool = False) -> bool:
    """Returns whether keep="inplace" has room on every device for the channels of weight and bias [h] that an output of
    weight's dtype does not carry. On a GPU the host waits for them. True for tensors without numbers or memory."""
    if weight.is_meta or weight.untyped_storage().nbytes() == 0:
        return True
    affine = Norm(weight, bias, 0.0, bias is not None, zero_centered).compute_affine(weight.dtype)
    return get_lost_channels(affine, weight.dtype).numel() <= get_reserve_size(weight.numel())


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, keep: str) -> None:
    if keep not in ("inplace", "recompute", "recompute statistics"):
        raise ValueError(f'keep is "{keep}"; expected "inplace", "recompute" or "recompute statistics"')
    if x.dim() < 1 or not x.is_floating_point():
        raise ValueError(f"x is {x.dtype} of shape {list(x.shape)}; expected a floating-point [..., h] tensor; cast it")
    fits = weight.dtype == x.dtype and weight.shape == x.shape[-1:]
    if fits and (bias is None or (bias.dtype == weight.dtype and bias.shape == weight.shape)):
        return  # the common case: the checks below cost more than a launch hides
    # A float32 residual: y gets the 16-bit dtype of the linear that follows.
    has_wide_x = x.dtype == torch.float32 and weight.dtype in (torch.bfloat16, torch.float16)
    allowed = (weight.dtype,) if has_wide_x else (x.dtype, torch.float32)
    for name, parameter in (("weight", weight), ("bias", weight if bias is None else bias)):
        if parameter.shape != x.shape[-1:]:
            raise ValueError(
                f"{name} has shape {list(parameter.shape)}; expected [{x.size(-1)}], as x's last size; reshape it"
            )
        if parameter.dtype not in allowed:
            names = " or ".join(dict.fromkeys(map(str, allowed)))
            raise ValueError(f"{name} is {parameter.dtype}; expected {names}, beside x's {x.dtype}; cast it")


def _apply(x: Tensor, weight: Tensor, bias: Tensor | None, form: tuple[float, bool, bool], keep: str) -> Tensor:
    _check(x, weight, bias, keep)
    # Inside forward gradients are always off, so the caller's state is read here.
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    y: Tensor = _Norm.apply(x, weight, bias, form, keep, needs_grad)
    return y


def _allocate_kept(x: Tensor, *operands: Any) -> list[Tensor]:
    reserve = get_reserve_size(x.size(-1)) if x.is_cuda and operands[5] else 0
    y, kept = allocate_kept(x, Norm(*operands[:5]), reserve, torch.int32 if x.is_cuda else torch.int64)
    return [y, *kept]


@opaque(f"norm(Tensor x, {OPERANDS}, bool needs_grad, bool has_static_shapes) -> Tensor[]", _allocate_kept)
def _forward(x: Tensor, *operands: Any) -> list[Tensor]:
    """Returns y and the tensors of its Kept, with has_static_shapes as many as fake tensors of x's shape would have."""
    y, kept = choose_backend(x, cpu).forward(x, Norm(*operands[:5]), *operands[5:])
    return [y, *kept]


def _allocate_gradients(grad_y: Tensor, y: Tensor, *kept: Any) -> list[Tensor]:
    affine, (x_dtype, sums_dtype) = kept[1], kept[-2:]
    return [torch.empty(y.shape, dtype=x_dtype, device=y.device), torch.empty_like(affine, dtype=sums_dtype)]


@opaque(
    "norm_backward(Tensor grad_y, Tensor y, Tensor rstd, Tensor affine, Tensor lost, Tensor lost_xhat, "
    "bool subtracts_mean, ScalarType x_dtype, ScalarType sums_dtype) -> Tensor[]",
    _allocate_gradients,
)
def _backward(grad_y: Tensor, y: Tensor, *kept: Any) -> list[Tensor]:
    """Returns grad_x, and grad_gamma and perhaps grad_beta in one tensor of sums_dtype."""
    return [*choose_backend(y, cpu).backward(grad_y, y, Kept(*kept[:4]), *kept[4:])]


def _allocate_statistics(x: Tensor, *operands: Any) -> list[Tensor]:
    norm = Norm(*operands)
    y, rstd = allocate_output(x, norm)
    return [y, rstd, torch.empty_like(rstd)] if norm.subtracts_mean else [y, rstd]


@opaque(f"norm_from_input(Tensor x, {OPERANDS}) -> Tensor[]", _allocate_statistics)
def _forward_from_input(x: Tensor, *operands: Any) -> list[Tensor]:
    """Returns y, rstd and, for a LayerNorm, the mean."""
    y, statistics = choose_backend(x, cpu).forward_from_input(x, Norm(*operands))
    return [y, *(found for found in statistics if found is not None)]


def _allocate_gradients_from_input(grad_y: Tensor, x: Tensor, *operands: Any) -> list[Tensor]:
    norm, statistics = Norm(*operands[:5]), Statistics(*operands[5:])
    sums = statistics.rstd.new_empty(1 if norm.bias is None else 2, x.size(-1), dtype=norm.sums_dtype)
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device), sums]


@opaque(
    f"norm_backward_from_input(Tensor grad_y, Tensor x, {OPERANDS}, Tensor rstd, Tensor? mean) -> Tensor[]",
    _allocate_gradients_from_input,
)
def _backward_from_input(grad_y: Tensor, x: Tensor, *operands: Any) -> list[Tensor]:
    """As _backward, from what keep="recompute" keeps; the sums are in the norm's sums_dtype."""
    norm, statistics = Norm(*operands[:5]), Statistics(*operands[5:])
    return [*choose_backend(x, cpu).backward_from_input(grad_y, x, norm, statistics)]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, form: tuple[float, bool, bool], keep: str,
        needs_grad: bool,
    ) -> Tensor:  # fmt: skip
        norm = Norm(weight, bias, *form)
        ctx.form, ctx.keep = form, keep
        ctx.dtypes = x.dtype, norm.sums_dtype, weight.dtype, None if bias is None else bias.dtype
        if keep == "inplace":
            y, *kept = _forward(x, *norm, needs_grad, is_traced(x))
            ctx.save_for_backward(y, *kept)
        else:
            y, *statistics = _forward_from_input(x, *norm)
            ctx.save_for_backward(x, weight, bias, *(statistics if keep == "recompute" else ()))
            allow_refill(ctx, y, _refill)
        return y

    @staticmethod
    @first_derivative_only("layer_norm or rms_norm", "norm")
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x_dtype, sums_dtype, weight_dtype, bias_dtype = ctx.dtypes
        if ctx.keep == "inplace":
            y, *kept = ctx.saved_tensors
            grad_x, sums = _backward(grad_y, y, *kept, ctx.form[1], x_dtype, sums_dtype)
        else:
            x, weight, bias, *kept = ctx.saved_tensors
            norm = Norm(weight, bias, *ctx.form)
            statistics = Statistics(*(kept or _forward_from_input(x, *norm)[1:]))
            grad_x, sums = _backward_from_input(grad_y, x, *norm, *statistics)
        has_grad_x, has_grad_weight, has_grad_bias, *_ = ctx.needs_input_grad
        grad_weight = sums[0].to(weight_dtype) if has_grad_weight else None
        grad_bias = sums[1].to(bias_dtype) if has_grad_bias else None
        return grad_x if has_grad_x else None, grad_weight, grad_bias, None, None, None


@torch.no_grad()
def _refill(ctx: Any, out: Tensor) -> None:
    x, weight, bias, *kept = ctx.saved_tensors
    norm = Norm(weight, bias, *ctx.form)
    if kept:
        run_or_simulate(choose_backend(x, cpu).refill, out, x, norm, Statistics(*kept))
    else:
        out.copy_(_forward_from_input(x, *norm)[0])

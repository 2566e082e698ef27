"""LayerNorm and RMSNorm in plain torch, differentiated from their output or from their input: the specification.

    y = gamma * xhat + beta,  xhat = (x - mean) * rstd          (RMSNorm: mean = 0, beta = 0)
    grad_x = rstd * (g - mean(g) - xhat * mean(g * xhat)),  g = gamma * grad_y      (RMSNorm: without mean(g))
    grad_gamma = sum over rows of grad_y * xhat,  grad_beta = sum over rows of grad_y

gamma is weight, or 1 + weight where it is zero-centred: added in float32, so that a 16-bit weight loses nothing.

From the output, xhat = (y - beta) / gamma. y carries xhat only where gamma is large enough beside beta: y's rounding
error, relative to |beta| + |gamma xhat|, is divided by |gamma|. Channels with |beta| > MAX_OFFSET * |gamma|, or whose
gamma is close to the smallest normal number, are kept as a narrow xhat of their own, so that the gradients are right
for every gamma, zero included. gamma and beta are kept as forward used them: the parameters may have changed since.

Large tensors on a CPU go through one_pass.py, the same formulas in one compiled pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from tempo_kernels.norm import one_pass

MAX_OFFSET = 2.0
# How far gamma and beta may move before a channel's being lost is noticed: this share of the mean |gamma|, and at least
# four steps of an optimizer with a learning rate of 1e-3. What such a move could lose is a candidate.
DRIFT_SHARE = 1 / 16
SMALLEST_DRIFT = 1 / 256
BLOCK_ELEMENTS = 1 << 18


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    subtracts_mean: bool,
    zero_centered: bool,
    needs_grad: bool = True,
    keeps_lost: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y [..., h], rstd [rows], affine [2, h] or [1, h] (gamma and beta), and the channels [k] that y cannot carry with
    their xhat [rows, k]; rstd and affine are float32. Without data no channel counts as lost.

    Raises RuntimeError where a channel is lost that is needed and, without keeps_lost, has no room.
    """
    rows, gamma = _rows(x), _gamma(weight, x.dtype, zero_centered)
    affine = torch.stack([gamma] if bias is None else [gamma, bias.to(gamma.dtype)])
    lost = torch.empty(0, dtype=torch.int64, device=x.device)
    if needs_grad and not has_no_data(weight):
        lost = lost_channels(weight, bias, x.dtype, zero_centered).nonzero().squeeze(-1)
    if lost.numel() and not keeps_lost:
        raise RuntimeError(
            f"norm: the weight of {lost.numel()} of {weight.numel()} channels is too small beside its bias for the "
            'output to carry the normalised input, for which a compiled graph has no room; use keep="input", in '
            'Megatron tempo.norm "recompute"'
        )
    lost_xhat = torch.empty(rows.size(0), lost.numel(), dtype=x.dtype, device=x.device)
    if one_pass.pays_for(rows):
        y_rows, mean, rstd = one_pass.forward(rows, gamma, bias, eps)
        if lost.numel():
            lost_xhat = one_pass.normalized(rows[:, lost], mean, rstd).to(x.dtype)
        return y_rows.view(x.shape), rstd, affine, lost, lost_xhat
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows.size(0), dtype=gamma.dtype, device=x.device)
    for block in _blocks(rows):
        xhat, _, rstd[block] = _normalized(rows[block], gamma.dtype, eps, subtracts_mean)
        if lost.numel():
            lost_xhat[block] = xhat[:, lost].to(x.dtype)
        _rows(y)[block] = _scaled(xhat, gamma, bias)
    return y, rstd, affine, lost, lost_xhat


def backward(
    grad_y: Tensor,
    y: Tensor,
    rstd: Tensor,
    affine: Tensor,
    lost: Tensor,
    lost_xhat: Tensor,
    subtracts_mean: bool,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """grad_x [..., h] in y's dtype; grad_weight and, where there is a bias, grad_bias [h] in these dtypes."""
    rows, gamma, bias = _rows(y), affine[0], None if bias_dtype is None else affine[1]
    inverse = gamma.index_fill(0, lost, 1.0).reciprocal_()
    if one_pass.pays_for(rows):
        grad_x, *sums = one_pass.backward(_rows(grad_y), rows, rstd, gamma, inverse, bias, lost, lost_xhat)
        return grad_x.view(y.shape), *_cast(sums, weight_dtype, bias_dtype)

    def xhat_of(block: slice) -> Tensor:
        xhat = rows[block].to(gamma.dtype, copy=bias is None)
        if bias is not None:
            xhat = xhat - bias
        xhat *= inverse
        if lost.numel():
            xhat.index_copy_(1, lost, lost_xhat[block].to(gamma.dtype))
        return xhat

    grad_x, *sums = _gradients(grad_y, xhat_of, rstd, gamma, y.dtype, subtracts_mean)
    return grad_x, *_cast(sums, weight_dtype, bias_dtype)


def forward_from_input(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, subtracts_mean: bool, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """y [..., h], rstd [rows] and, where it is subtracted, mean [rows] (float32)."""
    rows = _rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    gamma = _gamma(weight, x.dtype, zero_centered)
    rstd = torch.empty(rows.size(0), dtype=gamma.dtype, device=x.device)
    mean = torch.empty_like(rstd) if subtracts_mean else None
    for block in _blocks(rows):
        xhat, block_mean, rstd[block] = _normalized(rows[block], gamma.dtype, eps, subtracts_mean)
        if mean is not None and block_mean is not None:
            mean[block] = block_mean
        _rows(y)[block] = _scaled(xhat, gamma, bias)
    return y, rstd, mean


def refill(
    out: Tensor,
    x: Tensor,
    rstd: Tensor,
    mean: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    zero_centered: bool,
) -> None:
    """Writes y into `out` again, the same bits as forward_from_input, from what that kept."""
    rows, gamma = _rows(x), _gamma(weight, x.dtype, zero_centered)
    for block in _blocks(rows):
        _rows(out)[block] = _scaled(_normalized_by(rows[block], rstd[block], mean, block), gamma, bias)


def backward_from_input(
    grad_y: Tensor,
    x: Tensor,
    rstd: Tensor,
    mean: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As backward, from what forward_from_input kept."""
    rows, gamma = _rows(x), _gamma(weight, x.dtype, zero_centered)

    def xhat_of(block: slice) -> Tensor:
        return _normalized_by(rows[block], rstd[block], mean, block)

    grad_x, *sums = _gradients(grad_y, xhat_of, rstd, gamma, x.dtype, mean is not None)
    return grad_x, *_cast(sums, weight.dtype, None if bias is None else bias.dtype)


def lost_channels(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    """Whether each channel's xhat cannot be recovered from a y of `dtype`: bool, of weight's shape [..., h]."""
    return _is_lost(*_magnitudes(weight, bias, dtype, zero_centered), dtype)


def candidate_channels(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    """Whether each channel is lost or could be after a few optimizer steps: bool, of weight's shape [..., h]."""
    gamma, beta = _magnitudes(weight, bias, dtype, zero_centered)
    # Beside the mean, not the largest: one channel with a large gamma says nothing of the others.
    drift = (gamma.mean(-1, keepdim=True) * DRIFT_SHARE).clamp_(min=SMALLEST_DRIFT)
    return _is_lost(gamma - drift, beta + drift, dtype)


def _magnitudes(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, zero_centered: bool) -> tuple[Tensor, Tensor]:
    gamma = _gamma(weight.detach(), dtype, zero_centered).abs_()
    return gamma, torch.zeros_like(gamma) if bias is None else bias.detach().to(gamma.dtype).abs()


def _is_lost(gamma: Tensor, beta: Tensor, dtype: torch.dtype) -> Tensor:
    return ~(gamma > smallest_carried(dtype)) | (beta > MAX_OFFSET * gamma)


def smallest_carried(dtype: torch.dtype) -> float:
    """A y of `dtype` carries the xhat of a larger |gamma|."""
    limits = torch.finfo(dtype)
    # float16 has gradual underflow everywhere; elsewhere stay clear of hardware that flushes subnormals to zero.
    return limits.tiny if dtype == torch.float16 else limits.tiny / limits.eps


def _gamma(weight: Tensor, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    """gamma [h] in the dtype that a norm of `dtype` computes in, in new memory."""
    gamma = weight.to(torch.promote_types(dtype, torch.float32), copy=True)
    return gamma.add_(1.0) if zero_centered else gamma


def has_no_data(x: Tensor) -> bool:
    """Whether x has a shape only, as on the device "meta" or under FakeTensorMode."""
    return x.is_meta or is_fake(x)


def _cast(
    sums: Sequence[Tensor], weight_dtype: torch.dtype, bias_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    return sums[0].to(weight_dtype), None if bias_dtype is None else sums[1].to(bias_dtype)


def _normalized(
    x: Tensor, compute_dtype: torch.dtype, eps: float, subtracts_mean: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """xhat [rows, h] in new memory, mean and rstd [rows]."""
    xhat, mean = x.to(compute_dtype, copy=True), None
    if subtracts_mean:
        mean = xhat.mean(-1)
        xhat -= mean.unsqueeze(-1)
    rstd = xhat.square().mean(-1).add_(eps).rsqrt_()
    xhat *= rstd.unsqueeze(-1)
    return xhat, mean, rstd


def _normalized_by(x: Tensor, rstd: Tensor, mean: Tensor | None, block: slice) -> Tensor:
    """xhat [rows, h] in new memory, the same bits as _normalized's."""
    xhat = x.to(rstd.dtype, copy=mean is None)
    if mean is not None:
        xhat = xhat - mean[block].unsqueeze(-1)
    xhat *= rstd.unsqueeze(-1)
    return xhat


def _scaled(xhat: Tensor, gamma: Tensor, bias: Tensor | None) -> Tensor:
    """gamma * xhat + beta, over xhat."""
    xhat *= gamma
    if bias is not None:
        xhat += bias
    return xhat


def _gradients(
    grad_y: Tensor,
    xhat_of: Callable[[slice], Tensor],
    rstd: Tensor,
    gamma: Tensor,
    dtype: torch.dtype,
    subtracts_mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad_x in `dtype`, grad_gamma and grad_beta; xhat_of gives the xhat of a block of rows, in new memory."""
    grad_x = torch.empty(grad_y.shape, dtype=dtype, device=grad_y.device)
    grad_rows, hidden_size = _rows(grad_y), grad_y.size(-1)
    grad_gamma, grad_beta = torch.zeros_like(gamma), torch.zeros_like(gamma)
    for block in _blocks(grad_rows):
        xhat, grad = xhat_of(block), grad_rows[block].to(rstd.dtype)
        product = grad * xhat
        grad_gamma += product.sum(0)
        grad_beta += grad.sum(0)
        xhat *= product.mv(gamma).div_(hidden_size).unsqueeze(-1)
        grad = grad * gamma
        if subtracts_mean:
            xhat += grad.mean(-1, keepdim=True)
        grad -= xhat
        grad *= rstd[block].unsqueeze(-1)
        _rows(grad_x)[block] = grad
    return grad_x, grad_gamma, grad_beta


def _rows(x: Tensor) -> Tensor:
    """x as [rows, h]; a view where x is contiguous."""
    return x.reshape(math.prod(x.shape[:-1]), x.size(-1))


def _blocks(rows: Tensor) -> list[slice]:
    """Slices of whole rows whose float32 copies stay in the cache; one slice where there is nothing to compute."""
    step = max(1, rows.size(0) if has_no_data(rows) else BLOCK_ELEMENTS // max(1, rows.size(-1)))
    return [slice(start, min(start + step, rows.size(0))) for start in range(0, rows.size(0), step)]

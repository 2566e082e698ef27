"""Specifies for every backend which channels a norm's output cannot carry.

From the output, xhat = (y - beta) / gamma. The rounding error of y is proportional to |beta| + |gamma xhat|, and the
division by gamma amplifies it, so y carries xhat only if gamma is large enough beside beta. A channel is lost if |beta|
> MAX_OFFSET * |gamma|, if gamma is close to the smallest normal number of y's dtype, or outside of SMALLEST to LARGEST.
For a lost channel the norm keeps xhat itself, so that the gradients are right for every gamma, zero included.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tempo_kernels.norm.operands import Norm, compute_gamma

MAX_OFFSET = 2.0
SMALLEST, LARGEST = 2.0**-62, 2.0**126
"""Between which a GPU has a reciprocal of one instruction: of gamma, neither 0 nor infinite, and of gamma over the mean
of g xhat, which is below 2**64, not infinite; where it is 0, so is to float32 what is subtracted from g."""
# How far gamma and beta may move before channels are counted again: this share of the mean |gamma|, and at least four
# steps of an optimizer with a learning rate of 1e-3. A channel that such a move would lose is a candidate.
DRIFT_SHARE = 1 / 16
SMALLEST_DRIFT = 1 / 256


def find_lost_channels(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    """Whether a y of `dtype` does not carry each channel's xhat: bool, of weight's shape [..., h]."""
    return _is_lost(*_compute_magnitudes(weight, bias, dtype, zero_centered), dtype)


def find_candidate_channels(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    """Whether each channel is lost or could be after a few optimizer steps: bool, of weight's shape [..., h]."""
    gamma, beta = _compute_magnitudes(weight, bias, dtype, zero_centered)
    # The mean, not the largest: one channel with a large gamma says nothing about the others.
    drift = (gamma.mean(-1, keepdim=True) * DRIFT_SHARE).clamp_(min=SMALLEST_DRIFT)
    return _is_lost(gamma - drift, beta + drift, dtype)


def list_lost_channels(norm: Norm, affine: Tensor, dtype: torch.dtype, needs_grad: bool, keeps_lost: bool) -> Tensor:
    """Lists the indices of the lost channels, int64 [k]; none if no gradient is needed, and none for fake tensors,
    which have no numbers. affine is in the dtype of x's arithmetic.

    Raises RuntimeError if there are such channels and, without keeps_lost, no room for them.
    """
    weight = norm.weight
    if not needs_grad or isinstance(affine, FakeTensor) or _carries_all(affine, dtype):
        return torch.empty(0, dtype=torch.int64, device=weight.device)
    lost = find_lost_channels(weight, norm.bias, dtype, norm.zero_centered).nonzero().squeeze(-1)
    if lost.numel() and not keeps_lost:
        raise RuntimeError(
            f"norm: the weight of {lost.numel()} of {weight.numel()} channels is too small beside its bias for the "
            'output to carry the normalised input, for which a compiled graph has no room; use keep="input", in '
            'Megatron tempo.norm "recompute"'
        )
    return lost


def find_smallest_carried(dtype: torch.dtype) -> float:
    """Returns the |gamma| above which a y of `dtype` carries a channel."""
    limits = torch.finfo(dtype)
    # float16 has gradual underflow on all hardware. For other dtypes stay clear of subnormals, which some flush to 0.
    return limits.tiny if dtype == torch.float16 else max(SMALLEST, limits.tiny / limits.eps)


def _compute_magnitudes(
    weight: Tensor, bias: Tensor | None, dtype: torch.dtype, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    gamma = compute_gamma(weight.detach(), dtype, zero_centered).abs()
    return gamma, torch.zeros_like(gamma) if bias is None else bias.detach().to(gamma.dtype).abs()


def _carries_all(affine: Tensor, dtype: torch.dtype) -> bool:
    """Whether surely no channel is lost: a check of few calls for the common case."""
    if affine.numel() == 0 or type(affine) is not Tensor:
        return False
    gamma, *beta = affine.abs().unbind()
    margin = torch.sub(gamma, beta[0], alpha=1.0 / MAX_OFFSET) if beta else gamma
    return margin.amin().item() > find_smallest_carried(dtype)


def _is_lost(gamma: Tensor, beta: Tensor, dtype: torch.dtype) -> Tensor:
    return ~((gamma > find_smallest_carried(dtype)) & (gamma <= LARGEST)) | (beta > MAX_OFFSET * gamma)

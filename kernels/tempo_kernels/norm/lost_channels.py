"""Which channels a norm's output cannot carry: the specification, for every backend.

From the output, xhat = (y - beta) / gamma. The rounding error of y is relative to |beta| + |gamma xhat|, and dividing
by gamma divides it too, so y carries xhat only where gamma is large enough beside beta. A channel is lost if |beta| >
MAX_OFFSET * |gamma|, or if its gamma is close to the smallest normal number of y's dtype or outside of SMALLEST and
LARGEST. Of these channels a norm keeps xhat itself, so that the gradients are right for every gamma, zero included.
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
# A channel may become lost in the next steps: the limits on how far gamma and beta move meanwhile are this share of the
# mean |gamma|, and at least four steps of an optimizer with a learning rate of 1e-3.
DRIFT_SHARE = 1 / 16
SMALLEST_DRIFT = 1 / 256


def find_lost_channels(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    """Whether a y of `dtype` does not carry each channel's xhat: bool, of weight's shape [..., h]."""
    return _is_lost(*_compute_magnitudes(weight, bias, dtype, zero_centered), dtype)


def find_candidate_channels(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    """Whether each channel is lost or could be after a few optimizer steps: bool, of weight's shape [..., h]."""
    gamma, beta = _compute_magnitudes(weight, bias, dtype, zero_centered)
    # Beside the mean, not the largest: one channel with a large gamma says nothing of the others.
    drift = (gamma.mean(-1, keepdim=True) * DRIFT_SHARE).clamp_(min=SMALLEST_DRIFT)
    return _is_lost(gamma - drift, beta + drift, dtype)


def list_lost_channels(norm: Norm, affine: Tensor, dtype: torch.dtype, needs_grad: bool, keeps_lost: bool) -> Tensor:
    """The numbers of the lost channels, int64 [k]; none where no gradient is needed, and of fake tensors, which have no
    numbers. affine is that of x's dtype.

    Raises RuntimeError where there are such channels and, without keeps_lost, no room for them.
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
    """The limit above which a y of `dtype` carries a channel's |gamma|."""
    limits = torch.finfo(dtype)
    # float16 has gradual underflow everywhere; elsewhere stay clear of hardware that flushes subnormals to zero.
    return limits.tiny if dtype == torch.float16 else max(SMALLEST, limits.tiny / limits.eps)


def _compute_magnitudes(
    weight: Tensor, bias: Tensor | None, dtype: torch.dtype, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    gamma = compute_gamma(weight.detach(), dtype, zero_centered).abs()
    return gamma, torch.zeros_like(gamma) if bias is None else bias.detach().to(gamma.dtype).abs()


def _carries_all(affine: Tensor, dtype: torch.dtype) -> bool:
    """Whether surely no channel is lost, in few calls: the common case."""
    if affine.numel() == 0 or type(affine) is not Tensor:
        return False
    gamma, *beta = affine.abs().unbind()
    margin = torch.sub(gamma, beta[0], alpha=1.0 / MAX_OFFSET) if beta else gamma
    return margin.amin().item() > find_smallest_carried(dtype)


def _is_lost(gamma: Tensor, beta: Tensor, dtype: torch.dtype) -> Tensor:
    return ~((gamma > find_smallest_carried(dtype)) & (gamma <= LARGEST)) | (beta > MAX_OFFSET * gamma)

"""Specifies LayerNorm and RMSNorm in plain torch, differentiated from their output or from their input.

    y = gamma * xhat + beta,  xhat = (x - mean) * rstd          (RMSNorm: mean = 0, beta = 0)
    grad_x = rstd * (g - mean(g) - xhat * mean(g * xhat)),  g = gamma * grad_y      (RMSNorm: without mean(g))
    grad_gamma = sum over rows of grad_y * xhat,  grad_beta = sum over rows of grad_y

gamma is weight, or 1 + weight if it is zero-centred; the 1 is added in float32, so that a 16-bit weight loses nothing.
Arithmetic is float32 (float64 for a float64 x), with one rounding at the end.

From the output, xhat = (y - beta) / gamma. The rounding error of y is proportional to |beta| + |gamma xhat|, and the
division by gamma amplifies it, so y carries xhat only if gamma is large enough compared with beta. A channel is lost if
|beta| > MAX_OFFSET * |gamma|, if gamma is close to the smallest normal number of y's dtype, or outside of SMALLEST to
LARGEST. For a lost channel the norm keeps xhat itself, so that the gradients are right for every gamma, zero included.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tempo_kernels.norm.settings import Kept, Norm, Statistics, get_output_dtype, view_rows

MAX_OFFSET = 2.0
SMALLEST, LARGEST = 2.0**-62, 2.0**126
"""Between which a GPU has a normal reciprocal of gamma in float32, and g * xhat stays in range."""


def forward(x: Tensor, norm: Norm, needs_grad: bool = True, has_static_shapes: bool = False) -> tuple[Tensor, Kept]:
    """Returns y [..., h] and what keep="inplace" keeps with it. See get_lost_channels for has_static_shapes."""
    y, statistics = forward_from_input(x, norm)
    affine = norm.compute_affine(x.dtype)
    lost = get_lost_channels(affine, y.dtype, needs_grad, has_static_shapes)
    return y, Kept(statistics.rstd, affine, lost, normalize(view_rows(x), statistics)[:, lost].to(y.dtype))


def backward(
    grad_y: Tensor, y: Tensor, kept: Kept, subtracts_mean: bool, x_dtype: torch.dtype, sums_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns grad_x [..., h] in x_dtype, and grad_gamma and, with a beta, grad_beta: [1 or 2, h] in sums_dtype."""
    xhat = (view_rows(y) - kept.affine[1:].sum(0)) / kept.affine[0]
    xhat[:, kept.lost] = kept.lost_xhat.to(xhat.dtype)
    grad_x, sums = differentiate(view_rows(grad_y), xhat, kept.rstd, kept.affine)
    return grad_x.to(x_dtype).view(y.shape), sums.to(sums_dtype)


def forward_from_input(x: Tensor, norm: Norm) -> tuple[Tensor, Statistics]:
    """Returns y [..., h] and what keep="recompute" keeps with x."""
    rows = view_rows(x).to(torch.promote_types(x.dtype, torch.float32))
    mean = rows.mean(-1) if norm.subtracts_mean else None
    centred = rows if mean is None else rows - mean.unsqueeze(-1)
    statistics = Statistics((centred.square().mean(-1) + norm.eps).rsqrt(), mean)
    y = torch.empty(x.shape, dtype=get_output_dtype(x.dtype, norm.weight.dtype), device=x.device)
    refill(y, x, norm, statistics)
    return y, statistics


def refill(out: Tensor, x: Tensor, norm: Norm, statistics: Statistics) -> None:
    """Writes y into `out` again from what forward_from_input kept, bit for bit."""
    affine = norm.compute_affine(x.dtype)
    view_rows(out).copy_(normalize(view_rows(x), statistics) * affine[0] + affine[1:].sum(0))


def backward_from_input(grad_y: Tensor, x: Tensor, norm: Norm, statistics: Statistics) -> tuple[Tensor, Tensor]:
    """As backward, from what forward_from_input kept; the sums are in norm.sums_dtype."""
    xhat, affine = normalize(view_rows(x), statistics), norm.compute_affine(x.dtype)
    grad_x, sums = differentiate(view_rows(grad_y), xhat, statistics.rstd, affine)
    return grad_x.to(x.dtype).view(x.shape), sums.to(norm.sums_dtype)


def normalize(rows: Tensor, statistics: Statistics) -> Tensor:
    """Computes xhat of these rows and any columns of them."""
    rstd, mean = statistics
    centred = rows.to(rstd.dtype) if mean is None else rows - mean.unsqueeze(-1)
    return centred * rstd.unsqueeze(-1)


def differentiate(
    grad_y: Tensor, xhat: Tensor, rstd: Tensor, affine: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns grad_x [rows, h], written to `out` if given, and the sums [1 or 2, h], in rstd's dtype; a norm with a
    beta subtracts its mean."""
    gamma, *beta = affine
    grad, num_columns = grad_y.to(rstd.dtype), max(1, grad_y.size(-1))
    is_wide = out is not None and out.dtype == grad.dtype
    product = torch.mul(grad, xhat, out=out if is_wide else None)
    sums = torch.stack([product.sum(0), *(grad.sum(0) for _ in beta)])
    slope = product.mv(gamma).div_(num_columns).unsqueeze(-1)
    grad_x = torch.mul(grad, gamma, out=product).addcmul_(xhat, slope, value=-1)
    if beta:
        grad_x -= grad.mv(gamma).div_(num_columns).unsqueeze(-1)
    return torch.mul(grad_x, rstd.unsqueeze(-1), out=grad_x if out is None else out), sums


def get_lost_channels(
    affine: Tensor, dtype: torch.dtype, needs_grad: bool = True, has_static_shapes: bool = False
) -> Tensor:
    """Returns the indices of the channels that a y of `dtype` does not carry, int64 [k]; none if no gradient is needed,
    and none for fake tensors, which have no numbers.

    Raises: RuntimeError if there are such channels and has_static_shapes, as in a compiled graph, has no room for them.
    """
    if not needs_grad or isinstance(affine, FakeTensor):
        return torch.empty(0, dtype=torch.int64, device=affine.device)
    gamma, *beta = affine.abs()
    carried = (gamma > get_smallest_carried(dtype)) & (gamma <= LARGEST)
    if beta:
        carried &= beta[0] <= MAX_OFFSET * gamma
    lost: Tensor = (~carried).nonzero().squeeze(-1)
    if lost.numel() and has_static_shapes:
        raise RuntimeError(
            f"norm: the weight of {lost.numel()} of {affine.size(1)} channels is too small beside its bias for the "
            'output to carry the normalised input, for which a compiled graph has no room; use keep="recompute", in '
            'Megatron tempo.norm "recompute"'
        )
    return lost


def get_smallest_carried(dtype: torch.dtype) -> float:
    """Returns the |gamma| above which a y of `dtype` carries a channel."""
    # float16 has gradual underflow on all hardware. For other dtypes stay clear of subnormals, which some flush to 0.
    return torch.finfo(dtype).tiny if dtype == torch.float16 else SMALLEST

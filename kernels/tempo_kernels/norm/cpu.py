"""Computes the norms on a CPU, where the cost is passes over memory and calls of torch; eager.py is the specification.

Forward is torch's own LayerNorm. So is backward wherever x or the normalised x exists in at least float32; torch sums
16-bit gradients in 16 bits, so it cannot take those. The rest goes by blocks of rows, whose float32 copies stay in the
cache, or, for tensors that are large enough, through the compiled passes of cpu_compiled.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tempo_kernels.norm import cpu_compiled
from tempo_kernels.norm.lost_channels import list_lost_channels
from tempo_kernels.norm.operands import Kept, Norm, Statistics, choose_output_dtype, view_rows

BLOCK_ELEMENTS = 1 << 18

WHOLE_BLOCKS = 16
"""Blocks up to which torch's LayerNorm takes all rows in one call: a buffer of 16 MiB of float32. The passes that this
saves take more time than the cache does."""


def forward(x: Tensor, norm: Norm, needs_grad: bool = True, keeps_lost: bool = True) -> tuple[Tensor, Kept]:
    """As in eager.py."""
    rows, affine = view_rows(x), norm.compute_affine(x.dtype)
    dtype = choose_output_dtype(x.dtype, norm.weight.dtype)
    lost = list_lost_channels(norm, affine, dtype, needs_grad, keeps_lost)
    y_rows, statistics = _forward(rows, affine, norm)
    lost_xhat = torch.empty(rows.size(0), lost.numel(), dtype=dtype, device=x.device)
    if lost.numel():
        lost_xhat.copy_(_normalize(rows[:, lost], statistics))
    return _shape_output(y_rows.to(dtype), x), Kept(statistics.rstd, affine, lost, lost_xhat)


def backward(
    grad_y: Tensor, y: Tensor, kept: Kept, subtracts_mean: bool, x_dtype: torch.dtype, sums_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As in eager.py."""
    rows, (gamma, *beta) = view_rows(y), kept.affine
    if not kept.lost.numel():
        found = cpu_compiled.backward(view_rows(grad_y).to(x_dtype), rows, kept.affine, kept.rstd)
        if found is not None:
            return found[0].view(y.shape), found[1].to(sums_dtype)
    inverse = (gamma.index_fill(0, kept.lost, 1.0) if kept.lost.numel() else gamma).reciprocal()
    shift = beta[0] * -inverse if beta else None

    def recover_xhat(block: slice, out: Tensor | None) -> Tensor:
        y = rows[block]
        xhat: Tensor = torch.mul(y, inverse, out=out) if shift is None else torch.addcmul(shift, y, inverse, out=out)
        if kept.lost.numel():
            xhat.index_copy_(1, kept.lost, kept.lost_xhat[block].to(gamma.dtype))
        return xhat

    grad_x, sums = _differentiate(grad_y, recover_xhat, kept.rstd, kept.affine, subtracts_mean, x_dtype)
    return grad_x, sums.to(sums_dtype)


def forward_from_input(x: Tensor, norm: Norm) -> tuple[Tensor, Statistics]:
    """As in eager.py."""
    y_rows, statistics = _forward(view_rows(x), norm.compute_affine(x.dtype), norm)
    return _shape_output(y_rows.to(choose_output_dtype(x.dtype, norm.weight.dtype)), x), statistics


def refill(out: Tensor, x: Tensor, norm: Norm, statistics: Statistics) -> None:
    """As in eager.py; it computes the statistics again, which costs no further pass."""
    rows, affine = view_rows(x), norm.compute_affine(x.dtype)
    # A block may be too small for what forward was large enough for.
    is_compiled = not norm.subtracts_mean and cpu_compiled.pays_for(rows)
    for block in [slice(None)] if is_compiled else _blocks(rows):
        view_rows(out)[block] = _forward(rows[block], affine, norm)[0]


def backward_from_input(grad_y: Tensor, x: Tensor, norm: Norm, statistics: Statistics) -> tuple[Tensor, Tensor]:
    """As in eager.py."""
    (rstd, mean), affine, rows = statistics, norm.compute_affine(x.dtype), view_rows(x)
    grad_rows = view_rows(grad_y).to(x.dtype)
    found = cpu_compiled.backward_from_input(grad_rows, rows, affine, statistics)
    if found is None and mean is not None and x.dtype == affine.dtype:
        found = _differentiate_layer_norm(grad_rows, rows, mean, rstd, affine)
    if found is not None:
        return found[0].view(x.shape), found[1].to(norm.sums_dtype)

    def recover_xhat(block: slice, _: Tensor | None) -> Tensor:
        return _normalize(rows[block], Statistics(rstd[block], None if mean is None else mean[block]))

    grad_x, sums = _differentiate(grad_y, recover_xhat, rstd, affine, norm.subtracts_mean, x.dtype)
    return grad_x, sums.to(norm.sums_dtype)


def _forward(rows: Tensor, affine: Tensor, norm: Norm) -> tuple[Tensor, Statistics]:
    """Returns y [n, h] in the rows' dtype, and their statistics [n] in that of affine."""
    if norm.subtracts_mean:
        gamma, beta = affine.unbind()
        y, mean, rstd = torch.native_layer_norm(rows, rows.shape[1:], gamma, beta, norm.eps)
        # Real statistics have this dtype already. Torch's fake kernel wrongly gives 16-bit ones for 16-bit tensors.
        return y, Statistics(rstd.view(-1).to(affine.dtype), mean.view(-1).to(affine.dtype))
    if cpu_compiled.pays_for(rows):
        return cpu_compiled.rms_norm(rows, affine[0], norm.eps)
    y = torch.empty_like(rows, memory_format=torch.contiguous_format)
    rstd = torch.empty(rows.size(0), dtype=affine.dtype, device=rows.device)
    for block in _blocks(rows):
        x = rows[block].to(affine.dtype)
        of_block = x.square().mean(-1).add_(norm.eps).rsqrt_()
        rstd[block] = of_block
        torch.mul(x * of_block.unsqueeze(-1), affine[0], out=y[block])
    return y, Statistics(rstd, None)


def _shape_output(rows: Tensor, x: Tensor) -> Tensor:
    """Gives the rows x's shape, but not as a view to autograd, which would refuse to change a view in place."""
    y: Tensor = torch.ops.aten._unsafe_view(rows, x.shape)
    return y


def _normalize(x: Tensor, statistics: Statistics) -> Tensor:
    """Computes xhat of these rows and any columns."""
    rstd, mean = statistics
    centred = x.to(rstd.dtype) if mean is None else x - mean.unsqueeze(-1)
    return centred * rstd.unsqueeze(-1)


def _differentiate(
    grad_y: Tensor,
    recover_xhat: Callable[[slice, Tensor | None], Tensor],
    rstd: Tensor,
    affine: Tensor,
    subtracts_mean: bool,
    x_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Differentiates like backward; recover_xhat gives the xhat of a block of rows, and may write it to a tensor."""
    grad_rows, rstd = view_rows(grad_y), rstd.unsqueeze(-1)
    blocks = _blocks(grad_rows)
    if subtracts_mean and x_dtype == affine.dtype and len(blocks) <= WHOLE_BLOCKS:
        # torch gets x without its mean, and scales both xhat and grad_x by rstd: no pass over grad_x remains.
        centred = recover_xhat(slice(None), None).mul_(rstd.reciprocal())
        grad, sums = _differentiate_layer_norm(grad_rows.to(x_dtype), centred, torch.zeros_like(rstd), rstd, affine)
        return grad.view(grad_y.shape), sums
    grad_x = torch.empty(grad_y.shape, dtype=x_dtype, device=grad_y.device)
    rows_grad_x, sums = view_rows(grad_x), torch.zeros_like(affine)
    # torch differentiates a LayerNorm of xhat itself, whose rows have mean 0 and standard deviation 1.
    mean = torch.zeros_like(rstd[blocks[0]]) if blocks else rstd
    one = mean + 1.0
    for block in blocks:
        # xhat lies where grad_x will: memory that is in the cache anyway.
        out = rows_grad_x[block] if x_dtype == affine.dtype else None
        xhat, grad = recover_xhat(block, out), grad_rows[block].to(affine.dtype)
        if subtracts_mean:
            num_rows = grad.size(0)
            grad, part = _differentiate_layer_norm(grad, xhat, mean[:num_rows], one[:num_rows], affine)
        else:
            product = grad * xhat
            slope = product.mv(affine[0]).div_(max(1, grad.size(1)))
            grad, part = (grad * affine[0]).addcmul_(xhat, slope.unsqueeze(-1), value=-1), product.sum(0, keepdim=True)
        sums += part
        torch.mul(grad, rstd[block], out=rows_grad_x[block])
    return grad_x, sums


def _differentiate_layer_norm(
    grad_y: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, affine: Tensor
) -> tuple[Tensor, Tensor]:
    """Lets torch compute grad_x and the sums [2, h], all in one dtype."""
    operands = (grad_y, x, affine.shape[1:], mean, rstd, *affine.unbind())
    grad_x, *sums = torch.ops.aten.native_layer_norm_backward(*operands, [True, True, True])
    return grad_x, torch.stack(sums)


def _blocks(rows: Tensor) -> list[slice]:
    """Lists slices of whole rows whose float32 copies stay in the cache."""
    step = max(1, BLOCK_ELEMENTS // max(1, rows.size(-1)))
    return [slice(start, min(start + step, rows.size(0))) for start in range(0, rows.size(0), step)]

"""Computes the norms on a CPU, where the cost is passes over memory and calls of torch; eager.py is the specification.

LayerNorm's forward is torch's own, and so is its backward from a float32 input; torch adds 16-bit gradients up in 16
bits, so it cannot take those. The rest goes by blocks of rows that stay in the cache: through functions that Inductor
compiles where the tensor is large enough and a compiler is there, else as the specification writes it.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from tempo_kernels.compiled import Compiled, pays_for, split_columns
from tempo_kernels.norm.eager import differentiate, get_lost_channels, normalize
from tempo_kernels.norm.settings import Kept, Norm, Statistics, get_output_dtype, view_rows
from tempo_kernels.opaque import cut, get_block_size, is_recorded

BLOCK_ELEMENTS = 1 << 19
CHUNK_ROWS = 32
"""The rows over which compiled code sums before their data leaves the cache, if as many divide all rows."""
MIN_COMPILED_ELEMENTS = 1 << 18
"""The size of a tensor for which one compilation, which takes seconds, is worth its time."""


def forward(x: Tensor, norm: Norm, needs_grad: bool = True, has_static_shapes: bool = False) -> tuple[Tensor, Kept]:
    """As in eager.py."""
    affine, dtype = norm.compute_affine(x.dtype), get_output_dtype(x.dtype, norm.weight.dtype)
    lost = get_lost_channels(affine, dtype, needs_grad, has_static_shapes)
    y, statistics = forward_from_input(x, norm)
    lost_xhat = torch.empty(statistics.rstd.numel(), lost.numel(), dtype=dtype, device=x.device)
    if lost.numel():
        lost_xhat.copy_(normalize(view_rows(x)[:, lost], statistics))
    return y, Kept(statistics.rstd, affine, lost, lost_xhat)


def backward(
    grad_y: Tensor, y: Tensor, kept: Kept, subtracts_mean: bool, x_dtype: torch.dtype, sums_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As in eager.py."""
    grad_x = torch.empty(grad_y.shape, dtype=x_dtype, device=grad_y.device)
    return grad_x, _differentiate(view_rows(grad_y), view_rows(y), kept, None, view_rows(grad_x)).to(sums_dtype)


def forward_from_input(x: Tensor, norm: Norm) -> tuple[Tensor, Statistics]:
    """As in eager.py."""
    rows, affine = view_rows(x), norm.compute_affine(x.dtype)
    dtype = get_output_dtype(x.dtype, norm.weight.dtype)
    if norm.subtracts_mean:
        y_rows, mean, rstd = torch.native_layer_norm(rows, rows.shape[1:], affine[0], affine[1], norm.eps)
        # Real statistics have this dtype already. Torch's fake kernel wrongly gives 16-bit ones for 16-bit tensors.
        statistics = Statistics(rstd.view(-1).to(affine.dtype), mean.view(-1).to(affine.dtype))
        # Not a view to autograd, which would refuse to change a view in place.
        return torch.ops.aten._unsafe_view(y_rows.to(dtype), x.shape), statistics
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    return y, Statistics(_normalize_rms(rows, affine[0], norm.eps, view_rows(y)), None)


def refill(out: Tensor, x: Tensor, norm: Norm, statistics: Statistics) -> None:
    """As in eager.py; it computes the statistics again, which costs no further pass."""
    rows, affine = view_rows(x), norm.compute_affine(x.dtype)
    if not norm.subtracts_mean:
        _normalize_rms(rows, affine[0], norm.eps, view_rows(out))
        return
    for block in _blocks(rows):
        view_rows(out)[block] = torch.native_layer_norm(rows[block], rows.shape[1:], affine[0], affine[1], norm.eps)[0]


def backward_from_input(grad_y: Tensor, x: Tensor, norm: Norm, statistics: Statistics) -> tuple[Tensor, Tensor]:
    """As in eager.py."""
    (rstd, mean), affine, rows = statistics, norm.compute_affine(x.dtype), view_rows(x)
    if mean is not None and x.dtype == affine.dtype:
        operands = (view_rows(grad_y).to(x.dtype), rows, rows.shape[1:], mean, rstd, *affine)
        grad, *sums = torch.ops.aten.native_layer_norm_backward(*operands, [True, True, True])
        return grad.view(x.shape), torch.stack(sums).to(norm.sums_dtype)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kept = Kept(rstd, affine, *[rows.new_empty(0, 0)] * 2)
    return grad_x, _differentiate(view_rows(grad_y), rows, kept, statistics, view_rows(grad_x)).to(norm.sums_dtype)


def _normalize_rms(rows: Tensor, gamma: Tensor, eps: float, out: Tensor) -> Tensor:
    """Fills out [n, h] with an RMSNorm's y and returns rstd [n] in gamma's dtype."""
    if pays_for(rows, MIN_COMPILED_ELEMENTS, *rows.shape):
        # contiguous: Dynamo would compile strides in. A number would be compiled in, too.
        operands = split_columns(rows.size(-1), rows.contiguous(), gamma, out)
        found: Tensor = _normalize_rms_compiled(*operands, torch.full((1,), eps, dtype=gamma.dtype))
        return found
    rstd = torch.empty(rows.size(0), dtype=gamma.dtype, device=rows.device)
    for block in _blocks(rows):
        x = rows[block].to(gamma.dtype)
        rstd[block] = x.square().mean(-1).add_(eps).rsqrt_()
        torch.mul(x * rstd[block].unsqueeze(-1), gamma, out=out[block])
    return rstd


def _differentiate(grad_y: Tensor, source: Tensor, kept: Kept, statistics: Statistics | None, grad_x: Tensor) -> Tensor:
    """Fills grad_x [n, h] and returns the sums [1 or 2, h] in affine's dtype. `source` is x where its statistics are
    given, else y."""
    chunk_rows = math.gcd(source.size(0), CHUNK_ROWS)
    if not kept.lost.numel() and pays_for(source, MIN_COMPILED_ELEMENTS, *source.shape, chunk_rows):
        return _differentiate_compiled(grad_y.to(grad_x.dtype), source, kept, statistics, grad_x)
    rstd, affine, lost, lost_xhat = kept
    sums, scale, shift = torch.zeros_like(affine), affine[0].reciprocal(), affine[1:].sum(0)
    for block in _blocks(source):
        if statistics is None:
            # An RMSNorm has nothing to subtract.
            xhat = source[block] * scale if affine.size(0) == 1 else (source[block] - shift).mul_(scale)
            if lost.numel():
                xhat.index_copy_(1, lost, lost_xhat[block].to(xhat.dtype))
        else:
            mean = None if statistics.mean is None else statistics.mean[block]
            xhat = normalize(source[block], Statistics(statistics.rstd[block], mean))
        sums += differentiate(grad_y[block], xhat, rstd[block], affine, grad_x[block])[1]
    return sums


def _differentiate_compiled(
    grad_y: Tensor, source: Tensor, kept: Kept, statistics: Statistics | None, grad_x: Tensor
) -> Tensor:
    affine, (num_rows, width) = kept.affine, source.shape
    chunks = (-1, math.gcd(num_rows, CHUNK_ROWS))
    matrices = (t.contiguous().view(*chunks, width) for t in (grad_y, source, grad_x))
    vectors = affine, affine[1:].sum(0), affine[0].reciprocal()
    grad_y, source, out, affine, shift, scale = split_columns(width, *matrices, *vectors)
    rstd = kept.rstd.view(*chunks, 1, 1)
    if statistics is not None:
        shift, scale = torch.zeros_like(rstd) if statistics.mean is None else statistics.mean.view_as(rstd), rstd
    sums: Tensor = _differentiate_rows(grad_y, source, affine, shift, scale, rstd, out)
    return sums.sum(1).flatten(1)


# What is compiled has columns [groups, lanes], and chunks of rows where it sums over rows.
@partial(Compiled, has_lanes=True)
def _normalize_rms_compiled(x: Tensor, gamma: Tensor, out: Tensor, eps: Tensor) -> Tensor:
    rstd = (x.float().square().mean((-2, -1), keepdim=True) + eps).rsqrt()
    out.copy_(x.float() * rstd * gamma)
    return rstd.flatten()


@partial(Compiled, has_lanes=True)
def _differentiate_rows(
    grad_y: Tensor, source: Tensor, affine: Tensor, shift: Tensor, scale: Tensor, rstd: Tensor, out: Tensor
) -> Tensor:
    """Fills out with grad_x of a norm whose xhat is (source - shift) * scale. Returns the sums over the rows of each
    chunk, [1 or 2, chunks, groups, lanes]."""
    grad, xhat = grad_y.float(), (source.float() - shift) * scale
    g = grad * affine[0]
    grad_x, sums = g - xhat * (g * xhat).mean((-2, -1), keepdim=True), [(grad * xhat).sum(1)]
    if len(affine) == 2:
        grad_x, sums = grad_x - g.mean((-2, -1), keepdim=True), [*sums, grad.sum(1)]
    out.copy_(grad_x * rstd)
    return torch.stack(sums)


def _blocks(rows: Tensor) -> list[slice]:
    """Lists slices of whole rows, of about the same length, whose float32 copies stay in the cache."""
    num_blocks = 1 if is_recorded() else max(1, -(-rows.numel() // get_block_size("norm", BLOCK_ELEMENTS)))
    return cut(rows.size(0), max(1, -(-rows.size(0) // num_blocks)))

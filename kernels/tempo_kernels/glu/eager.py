"""activation(gate) * up in plain torch: the specification.

    gate, up = halves of x + bias       y = activation(gate) up
    grad_gate = grad_y up activation'(gate),  grad_up = grad_y activation(gate)

Arithmetic is float32 (float64 for float64 inputs) with one rounding at the end. Work goes block by block of rows whose
float32 copies stay in the cache; large tensors on a CPU go through one_pass.py, the same formulas compiled.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tempo_kernels.glu import one_pass
from tempo_kernels.glu.formulas import gradients, product

BLOCK_ELEMENTS = 1 << 18


def forward(x: Tensor, bias: Tensor | None, activation: str, out: Tensor | None = None) -> Tensor:
    """y [..., f], contiguous, for x [..., 2f]; activation is "silu", "gelu", "gelu_tanh" or "relu"."""
    y = torch.empty(*x.shape[:-1], x.size(-1) // 2, dtype=x.dtype, device=x.device) if out is None else out
    if one_pass.pays_for(x):
        compiled = one_pass.forward(x.contiguous().view(-1, x.size(-1)), bias, activation)
        return compiled.view(y.shape) if out is None else out.copy_(compiled.view(y.shape))
    for rows, total in _blocks(x, bias):
        gate, up = total.chunk(2, -1)
        y.view(-1, y.size(-1))[rows] = product(gate, up, activation)
    return y


def backward(
    grad_y: Tensor, x: Tensor, bias: Tensor | None, activation: str, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """grad_x [..., 2f], contiguous, and its sum over all dimensions but the last in float32 [2f]."""
    if one_pass.pays_for(x):
        rows_grad_y = grad_y.contiguous().view(-1, grad_y.size(-1))
        rows_grad_x = one_pass.backward(rows_grad_y, x.contiguous().view(-1, x.size(-1)), bias, activation)
        return rows_grad_x.view(x.shape), rows_grad_x.sum(0, dtype=torch.float32) if has_grad_bias else None
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    grad_bias = torch.zeros(x.size(-1), dtype=compute_dtype, device=x.device) if has_grad_bias else None
    rows_grad_y = grad_y.contiguous().view(-1, max(grad_y.size(-1), 1))
    for rows, total in _blocks(x, bias):
        grad = rows_grad_y[rows].to(compute_dtype)
        gate, up = total.chunk(2, -1)
        halves = gradients(grad, gate, up, activation)
        for half, place in zip(halves, grad_x.view(-1, x.size(-1))[rows].chunk(2, -1), strict=True):
            place.copy_(half)
        if grad_bias is not None:
            grad_bias += torch.cat([half.sum(0) for half in halves])
    return grad_x, grad_bias


def _blocks(x: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """(rows, x + bias of these rows [rows, 2f]) for consecutive blocks."""
    width = x.size(-1)
    if x.numel() == 0:
        return
    rows_x = x.contiguous().view(-1, width)
    step = max(1, BLOCK_ELEMENTS // width)
    for start in range(0, rows_x.size(0), step):
        rows = slice(start, min(start + step, rows_x.size(0)))
        total = rows_x[rows].to(torch.promote_types(x.dtype, torch.float32))
        yield rows, total if bias is None else total + bias

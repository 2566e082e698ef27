"""Computes activation(gate) * up on a CPU, where the cost is passes over memory; eager.py is the specification.

Work goes by blocks of rows whose float32 copies stay in the cache. From COMPILED_ELEMENTS on, forward and backward are
one compiled pass each.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from tempo_kernels import compiled
from tempo_kernels.activation import ACTIVATIONS, sum_rows
from tempo_kernels.compiled import Compiled, split_columns

BLOCK_ELEMENTS = 1 << 18
COMPILED_ELEMENTS = 1 << 20
"""Elements of x from which on one compilation, which takes seconds, is worth its time."""


def forward(x: Tensor, bias: Tensor | None, activation: str, out: Tensor | None = None) -> Tensor:
    """As in eager.py."""
    y = torch.empty(*x.shape[:-1], x.size(-1) // 2, dtype=x.dtype, device=x.device) if out is None else out
    if _pays_to_compile(x):
        found: Tensor = _compile_forward(activation)(*_split(x), *_split(_default_bias(x, bias)))
        return found.view(y.shape) if out is None else out.copy_(found.view(y.shape))
    for rows, total in _add_in_blocks(x, bias):
        gate, up = total.chunk(2, -1)
        y.view(-1, y.size(-1))[rows] = ACTIVATIONS[activation].value(gate) * up
    return y


def backward(
    grad_y: Tensor, x: Tensor, bias: Tensor | None, activation: str, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """As in eager.py, except that the compiled pass sums the rounded grad_x to grad_bias."""
    if _pays_to_compile(x):
        rows_grad_y = grad_y.contiguous().view(-1, grad_y.size(-1))
        operands = (*split_columns(grad_y.size(-1), rows_grad_y), *_split(x), *_split(_default_bias(x, bias)))
        grad_x: Tensor = _compile_backward(activation)(*operands).view(x.shape)
        return grad_x, sum_rows(grad_x) if has_grad_bias else None
    rows_grad_y = grad_y.contiguous().view(-1, max(grad_y.size(-1), 1))
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    grad_bias = torch.zeros(x.size(-1), dtype=compute_dtype, device=x.device) if has_grad_bias else None
    for rows, total in _add_in_blocks(x, bias):
        gate, up = total.chunk(2, -1)
        halves = _differentiate(rows_grad_y[rows].to(compute_dtype), gate, up, activation)
        for half, place in zip(halves, grad_x.view(-1, x.size(-1))[rows].chunk(2, -1), strict=True):
            place.copy_(half)
        if grad_bias is not None:
            grad_bias += torch.cat([half.sum(0) for half in halves])
    return grad_x, grad_bias


def _differentiate(grad_y: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Returns grad_gate and grad_up."""
    return ACTIVATIONS[activation].grad_x(grad_y * up, gate), grad_y * ACTIVATIONS[activation].value(gate)


def _add_in_blocks(x: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Yields (slice of rows, x + bias of these rows [rows, 2f]) for consecutive blocks."""
    width = x.size(-1)
    if x.numel() == 0:
        return
    rows_x = x.contiguous().view(-1, width)
    step = max(1, BLOCK_ELEMENTS // width)
    for start in range(0, rows_x.size(0), step):
        rows = slice(start, min(start + step, rows_x.size(0)))
        total = rows_x[rows].to(torch.promote_types(x.dtype, torch.float32))
        yield rows, total if bias is None else total + bias


def _pays_to_compile(x: Tensor) -> bool:
    width = x.size(-1)
    return compiled.pays_for(x, COMPILED_ELEMENTS, x.numel() // max(width, 1), width // 2)


def _default_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    # Adding -0 leaves every number as it is; adding 0 would turn -0 into 0.
    return torch.full(x.shape[-1:], -0.0, dtype=x.dtype) if bias is None else bias.contiguous()


def _split(x: Tensor) -> list[Tensor]:
    """Returns [x] viewed as [n, 2, groups, lanes], gate then up; a bias has no n."""
    rows = x.contiguous().view(*[-1] * (x.dim() > 1), 2, x.size(-1) // 2)
    return split_columns(x.size(-1) // 2, rows)


@functools.cache
def _compile_forward(activation: str) -> Compiled:
    def forward(x: Tensor, bias: Tensor) -> Tensor:
        gate, up = (x.float() + bias).unbind(1)
        return (ACTIVATIONS[activation].value(gate) * up).to(x.dtype)

    return Compiled(forward, has_lanes=True)


@functools.cache
def _compile_backward(activation: str) -> Compiled:
    def backward(grad_y: Tensor, x: Tensor, bias: Tensor) -> Tensor:
        gate, up = (x.float() + bias).unbind(1)
        # Round before joining: Inductor does not vectorise the opposite order.
        halves = _differentiate(grad_y.float(), gate, up, activation)
        return torch.stack([half.to(x.dtype) for half in halves], 1)

    return Compiled(backward, has_lanes=True)

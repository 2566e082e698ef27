"""Gated units of eager.py over large tensors on a CPU, each direction in one compiled pass."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tempo_kernels import compiled
from tempo_kernels.compiled import Compiled
from tempo_kernels.glu import formulas

MIN_ELEMENTS = (1 << 20) + 1
"""Elements of x from which on the compiler, asked once, is worth its seconds."""


def pays_for(x: Tensor) -> bool:
    """Whether x [..., 2f] is large enough."""
    width = x.size(-1)
    return compiled.pays_for(x, MIN_ELEMENTS, x.numel() // max(width, 1), width // 2)


def forward(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """y [n, f] of x [n, 2f]."""
    return _forward(activation)(x, _bias(x, bias))


def backward(grad_y: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """grad_x [n, 2f]."""
    return _backward(activation)(grad_y, x, _bias(x, bias))


def _bias(x: Tensor, bias: Tensor | None) -> Tensor:
    # -0 is what changes nothing, not even -0.
    return torch.full(x.shape[-1:], -0.0, dtype=x.dtype) if bias is None else bias.contiguous()


@functools.cache
def _forward(activation: str) -> Compiled:
    def forward(x: Tensor, bias: Tensor) -> Tensor:
        gate, up = (x.float() + bias).chunk(2, -1)
        return formulas.product(gate, up, activation).to(x.dtype)

    return Compiled(forward)


@functools.cache
def _backward(activation: str) -> Compiled:
    def backward(grad_y: Tensor, x: Tensor, bias: Tensor) -> Tensor:
        gate, up = (x.float() + bias).chunk(2, -1)
        return torch.cat(formulas.gradients(grad_y.float(), gate, up, activation), dim=-1).to(x.dtype)

    return Compiled(backward)

"""Specifies activation(gate) * up in plain torch.

    gate, up = halves of x + bias       y = activation(gate) up
    grad_gate = grad_y up activation'(gate),  grad_up = grad_y activation(gate)

Arithmetic is float32 (float64 for float64 inputs) with one rounding at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tempo_kernels.activation import ACTIVATIONS


def forward(x: Tensor, bias: Tensor | None, activation: str, out: Tensor | None = None) -> Tensor:
    """Returns y [..., f], contiguous, for x [..., 2f]; activation is "silu", "gelu", "gelu_tanh" or "relu"."""
    gate, up = _split_sum(x, bias)
    y = (ACTIVATIONS[activation].value(gate) * up).to(x.dtype)
    return y if out is None else out.copy_(y)


def backward(
    grad_y: Tensor, x: Tensor, bias: Tensor | None, activation: str, has_grad_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns grad_x [..., 2f], contiguous, and its sum over all dimensions but the last in float32 [2f]."""
    gate, up = _split_sum(x, bias)
    grad_y = grad_y.to(gate.dtype)
    grad_gate = ACTIVATIONS[activation].grad_x(grad_y * up, gate)
    grad_x = torch.cat([grad_gate, grad_y * ACTIVATIONS[activation].value(gate)], dim=-1)
    # unsqueeze: sum over an empty tuple of dimensions would sum over all of them.
    grad_bias = grad_x.unsqueeze(0).sum(tuple(range(x.dim()))) if has_grad_bias else None
    return grad_x.to(x.dtype), grad_bias


def _split_sum(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns both halves of x + bias in the dtype of the arithmetic."""
    total = x.contiguous().to(torch.promote_types(x.dtype, torch.float32))
    gate, up = (total if bias is None else total + bias).chunk(2, -1)
    return gate.contiguous(), up.contiguous()

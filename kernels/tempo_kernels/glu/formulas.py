"""A gated unit and its derivative, of tensors in the dtype of computation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up."""
    return _activated(gate, activation) * up


def gradients(grad_y: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """grad_gate and grad_up."""
    grad = grad_y * up
    if activation == "silu":
        grad_gate = torch.ops.aten.silu_backward(grad, gate)
    elif activation == "relu":
        grad_gate = torch.ops.aten.threshold_backward(grad, gate, 0)
    else:
        grad_gate = torch.ops.aten.gelu_backward(grad, gate, approximate=_form(activation))
    return grad_gate, grad_y * _activated(gate, activation)


def _activated(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(gate)
    if activation == "relu":
        return F.relu(gate)
    return F.gelu(gate, approximate=_form(activation))


def _form(activation: str) -> str:
    return "tanh" if activation == "gelu_tanh" else "none"

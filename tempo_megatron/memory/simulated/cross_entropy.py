"""Stands in for Megatron's fused cross entropy, which torch.compile makes of Python and which no fake tensor runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tempo_megatron.memory.simulated.stand_in import Made, stand_in


def put_fused_cross_entropy(model: Any) -> None:
    """Let the model compute its loss as with --cross-entropy-loss-fusion and the implementation "native"."""
    model.compute_language_model_loss = _compute_loss


def _compute_loss(labels: Tensor, logits: Tensor) -> Tensor:
    """[b, s] of labels [b, s] and logits [s, b, v/t].

    Keeps what the eager one does: the softmax in float32, in the place of the logits' copy, and two index tensors. Its
    backward has one more tensor of that size: it subtracts 1 at the labels in place (fusions/fused_cross_entropy.py:
    calculate_gradients of megatron-core 0.16.1), which compiled code does in a copy.
    """
    labels, dtype = labels.transpose(0, 1).contiguous(), logits.dtype

    def make(logits: Tensor) -> Made:
        softmax = logits.float() if logits.dtype != torch.float32 else logits.clone()
        kept = softmax, torch.empty_like(labels, dtype=torch.bool), labels.flatten().clone()
        return torch.empty_like(labels, dtype=torch.float32), kept

    loss: Tensor = stand_in(make, logits, differentiate=lambda kept, _: [kept[0].clone().to(dtype)])
    return loss.transpose(0, 1).contiguous()

"""Stands in for Megatron's fused cross entropy, which torch.compile makes of Python and which no fake tensor runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def put_fused_cross_entropy(model: Any) -> None:
    """Let the model compute its loss as with --cross-entropy-loss-fusion and the implementation "native"."""
    model.compute_language_model_loss = _compute_loss


def _compute_loss(labels: Tensor, logits: Tensor) -> Tensor:
    """[b, s] of labels [b, s] and logits [s, b, v/t]."""
    loss: Tensor = _FusedCrossEntropy.apply(logits, labels.transpose(0, 1).contiguous())
    return loss.transpose(0, 1).contiguous()


class _FusedCrossEntropy(torch.autograd.Function):
    """Keeps what the eager one does: the softmax in float32, in the place of the logits' copy, and two index tensors.

    Its backward has one more tensor of that size: it subtracts 1 at the labels in place
    (fusions/fused_cross_entropy.py: calculate_gradients of megatron-core 0.16.1), which compiled code does in a copy.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        softmax = logits.float() if logits.dtype != torch.float32 else logits.clone()
        ctx.dtype = logits.dtype
        ctx.save_for_backward(softmax, torch.empty_like(labels, dtype=torch.bool), labels.flatten().clone())
        return torch.empty_like(labels, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None]:
        softmax = ctx.saved_tensors[0]
        return softmax.clone().to(ctx.dtype), None

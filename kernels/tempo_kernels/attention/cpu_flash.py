"""Calls torch's flash attention for CPUs, which has no dropout and no window."""

from __future__ import annotations

import torch
from torch import Tensor

from tempo_kernels.attention.settings import Gradients, Inputs, Kept, Settings

# exp(score - logsumexp) inherits the logsumexp's rounding error, below this limit 4e-6: little beside 16 bits.
LARGEST_LOGSUMEXP = 64.0

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def can_run(inputs: Inputs, settings: Settings) -> bool:
    """Whether torch computes this call: no dropout, no mask, scores as they are, and a query sees every key or those up
    to itself."""
    q, k, v, mask, key_lengths = inputs[:5]
    is_plain = q.device.type == "cpu" and settings.dropout_p == 0 and mask is None and key_lengths is None
    is_plain &= settings.softcap is None and not inputs.changes_scores
    # Its causal mask starts at the first key.
    fits = settings.compute_window(q.size(0), k.size(0)) in ((None, None), (None, 0))
    return is_plain and fits and q.size(-1) == v.size(-1) and 0 not in (q.numel(), k.numel())


def forward(inputs: Inputs, settings: Settings) -> tuple[Tensor, Tensor]:
    """As in eager.py."""
    out, logsumexp = _forward(*_order_heads(inputs), 0.0, _is_causal(inputs, settings), scale=settings.softmax_scale)
    return out.permute(2, 0, 1, 3).contiguous(), logsumexp.contiguous()


def is_small(logsumexp: Tensor) -> bool:
    """Whether the rounding of these logsumexps costs nothing; fake tensors, which have no numbers, count as small."""
    return type(logsumexp) is not Tensor or bool(logsumexp.abs().amax() <= LARGEST_LOGSUMEXP)


def can_run_backward(inputs: Inputs, settings: Settings) -> bool:
    """Whether torch's gradients are as exact as ours: in float32 the blocks of cpu.py are three times as exact."""
    return can_run(inputs, settings) and inputs.q.dtype in (torch.bfloat16, torch.float16)


def backward(grad_out: Tensor, inputs: Inputs, kept: Kept, settings: Settings) -> Gradients:
    """grad_q, grad_k, grad_v in the shapes of q, k, v."""
    assert kept.out is not None
    grad_out, out = (t.permute(1, 2, 0, 3) for t in (grad_out, kept.out))
    operands = (grad_out, *_order_heads(inputs), out, kept.logsumexp, 0.0, _is_causal(inputs, settings))
    grads = _backward(*operands, scale=settings.softmax_scale)
    grad_q, grad_k, grad_v = (_sum_heads(*pair) for pair in zip(grads, inputs[:3], strict=True))
    return Gradients(grad_q, grad_k, grad_v)


def _is_causal(inputs: Inputs, settings: Settings) -> bool:
    """Whether a query sees keys up to itself, be it by `causal` or by a window without a left end."""
    return settings.compute_window(inputs.q.size(0), inputs.k.size(0))[1] is not None


def _order_heads(inputs: Inputs) -> tuple[Tensor, ...]:
    """q, k and v as [b, a, s, d], each group once per head that reads it; torch assumes that d has stride 1."""
    heads = inputs.q.size(2)
    ordered = ((t if t.stride(3) == 1 else t.contiguous()).permute(1, 2, 0, 3) for t in inputs[:3])
    return tuple(t if t.size(1) == heads else t.repeat_interleave(heads // t.size(1), dim=1) for t in ordered)


def _sum_heads(grad: Tensor, t: Tensor) -> Tensor:
    """[s, b, g, d] as t of grad [b, a, s, d], summed over the heads of a group."""
    if grad.size(1) != t.size(2):
        grad = grad.unflatten(1, (t.size(2), -1)).sum(2)
    return grad.permute(2, 0, 1, 3).contiguous()

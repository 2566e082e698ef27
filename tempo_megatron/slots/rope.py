"""Rotary position embeddings that keep nothing of their own for backward.

Megatron's unfused ones round the cosines and sines of all positions to the dtype of queries and keys, once for each of
the two in every layer, and autograd keeps all four. Here backward computes them again from the angles, which Megatron
makes once for all layers and micro batches and caches, whatever autograd holds.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, config: Any, cu_seqlens: Tensor | None = None, mscale: float = 1.0, **others: Any
) -> Tensor:
    """Megatron's function of this name, with the same result and the same gradient, bit for bit.

    Packed rows, Transformer Engine's fused kernel and latent attention have Megatron's own: the fused kernel keeps the
    angles only as it is, and the angles of a packed row are put together anew in each layer.

    Args:
        t: queries or keys [s, b, a, d].
        freqs: angles [s, 1 or b, 1, rotated channels], float32.
        config: the TransformerConfig.
        cu_seqlens, mscale, others: as Megatron's.

    Returns:
        t of the same shape and dtype, rotated.

    Keeps for backward: nothing but `freqs`, which all layers share.
    Error: none.
    """
    is_plain = cu_seqlens is None and not config.apply_rope_fusion and not config.multi_latent_attention
    if is_plain and torch.is_grad_enabled() and t.requires_grad and not freqs.requires_grad:
        found: Tensor = _Rotate.apply(t, freqs, config, mscale, others)
    else:
        settings = {"config": config, "cu_seqlens": cu_seqlens, "mscale": mscale, **others}
        found = rope_utils.apply_rotary_pos_emb(t, freqs, **settings)
    return found


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, freqs: Tensor, config: Any, mscale: float, others: dict[str, Any]) -> Tensor:
        # Not for autograd to keep: Megatron's cache owns the angles, and nobody writes to them.
        ctx.form = freqs, mscale, config.rotary_interleaved
        rotated: Tensor = rope_utils.apply_rotary_pos_emb(t, freqs, config=config, mscale=mscale, **others)
        return rotated

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        freqs, mscale, is_interleaved = ctx.form
        size = freqs.size(-1)
        rotated, rest = grad[..., :size], grad[..., size:]
        cos, sin = ((function(freqs) * mscale).to(grad.dtype) for function in (torch.cos, torch.sin))
        # y = t cos + R t sin, where R, a quarter turn of each pair of channels, has the transpose -R.
        rotated = rotated * cos - rope_utils._rotate_half(rotated * sin, is_interleaved)
        return torch.cat((rotated, rest), dim=-1), None, None, None, None

"""Scaled-dot-product attention with dropout for models of transformers, by its registry of attention functions.

Without dropout stock keeps what ours keeps, and runs: q, k, v, the output and a logsumexp. With dropout torch keeps an
s*s tensor on a CPU, and on a GPU draws from a generator, so that masks depend on who draws when.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from tempo_kernels.attention import attention
from tempo_kernels.derivative import first_derivative_only
from tempo_kernels.refill import allow_refill
from tempo_torch.position import Place

NAME = "tempo"
PLACE = "tempo_place"
"""The attribute of an attention module that holds its Place."""

_hidden_masks: Any = WeakIdKeyDictionary()
"""Of each mask, its version and its inverse."""


def use_attention(model: Any) -> str | None:
    """Give `model` Tempo's attention; the reason where that cannot be."""
    config = getattr(model, "config", None)
    if not hasattr(model, "set_attn_implementation") or config is None:
        return "the model has no registry of attention functions, as models of transformers have"
    if config._attn_implementation == NAME:
        return "it is Tempo's already"
    if config._attn_implementation != "sdpa":
        return f'attn_implementation is "{config._attn_implementation}"; expected "sdpa"'
    if any("relative_attention_bias" in name for name, _ in model.named_modules()):
        return "it adds a bias by position to its scores"
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return None


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """What transformers' sdpa_attention_forward returns: (out [b, s, a, d], None) of q, k, v [b, a or g, s, d].

    With dropout, a mask by position. What keeps the next linear from keeping a second output is a promise.
    Raises ValueError for a module that was not given to tempoize, and where scores are changed by a tensor.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    p = kwargs.get("dropout", 0.0) or 0.0
    if p == 0.0 or query.numel() == 0:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
    place: Place | None = getattr(module, PLACE, None)
    if place is None:
        raise ValueError(
            f'a {type(module).__name__} asks for attention "{NAME}", but was not given to tempoize; expected a module '
            'of a model that was; set attn_implementation to "sdpa", or call tempoize'
        )
    if kwargs.get("position_bias") is not None or (attention_mask is not None and attention_mask.dtype != torch.bool):
        raise ValueError(
            f"{type(module).__name__} adds a tensor to its scores, which Tempo's attention with dropout does not; "
            'expected a bool mask or none; give tempoize attention="off"'
        )
    if kwargs.get("softcap") is not None or kwargs.get("cache") is not None:
        raise ValueError(
            f"{type(module).__name__} caps its scores or pages its keys, which Tempo's attention with dropout does "
            'not; expected neither; give tempoize attention="off"'
        )
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    causal = causal and attention_mask is None and query.size(2) > 1
    if causal and key.size(2) > query.size(2):  # as sdpa_attention_forward has it
        key, value = (t[:, :, : query.size(2)] for t in (key, value))
    scale = kwargs.get("scaling")
    draw_key, first_sample, _ = place.find(query.device)
    out = attention(
        *(t.permute(2, 0, 1, 3) for t in (query, key, value)),
        causal=causal,
        mask=None if attention_mask is None else _hide(attention_mask),
        softmax_scale=query.size(-1) ** -0.5 if scale is None else scale,
        dropout_p=p,
        dropout_key=draw_key,
        first_sample=first_sample,
    )
    return put_batch_first(out), None


def _hide(attention_mask: Tensor) -> Tensor:
    """True where a key is hidden: one tensor for all layers, which are given the same mask, unless it was written to
    between them."""
    if torch.compiler.is_compiling() or attention_mask.is_inference():  # neither counts what is written
        return ~attention_mask
    version, hidden = _hidden_masks.get(attention_mask, (None, None))
    if version != attention_mask._version:
        hidden = ~attention_mask
        _hidden_masks[attention_mask] = attention_mask._version, hidden
    return hidden  # type: ignore[no-any-return]


def put_batch_first(out: Tensor) -> Tensor:
    """out [s, b, ...] as [b, s, ...], contiguous, and made again from `out`, which attention keeps on a GPU."""
    y = out.transpose(0, 1)
    if y.is_contiguous() or torch.compiler.is_compiling():
        return y.contiguous()
    first: Tensor = _BatchFirst.apply(out)
    return first


class _BatchFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y = x.transpose(0, 1).contiguous()
        allow_refill(ctx, y, _refill)
        return y

    @staticmethod
    @first_derivative_only("attention", "attention")
    def backward(ctx: Any, grad_y: Tensor) -> Tensor:
        return grad_y.transpose(0, 1)


@torch.no_grad()
def _refill(ctx: Any, out: Tensor) -> None:
    (x,) = ctx.saved_tensors
    out.copy_(x.transpose(0, 1))

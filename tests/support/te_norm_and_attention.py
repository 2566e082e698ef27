"""Stand-ins for Transformer Engine's norms and attention; see te_stand_ins.py."""

from __future__ import annotations

from typing import Any

import torch
from te_stand_ins import TransformerEngineBaseModule, normalize
from torch import Tensor
from torch.nn import functional as F


class _Norm(torch.nn.Module):
    """`LayerNorm` and `RMSNorm`: operations of `ops` since 1.13, which have an extra state."""

    normalization = ""

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: Any = "cpu",
        hidden_size: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        size = normalized_shape if hidden_size is None else hidden_size  # the former name
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        start = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = torch.nn.Parameter(start(size, dtype=params_dtype, device=device))
        self.bias = None
        if self.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(size, dtype=params_dtype, device=device))
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return normalize(x, self.weight, self.bias, self.eps, self.zero_centered_gamma, self.normalization)

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        assert state is None or state.numel() == 0


class LayerNorm(_Norm):
    normalization = "LayerNorm"


class RMSNorm(_Norm):
    normalization = "RMSNorm"


class DotProductAttention(TransformerEngineBaseModule):
    """torch's attention on [s, b, a, d]."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        attn_mask_type: str = "causal",
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.attention_dropout, self.softmax_scale, self.attn_mask_type = (
            attention_dropout,
            softmax_scale,
            attn_mask_type,
        )
        self.register_load_state_dict_post_hook(_forget_extra_state)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, attn_mask_type: Any = None, **_: Any
    ) -> Tensor:
        mask_type = attn_mask_type or self.attn_mask_type
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        uses_mask = "padding" in mask_type or mask_type == "arbitrary"
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=~mask if uses_mask else None,
            dropout_p=self.attention_dropout if self.training else 0.0,
            is_causal=mask_type == "causal",
            scale=self.softmax_scale,
            enable_gqa=q.size(1) != k.size(1),
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def _forget_extra_state(_: Any, incompatible_keys: Any) -> None:
    for key in [key for key in incompatible_keys.missing_keys if "core_attention._extra_state" in key]:
        incompatible_keys.missing_keys.remove(key)

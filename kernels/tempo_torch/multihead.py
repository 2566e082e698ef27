"""Replaces nn.MultiheadAttention, also in nn.TransformerEncoder, by one whose dropout mask is a function of positions.

Without dropout, and in eval, stock runs with its fast path. In training with dropout, torch keeps s*s tensors on a CPU
and draws from a generator on any device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tempo_kernels.attention import attention
from tempo_torch.linear import drop_input
from tempo_torch.masks import read_once
from tempo_torch.replace import Replaced


class MultiheadAttention(Replaced):
    """nn.MultiheadAttention that uses Tempo's attention in training with dropout.

    Keeps for backward: its inputs, as stock does, q, k, v, the output of attention, and 4 bytes per query and head.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (out, weights or None) as stock does. Float masks of 0 and -inf, which stock's encoder makes, count
        as bool ones. Raises ValueError with attention="flash" for a call that Tempo's attention cannot serve."""
        call = (query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        self.tempo_place.note_call()
        if not self.training or self.dropout == 0.0:
            return super().forward(*call)  # type: ignore[misc,no-any-return]
        found = self._get_refusal(need_weights) or self._read_masks(query, key, key_padding_mask, attn_mask, is_causal)
        if isinstance(found, str):
            self.tempo_place.refuse(self, found)
            return super().forward(*call)  # type: ignore[misc,no-any-return]
        return self._attend(query, key, value, *found), None

    def _get_refusal(self, need_weights: bool) -> str | None:
        """Names what such a call asks for that Tempo's attention does not do; None if there is nothing."""
        if need_weights:
            return "returns its weights (need_weights=True)"
        if self.bias_k is not None:
            return "appends bias_k and bias_v to its keys and values"
        if self.add_zero_attn:
            return "appends a zero to its keys and values"
        return "drops all of its probabilities" if self.dropout == 1.0 else None

    def _read_masks(
        self, query: Tensor, key: Tensor, padding: Tensor | None, mask: Tensor | None, is_causal: bool
    ) -> tuple[bool, Tensor | None] | str:
        """Returns (whether attention is causal, what else is hidden), or the reason why the masks do more than hide."""
        if query.dim() != 3 or query.is_nested or key.is_nested or query.numel() == 0 or key.numel() == 0:
            return "takes nested or empty tensors, or one sample without a batch"
        tokens, samples = (1, 0) if self.batch_first else (0, 1)
        num_queries, num_keys, batch = query.size(tokens), key.size(tokens), query.size(samples)
        shapes = (None, (num_queries, num_keys), (batch * self.num_heads, num_queries, num_keys))
        fits = (None if mask is None else tuple(mask.shape)) in shapes and not (is_causal and mask is None)
        if not fits or (padding is not None and padding.shape != (batch, num_keys)):
            return "takes masks of shapes that do not fit"  # stock's error says how
        if is_causal and padding is None:  # stock does not read the mask then
            return (True, None) if num_queries == num_keys else "is causal with another number of keys than of queries"
        if mask is None and padding is None:
            return False, None
        hidden = read_once(_compute_hidden, (mask, padding), batch)
        return hidden if isinstance(hidden, str) else (False, hidden)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, causal: bool, hidden: Tensor | None) -> Tensor:
        # Lengths first: [s, b, a, d].
        q, k, v = (t.unflatten(-1, (self.num_heads, self.head_dim)) for t in self._project(query, key, value))
        if self.batch_first:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        draw = self.tempo_place.draw(self, query.device, q.size(1), self.num_heads, self.dropout)
        more: dict[str, Any] = {"softmax_scale": self.head_dim**-0.5, "hidden_rows": "zero"}  # as stock
        out = attention(q, k, v, causal=causal, mask=hidden, **more, **draw)
        y = F.linear(out.flatten(2), self.out_proj.weight, self.out_proj.bias)
        return y.transpose(0, 1) if self.batch_first else y

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Computes q, k, v by one matrix product per distinct input."""
        width = self.embed_dim
        inputs: tuple[Tensor, ...] = (query, key, value)
        sizes: tuple[int, ...] = (width, width, width)
        weights: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self._qkv_same_embed_dim:
            if key is value:
                inputs, sizes = ((key,), (3 * width,)) if query is key else ((query, key), (width, 2 * width))
            weights = self.in_proj_weight.split(sizes)
        biases: Any = [None] * len(sizes) if self.in_proj_bias is None else self.in_proj_bias.split(sizes)
        found: list[Tensor] = []
        for x, weight, bias in zip(inputs, weights, biases, strict=True):
            y = F.linear(x, weight, bias)
            if not torch.compiler.is_compiling():
                drop_input(x, y)
            found += y.split(width, -1)
        return found


def _compute_hidden(mask: Tensor | None, padding: Tensor | None, batch: int) -> Tensor | str:
    """Returns bool [b or 1, a or 1, sq or 1, sk], True where a mask [sq, sk] or [b*a, sq, sk] or a padding mask [b, sk]
    hides a key; or the reason why they do more."""
    hidden: Any = None
    for each in (mask, padding):
        if each is None:
            continue
        if each.dtype != torch.bool and (each.requires_grad or not each.is_floating_point() or _adds(each)):
            return "adds a tensor to its scores"
        found = each.detach() if each.dtype == torch.bool else each == float("-inf")
        shape = (batch, 1, 1, -1) if each is padding else (batch if found.dim() == 3 else 1, -1, *found.shape[-2:])
        found = found.view(shape)
        hidden = found if hidden is None else hidden | found
    return hidden  # type: ignore[no-any-return]


@torch._disable_dynamo  # type: ignore[attr-defined]
def _adds(mask: Tensor) -> bool:
    """Returns whether a float mask adds numbers other than 0 and -inf."""
    return bool(((mask != 0) & (mask != float("-inf"))).any())

"""Gives BLOOM and MPT of transformers Tempo's attention: ALiBi by slopes, dropout by position, and no s*s tensor.

Their attention modules compute everything themselves, [b, a, sq, sk] scores included, and ask no registry. In eval
stock runs.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor

from tempo_torch.attention import attend_by_position
from tempo_torch.functional import RedirectsFunctions
from tempo_torch.masks import read_once


class AlibiAttention(RedirectsFunctions):
    """An attention module with ALiBi that uses Tempo's attention in training.

    Where a mask hides later keys only, the distances are computed from slopes in float32. With any other mask BLOOM's
    own tensor [b * a, 1, sk] is added, which counts a sample's tokens without its padding.

    Keeps for backward: q, k, v, the output of attention, and 4 bytes per query and head; the model's masks and
    added tensors are shared by all layers.
    """

    slopes: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns (out, None) where stock returns (out, weights). Raises ValueError with attention="flash" for a call
        that Tempo's attention cannot serve."""
        self.tempo_place.note_call()
        if not self.training:
            return super().forward(*args, **kwargs)
        given = inspect.signature(self.stock_class.forward).bind(self, *args, **kwargs).arguments
        mask = given.get("attention_mask")
        found = self._get_refusal(given) or ((False, None) if mask is None else read_once(_read_mask, (mask,)))
        if isinstance(found, str):
            self.tempo_place.refuse(self, found)
            return super().forward(*args, **kwargs)
        return self._compute(given, *found), None

    def _get_refusal(self, given: dict[str, Any]) -> str | None:
        """Names what a call asks for that Tempo's attention does not do; None if there is nothing."""
        if given.get("output_attentions"):
            return "returns its weights (output_attentions=True)"
        if given.get("head_mask") is not None:
            return "multiplies its weights by a head_mask"
        return None

    def _compute(self, given: dict[str, Any], causal: bool, hidden: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _attend(
        self, given: dict[str, Any], qkv: tuple[Tensor, ...], p: float, bias: Tensor | None = None, **chosen: Any
    ) -> Tensor:
        """Returns [b, s, a * d] of q, k and v [b, s, a, d]."""
        query, key, value = (t.transpose(1, 2) for t in qkv)
        caches = (given.get(name) for name in ("layer_past", "cache", "past_key_values"))
        if (cache := next((each for each in caches if each is not None), None)) is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if bias is None and self.slopes.device != query.device:
            self.slopes = self.slopes.to(query.device)
        added = {"alibi_slopes": self.slopes} if bias is None else {"bias": bias}
        return attend_by_position(self, query, key, value, p, **added, **chosen).flatten(2)


class BloomAttention(AlibiAttention):
    """BLOOM's attention, which also adds its output to the residual.

    A query whose keys are all hidden, as padding before a sample, attends to all of them equally, as in stock, which
    adds the lowest number to its scores.
    """

    def _get_refusal(self, given: dict[str, Any]) -> str | None:
        is_cut = self.pretraining_tp > 1 and self.slow_but_exact
        return "computes its output in parts (slow_but_exact)" if is_cut else super()._get_refusal(given)

    def _compute(self, given: dict[str, Any], causal: bool, hidden: Tensor | None) -> Tensor:
        fused = self.query_key_value(given["hidden_states"]).unflatten(-1, (self.num_heads, 3, self.head_dim))
        bias = None if causal else given["alibi"].unflatten(0, (-1, self.num_heads))
        more: dict[str, Any] = {"causal": causal, "mask": hidden, "hidden_rows": "added"}
        out = self._attend(
            given, fused.unbind(-2), self.attention_dropout.p, bias, softmax_scale=self.inv_norm_factor, **more
        )
        y: Tensor = given["residual"] + self.drop(self.dense(out), self.hidden_dropout)
        return y


class MptAttention(AlibiAttention):
    """MPT's attention. Its distances do not depend on padding, so that they always come from slopes."""

    def _get_refusal(self, given: dict[str, Any]) -> str | None:
        if given["position_bias"] is None or given["position_bias"].size(-1) < given["hidden_states"].size(1):
            return "has no distances for some of its keys (max_seq_len)"
        return super()._get_refusal(given)

    def _compute(self, given: dict[str, Any], causal: bool, hidden: Tensor | None) -> Tensor:
        mixed = self.Wqkv(given["hidden_states"])
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        qkv = tuple(t.unflatten(-1, (self.n_heads, self.head_dim)) for t in mixed.chunk(3, -1))
        more: dict[str, Any] = {"causal": causal, "mask": hidden, "softmax_scale": self.softmax_scale}
        y: Tensor = self.out_proj(self._attend(given, qkv, self.attn_dropout_p, **more))
        return y


def get_alibi(module: Any) -> tuple[type[AlibiAttention], Tensor] | None:
    """Returns the class that replaces a module's and its slopes, float32 [a]; None if it is no attention with ALiBi."""
    kind = type(module)
    models: Any = sys.modules.get(kind.__module__)
    if (kind.__name__, kind.__module__) == ("BloomAttention", "transformers.models.bloom.modeling_bloom"):
        alibi = models.build_alibi_tensor(torch.ones(1, 2, device="cpu"), module.num_heads, torch.float32)
        return BloomAttention, alibi[:, 0, 1].clone()
    if (kind.__name__, kind.__module__) == ("MptAttention", "transformers.models.mpt.modeling_mpt"):
        alibi = models.build_mpt_alibi_tensor(module.n_heads, 2, device="cpu")
        return MptAttention, (alibi[:, 0, 1] - alibi[:, 0, 0]).float()
    return None


def _read_mask(mask: Tensor) -> tuple[bool, Tensor | None] | str:
    """Returns (whether attention is causal, what else is hidden) of a float mask of 0 and the lowest number, or of a
    bool one, True where a key is hidden; or the reason why a mask does more than hide. A GPU is waited for."""
    hidden = mask.detach() if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min
    if torch.compiler.is_compiling() or mask.is_inference():
        return False, hidden
    num_queries, num_keys = hidden.shape[-2:]
    later = torch.ones(num_queries, num_keys, dtype=torch.bool, device=mask.device).triu(1)
    adds = torch.zeros((), dtype=torch.bool, device=mask.device)
    if mask.dtype != torch.bool:
        adds = ((mask != 0) & ~hidden).any()
    is_other, is_more = torch.stack((adds, (hidden != later).any())).tolist()
    if is_other:
        return "adds a tensor to its scores"
    causal = not is_more and num_queries == num_keys
    return causal, None if causal else hidden

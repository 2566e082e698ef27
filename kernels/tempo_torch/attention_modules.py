"""Gives attention modules that ask no registry Tempo's attention: dropout by position, and no s*s tensor.

In training with dropout nn.MultiheadAttention, also in nn.TransformerEncoder, keeps s*s tensors on a CPU and draws from
a generator on any device. BLOOM's and MPT's attention, with ALiBi, computes [b, a, sq, sk] scores itself. In eval, and
nn.MultiheadAttention without dropout, stock runs.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tempo_kernels.attention import attention
from tempo_torch.attention import attend_by_position, read_once
from tempo_torch.functional import RedirectsFunctions
from tempo_torch.linear import drop_input
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
        found = self._read_call(query, key, key_padding_mask, need_weights, attn_mask, is_causal)
        if isinstance(found, str):
            self.tempo_place.refuse(self, found)
            return super().forward(*call)  # type: ignore[misc,no-any-return]
        return self._attend(query, key, value, *found), None

    def _read_call(
        self, query: Tensor, key: Tensor, padding: Any, need_weights: bool, mask: Any, is_causal: bool
    ) -> tuple[bool, Tensor | None] | str:
        # Whether attention is causal, what else is hidden; or what Tempo's attention does not do.
        if need_weights:
            return "returns its weights (need_weights=True)"
        if self.bias_k is not None:
            return "appends bias_k and bias_v to its keys and values"
        if self.add_zero_attn:
            return "appends a zero to its keys and values"
        if self.dropout == 1.0:
            return "drops all of its probabilities"
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
    return bool(((mask != 0) & (mask != float("-inf"))).any())


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
        if given.get("output_attentions"):
            return "returns its weights (output_attentions=True)"
        if given.get("head_mask") is not None:
            return "multiplies its weights by a head_mask"
        if getattr(self, "slow_but_exact", False) and self.pretraining_tp > 1:
            return "computes its output in parts (slow_but_exact)"
        if "position_bias" not in given:
            return None
        bias, num_tokens = given["position_bias"], given["hidden_states"].size(1)
        has_all = bias is not None and bias.size(-1) >= num_tokens
        return None if has_all else "has no distances for some of its keys (max_seq_len)"

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
        added: dict[str, Any] = {"alibi_slopes": self.slopes} if bias is None else {"bias": bias}
        return attend_by_position(self, query, key, value, p, **added, **chosen).flatten(2)


class BloomAttention(AlibiAttention):
    """BLOOM's attention, which also adds its output to the residual.

    A query whose keys are all hidden, as padding before a sample, attends to all of them equally, as in stock, which
    adds the lowest number to its scores.
    """

    def _compute(self, given: dict[str, Any], causal: bool, hidden: Tensor | None) -> Any:
        fused = self.query_key_value(given["hidden_states"]).unflatten(-1, (self.num_heads, 3, self.head_dim))
        bias = None if causal else given["alibi"].unflatten(0, (-1, self.num_heads))
        more: dict[str, Any] = {"causal": causal, "mask": hidden, "hidden_rows": "added"}
        out = self._attend(given, fused.unbind(-2), self.attention_dropout.p, bias, scale=self.inv_norm_factor, **more)
        return given["residual"] + self.drop(self.dense(out), self.hidden_dropout)


class MptAttention(AlibiAttention):
    """MPT's attention. Its distances do not depend on padding, so that they always come from slopes."""

    def _compute(self, given: dict[str, Any], causal: bool, hidden: Tensor | None) -> Any:
        mixed = self.Wqkv(given["hidden_states"])
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        qkv = tuple(t.unflatten(-1, (self.n_heads, self.head_dim)) for t in mixed.chunk(3, -1))
        more: dict[str, Any] = {"causal": causal, "mask": hidden, "scale": self.softmax_scale}
        return self.out_proj(self._attend(given, qkv, self.attn_dropout_p, **more))


def get_alibi(module: Any) -> tuple[type[AlibiAttention], Tensor] | None:
    """Returns the class that replaces a module's and its slopes, float32 [a]; None if it is no attention with ALiBi."""
    name, home = type(module).__name__, type(module).__module__
    models: Any = sys.modules.get(home)
    if (name, home) == ("BloomAttention", "transformers.models.bloom.modeling_bloom"):
        alibi = models.build_alibi_tensor(torch.ones(1, 2, device="cpu"), module.num_heads, torch.float32)
        return BloomAttention, alibi[:, 0, 1].clone()
    if (name, home) == ("MptAttention", "transformers.models.mpt.modeling_mpt"):
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

"""Core attention without s*s tensors and masks, and self attention without q, k and v, for Megatron's layers."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel.mappings import (
    all_to_all_hp2sp,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from tempo_kernels.attention import attention
from tempo_kernels.recompute import drop, hold, recompute
from tempo_megatron.slots import context_parallel
from tempo_megatron.slots.dropout_rng import Site, Stack, find_key_and_sample, read_document_samples
from tempo_megatron.slots.linear import (
    DropsInput,
    Function,
    LinearCall,
    Return,
    is_in_backward,
    name_as_stock,
    replace_modules,
    replace_names,
)

CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


class TempoDotProductAttention(DotProductAttention):
    """softmax(q k^T) v with dropout, in Megatron's core_attention slot, heads split over the tensor-parallel group.

    What is hidden is what Megatron's own local attention hides, which is not what Transformer Engine's does (see
    TempoTEDotProductAttention). In a layer with `window_size` (left, right) the window alone decides: token i sees
    tokens i - left to i + right, those after it too in a causal model, and -1 is a number like others. Without a window
    a given mask (bool, True = hidden) alone decides, and without both a causal layer skips the hidden half. In a packed
    row a token sees its own document only. Softmax is always computed in float32, whatever `attention_softmax_in_fp32`
    and `apply_query_key_layer_scaling` say. With softmax_type "off-by-one" or "learnable" each head has a sink, whose
    logit is `softmax_offset`, as in Megatron.

    Keeps for backward: q, k, v, the output (shared with linear_proj) and 4 bytes per token and head. q, k and v are
    copied if they are views of memory that holds more, so that the rest is freed: with grouped queries Megatron copies
    q, and the views k and v alone would keep the whole projection. Under context parallelism, in any `cp_comm_type`, a
    rank keeps that of its own tokens; slots/context_parallel.py says how, and what it costs.

    Args, beside Megatron's:
        stack: the stack whose masks are drawn.
        has_pinned_projection: whether copies would save nothing, because a norm of q or k keeps the projection anyway
            or TempoSelfAttention drops all of it.
        mask_layer: the layer's number in the keys of masks, if it is not layer_number.
        k_channels, v_channels: what latent attention tells of its heads; forward reads both from its tensors.
    """

    form: ClassVar[str] = "flash"
    recomputes: ClassVar[bool] = False

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *args: Any,
        stack: Stack = Stack.DECODER,
        has_pinned_projection: bool = False,
        mask_layer: int | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        # The stock class refuses context parallelism.
        of_one_rank = copy.copy(config)
        of_one_rank.context_parallel_size = 1
        super().__init__(of_one_rank, layer_number, *args, **kwargs)
        self.config = config
        self.stack = stack
        self.has_pinned_projection = has_pinned_projection
        self.mask_layer = self.layer_number if mask_layer is None else mask_layer
        self.site = Site.CROSS_ATTENTION if self.attention_type == "cross" else Site.ATTENTION
        # The stock class divides its scale by the layer number and lets the softmax multiply it back
        # (transformer/dot_product_attention.py:91 and :107 of megatron-core 0.16.1).
        coefficient = self.layer_number if config.apply_query_key_layer_scaling else 1
        self.scale = self.softmax_scale * coefficient
        # Megatron keeps the group since 0.16; before 0.15 the collection has another name, and no layer a window.
        groups = kwargs.get("pg_collection") or kwargs.get("model_comm_pgs")
        self._heads_group = groups.tp if groups else parallel_state.get_tensor_model_parallel_group()
        self._window_size = getattr(self.scale_mask_softmax, "window_size", None)
        self._exchange = context_parallel.choose_exchange(config, self.layer_number, groups)
        if self._exchange is not None:
            if self.site == Site.CROSS_ATTENTION:
                raise ValueError(
                    f"context_parallel_size is {config.context_parallel_size} and the layer has cross attention, whose "
                    'keys are of another sequence; expected 1; set tempo.attention to "off"'
                )
            num_heads = (self.num_attention_heads_per_partition, self.num_query_groups_per_partition)
            context_parallel.check_heads(self._exchange, *num_heads)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """[sq, b, a/p * dv] of query [sq, b, a/p, d], key [sk, b, g/p, d] and value [sk, b, g/p, dv].

        With `packed_seq_params` of the format "thd", [t, a/p * dv] of the same without b.

        attention_bias: [b or 1, a/p or 1, sq or 1, sk], added to the scaled scores, such as T5's relative positions.
        """
        is_packed, ranks = packed_seq_params is not None, self.config.context_parallel_size
        if attention_bias is not None and (is_packed or self._exchange is not None):
            where = "sequences are packed" if self._exchange is None else f"context_parallel_size is {ranks}"
            raise ValueError(
                f"an attention bias is given, and {where}, which Tempo's attention cannot have together; "
                'set tempo.attention to "off"'
            )
        if is_packed and query.dim() == 3:
            query, key, value = (t.unsqueeze(1) for t in (query, key, value))
            return self.forward(query, key, value, attention_mask, attn_mask_type, None, packed_seq_params).squeeze(1)
        mask_type = attn_mask_type or self.attn_mask_type
        hiding = self._hide(query, key, None if is_packed else attention_mask, mask_type, is_packed=is_packed)
        sees_later = not hiding["causal"] and hiding.get("window_size", (-1, -1))[1] != 0
        packed = self._find_documents(packed_seq_params, sees_later=sees_later) if is_packed else {}
        is_stocks = query.size(-1) == value.size(-1) and attention_bias is None
        if not self.training and query.size(0) == 1 < key.size(0) and is_stocks:
            # One new token beside a cache of keys: nothing to save, and stock handles inference.
            of_stock: Tensor = super().forward(query, key, value, attention_mask, attn_mask_type)
            return of_stock
        mask = hiding.pop("mask", None)
        dropout_p = self.attention_dropout.p if self.training else 0.0
        draw = self._draw(query) if dropout_p > 0 else {}
        if is_packed and self.training and (samples := read_document_samples(query)) is not None:
            packed |= {"document_samples": samples} if dropout_p > 0 else {}
        elif is_packed and self.training and self._exchange is not None and self.config.hidden_dropout > 0:
            raise ValueError(
                f"a packed row is given to {ranks} context-parallel ranks without its documents' samples, and "
                f"hidden_dropout is {self.config.hidden_dropout:g}, whose masks then do not know which tokens a rank "
                "holds; call tempo_megatron.set_micro_batch with cu_seqlens and document_samples before each forward, "
                "or set hidden_dropout to 0"
            )
        if self._exchange is not None and mask is not None:
            raise ValueError(
                f"a mask of shape {list(mask.shape)} is given, which attention under context parallelism cannot have; "
                "expected None, for causal or full attention; leave it out (--no-create-attention-mask-in-dataloader)"
            )
        exchanges_heads = self._exchange is not None and self._exchange.heads_group is not None
        if torch.is_grad_enabled() and not self.has_pinned_projection and not exchanges_heads:
            query, key, value = _copy_without_the_rest(query, key, value)
        form = {"mask": mask, "form": self.form} if self._exchange is None else {"exchange": self._exchange}
        settings = {"softmax_scale": self.scale, "dropout_p": dropout_p, **hiding, **packed, **draw, **form}
        sink = getattr(self, "softmax_offset", None)  # since 0.15
        optional = {"sink": None if sink is None else sink.to(query), "bias": attention_bias}
        added = {name: tensor for name, tensor in optional.items() if tensor is not None}
        attend: Callable[..., Tensor] = functools.partial(_attend, **settings)
        if self.recomputes and not is_in_backward():
            return recompute(attend, query, key, value, **added)
        return attend(query, key, value, **added)

    def _hide(
        self, query: Tensor, key: Tensor, mask: Tensor | None, mask_type: AttnMaskType, *, is_packed: bool
    ) -> dict[str, Any]:
        """What hides keys: `causal`, and `window_size` or `mask`, of `attention`.

        As FusedScaleMaskSoftmax.forward_torch_softmax of megatron-core, which looks at the mask type of the constructor
        and knows no packed rows.
        """
        if self._window_size is None:
            is_causal = mask_type in CAUSAL if is_packed else self.attn_mask_type == AttnMaskType.causal
            return {"causal": is_causal and mask is None, "mask": mask}
        left, right = self._window_size
        num_queries, num_keys = query.size(0), key.size(0)
        if min(left, right) >= 0 and (is_packed or num_queries <= num_keys + right):
            return {"causal": False, "window_size": (left, right)}
        if is_packed or self._exchange is not None:
            raise ValueError(
                f"window_size is {(left, right)}, under which some tokens see none in Megatron's local attention, and "
                f"sequences are packed or on {self.config.context_parallel_size} context-parallel ranks; expected two "
                "numbers of 0 or more; give others with --window-size, or take --transformer-impl transformer_engine"
            )
        # Some token sees no key. Of hidden keys alone Megatron takes the mean, and `attention` as well if a mask hides.
        rows, columns = (torch.arange(size, dtype=torch.int64, device=query.device) for size in (num_queries, num_keys))
        distance = columns - rows.unsqueeze(-1) - (num_keys - num_queries)
        return {"causal": False, "mask": ((distance < -left) | (distance > right)).view(1, 1, num_queries, num_keys)}

    def _find_documents(self, packed_seq_params: Any, *, sees_later: bool) -> dict[str, Any]:
        """The arguments of attention for a packed row, which stay where they are: a GPU is not waited for.

        sees_later: whether a token sees tokens after it.
        """
        local_size = getattr(packed_seq_params, "local_cp_size", None) or 1
        if local_size > 1 or packed_seq_params.qkv_format != "thd":
            raise ValueError(
                f'packed sequences are given with qkv_format "{packed_seq_params.qkv_format}" and local_cp_size '
                f'{local_size}; Tempo\'s attention takes "thd" and 1; leave hybrid context parallelism off, or set '
                'tempo.attention to "off"'
            )
        found = {}
        for name, argument in (("cu_seqlens_q", "cu_seqlens"), ("cu_seqlens_kv", "cu_seqlens_k")):
            given, padded = getattr(packed_seq_params, name), getattr(packed_seq_params, f"{name}_padded", None)
            # Behind a document's last token, padding is seen by padding only, if attention is causal.
            if padded is not None and padded is not given and sees_later:
                raise ValueError(
                    f"{name}_padded is given, and attention is not causal, so that tokens would see padding; expected "
                    f'{name} alone; pack without padding, or set tempo.attention to "off"'
                )
            if argument == "cu_seqlens" or self.attention_type != "self":
                found[argument] = given if padded is None else padded
        return found

    def _draw(self, query: Tensor) -> dict[str, Any]:
        """The arguments of this rank's mask."""
        dropout_key, first_sample = find_key_and_sample(self.mask_layer, self.site, self.stack)
        first_head = self._heads_group.rank() * query.size(2)
        return {"dropout_key": dropout_key, "first_sample": first_sample, "first_head": first_head}


def _attend(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
    attend = context_parallel.attend if "exchange" in settings else attention
    return attend(query, key, value, **settings).flatten(2)


def _copy_without_the_rest(*tensors: Tensor) -> list[Tensor]:
    """The tensors, copied where their storage holds more than these tensors: a view would keep all of it."""
    used: Counter[int] = Counter()
    # Storages are compared by identity, because traced tensors have no address.
    for tensor in tensors:
        used[tensor.untyped_storage()._cdata] += tensor.nbytes
    storages = [tensor.untyped_storage() for tensor in tensors]
    return [
        tensor.clone(memory_format=torch.contiguous_format) if storage.nbytes() > used[storage._cdata] else tensor
        for storage, tensor in zip(storages, tensors, strict=True)
    ]


class TempoSoftmaxDotProductAttention(TempoDotProductAttention):
    """The form of the Tempo paper: keeps the softmax's output [b, a/p, s, s] in q's dtype. The dropout's output and
    mask are made again in backward."""

    form = "softmax"


class TempoRecomputeDotProductAttention(TempoDotProductAttention):
    """TempoDotProductAttention that keeps q, k and v only. A linear that drops its input, such as
    TempoRowParallelLinear, frees the output, and attention runs again with the same masks just before that linear's
    backward. If Megatron recomputes core attention or the layer, it does not run a third time."""

    recomputes = True


def recomputes_latent_projections(config: Any) -> bool:
    """Whether Megatron drops what latent attention's up projections make, and makes it again when the gradient of core
    attention's output is there."""
    is_selective = config.recompute_granularity == "selective"
    return is_selective and "mla_up_proj" in (config.recompute_modules or ())


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, config: Any, cu_seqlens: Tensor | None = None, mscale: float = 1.0, **others: Any
) -> Tensor:
    """Megatron's function of this name, with the same result and the same gradient, bit for bit.

    Megatron's unfused one rounds the cosines and sines of all positions to the dtype of queries and keys, once for each
    of the two in every layer, and autograd keeps all four. Here backward computes them again from the angles, which
    Megatron makes once for all layers and micro batches and caches, whatever autograd holds. Packed rows, Transformer
    Engine's fused kernel and latent attention have Megatron's own: the fused kernel keeps the angles only as it is, and
    the angles of a packed row are put together anew in each layer.

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
        return _Rotate.apply(t, freqs, config, mscale, others)  # type: ignore[no-any-return]
    found: Tensor = rope_utils.apply_rotary_pos_emb(
        t, freqs, config=config, cu_seqlens=cu_seqlens, mscale=mscale, **others
    )
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


_run_self_attention = replace_names(SelfAttention.forward, apply_rotary_pos_emb=apply_rotary_pos_emb)


@name_as_stock
class TempoRotarySelfAttention(SelfAttention):
    """SelfAttention whose rotary position embeddings keep nothing of their own."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """(output, bias) of hidden_states, as SelfAttention."""
        return _run_self_attention(self, hidden_states, *args, **kwargs)


class TempoNormedSelfAttention(SelfAttention):
    """SelfAttention that keeps the projection's output alone: for norms of q and k that keep their input, which is made
    again as q and k are.

    What leads to core attention is made again just before its backward, by Megatron's own code for the split, the norms
    of q and k and the rotary embeddings. Exact: the same kernels on the same input. Core attention still keeps
    everything else, such as its output.
    """

    repeats_projection: ClassVar[bool] = False

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """(output, bias) of hidden_states, as SelfAttention."""
        if not torch.is_grad_enabled() or is_in_backward():
            return super().forward(hidden_states, *args, **kwargs)
        linear_qkv = (LinearCall if self.repeats_projection else _KeptCall)(self.linear_qkv)
        linear_proj = _Watched(self.linear_proj)
        # What core attention got, and the norms of q and k where the projection is kept.
        takes = {"core_attention": 3}
        if not self.repeats_projection:
            norms = (name for name in ("q_layernorm", "k_layernorm") if getattr(self, name) is not None)
            takes = {**dict.fromkeys(norms, 1), **takes}

        def follow(x: Tensor, core_attention: Any, **others: Any) -> tuple[Any, list[Tensor]]:
            """What SelfAttention.forward gives with other modules, and the inputs of those in `takes`."""
            watched = {name: _Watched(getattr(self, name)) for name in takes}
            watched["core_attention"].module = core_attention
            attention = replace_modules(self, **watched, **others)
            attention.checkpoint_core_attention &= core_attention is self.core_attention
            result = _run_self_attention(attention, x, *args, **kwargs)
            return result, [t for name, num in takes.items() for t in watched[name].take_inputs(num)]

        result, inputs = follow(hidden_states, self.core_attention, linear_qkv=linear_qkv, linear_proj=linear_proj)
        projected = linear_qkv.take_output()
        # What is no part of the projection, where that is kept; else that too, as norms of q and k keep views of it.
        storage = None if self.repeats_projection else projected.untyped_storage()._cdata
        is_own = [tensor.untyped_storage()._cdata != storage for tensor in (projected, *inputs)]

        def make() -> list[Tensor]:
            """The projection's output, and what was made of it: Megatron's forward up to core attention."""
            output, bias = linear_qkv.repeat()
            first = Function(lambda query, *_, **__: query.flatten(2))  # in the shape of core attention's output
            _, again = follow(output, first, linear_qkv=Return(output, bias), linear_proj=Return())
            return list(itertools.compress((output, *again), is_own))

        if made := list(itertools.compress((projected, *inputs), is_own)):
            drop(made, after=linear_proj.take_inputs(1, may_be_written=True), make=make)
        return result


class TempoSelfAttention(TempoNormedSelfAttention):
    """SelfAttention that does not keep the projection's output either, nor its core attention q, k and v: the
    projection runs again too. If Megatron recomputes the layer, it does not run a third time."""

    repeats_projection = True


class _KeptCall(LinearCall):
    """One call of a linear whose output is kept, and need not be repeated."""

    def forward(self, input_: Tensor) -> Any:
        """(output, bias), as the linear."""
        self.output, self._bias = result = self.linear(input_)
        return result

    def take_output(self) -> Tensor:
        """The output of the call, which is then held for backward."""
        output = super().take_output()
        self._take = hold(output)
        return output

    def repeat(self) -> Any:
        """(output, bias) without a graph."""
        return self._take(), self._bias


@name_as_stock
class LatentSelfAttention(MLASelfAttention):
    """Latent attention whose shared rotary key has the gradient of all heads, in any tensor-parallel layout.

    Every head adds the same rotary key to its own keys, and a rank has some of the heads. Megatron sums the ranks'
    gradients only where each rank makes the key of some tokens (Transformer Engine's down projection under sequence
    parallelism); elsewhere each keeps its own (transformer/multi_latent_attention.py:565 of megatron-core 0.16.1). So
    the down projection hands out what Megatron's code goes on with in the right way: all latents of this rank's tokens
    under sequence parallelism, and all latents of all tokens, with a sum in backward, without.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            self.linear_kv_down_proj.register_forward_hook(self._hand_out_latents)

    def _hand_out_latents(self, linear: Any, inputs: Any, output: tuple[Tensor, Tensor | None]) -> tuple[Any, Any]:
        latents, bias = output
        is_split = latents.size(-1) != self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim
        if self.config.sequence_parallel:
            if is_split:
                rows = all_to_all_hp2sp(latents)
                latents = rows.view(-1, latents.size(1), rows.size(-1))
            return latents, bias
        if is_split:
            latents = gather_from_tensor_model_parallel_region(latents)
        if latents.requires_grad:
            latents.register_hook(self._sum_rotary_part)
        return latents, bias

    def _sum_rotary_part(self, grad: Tensor) -> Tensor:
        """The gradient of all latents; that of the compressed ones is complete, as they went into a parallel linear."""
        compressed, rotary = grad.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        return torch.cat([compressed, reduce_from_tensor_model_parallel_region(rotary.contiguous())], dim=-1)


class TempoMLASelfAttention(DropsInput, LatentSelfAttention):
    """Latent attention that does not keep its input, which its down projections read; see DropsInput.

    Megatron makes its down projections according to their classes, and refuses those that it does not know.
    """


class _Watched(torch.nn.Module):
    """A module that remembers the arguments of its first call, until they are taken."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self._inputs: tuple[Any, ...] | None = ()
        self._versions: list[int] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._inputs == ():
            self._inputs, self._versions = args, [arg._version for arg in args if isinstance(arg, Tensor)]
        return self.module(*args, **kwargs)

    def take_inputs(self, num: int, *, may_be_written: bool = False) -> tuple[Tensor, ...]:
        """The first `num` arguments; ValueError where one was written to since the call, unless it may be."""
        inputs, self._inputs = (self._inputs or ())[:num], None
        assert len(inputs) == num
        if not may_be_written and any(t._version != old for t, old in zip(inputs, self._versions, strict=False)):
            raise ValueError(
                f"queries, keys or values were written to in place inside a {type(self.module).__name__}, as by a hook "
                "under no_grad, and recomputing them would lose that change; expected them as they were given; let the "
                'hook return other tensors, or set tempo.linear_qkv to "off", and tempo.norm to "inplace" where q '
                "and k have norms"
            )
        return inputs

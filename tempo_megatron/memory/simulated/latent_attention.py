"""Stands in for multi-latent attention as Transformer Engine's modules compute it, on fake tensors.

Megatron's own modules differ: their down projections are split over ranks, where Transformer Engine's are on every
rank, and their attention takes no values of another size than keys. References are to megatron-core 0.16.1, from
megatron/core/, and to Transformer Engine 2.20.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from tempo_kernels.opaque import run_or_simulate
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.simulated.device import differentiate_stock_attention
from tempo_megatron.memory.simulated.stand_in import DroppedOutput, Made, make_column_linear, make_row_linear, stand_in
from tempo_megatron.models.build import LatentDotProductAttention
from tempo_megatron.slots.linear import DropsInput, TempoColumnParallelLinear


def put_latent_attention(model: torch.nn.Module, config: Any, run: Run, *, is_fused: bool) -> None:
    """Let the model's layers attend through latent vectors.

    Args:
        model: built with ordinary attention.
        config: of its layers.
        run: whose attention it is.
        is_fused: whether core attention is one kernel.
    """
    for layer in model.modules():
        if hasattr(layer, "self_attention"):
            norm: Any = type(layer.input_layernorm)
            attention = _InputDroppingAttention if getattr(norm, "keep", "") == "recompute" else _LatentAttention
            layer.self_attention = attention(config, run, norm, is_fused)


class _LatentAttention(torch.nn.Module):
    """transformer/multi_latent_attention.py: MLASelfAttention with the modules of models/gpt/gpt_layer_specs.py:
    get_gpt_layer_with_transformer_engine_spec. Where queries and keys are normalised, the up projections do it.

    Args, beside those of `put_latent_attention`:
        norm: class of the layer's norms, which is Tempo's or stock.
    """

    up_projection: ClassVar[Any] = ColumnParallelLinear

    def __init__(self, config: Any, run: Run, norm: Any, is_fused: bool) -> None:
        super().__init__()
        self._fuses_rope, self._recomputes_up = run.fuses_latent_rope, "mla_up_proj" in run.recompute
        self._rank, self._key, self._position, self._value = run.model.latent_sizes
        # Queries and keys are rotated by pairs of neighbours.
        self._config = dataclasses.replace(config, multi_latent_attention=True)
        self._num_heads = config.num_attention_heads // config.tensor_model_parallel_size
        heads, hidden, q_rank = config.num_attention_heads, config.hidden_size, run.model.q_lora_rank
        # On every rank all of it: split over a group of one rank.
        one_rank = dataclasses.replace(config, tensor_model_parallel_size=1, sequence_parallel=False)
        group_of_one = parallel_state.get_context_parallel_group()
        stock: Any = ColumnParallelLinear
        up = self.up_projection if config.qk_layernorm else stock

        def make_norm(size: int) -> Any:
            values = {"config": config, "hidden_size": size, "eps": config.layernorm_epsilon}
            return norm(**values) if config.qk_layernorm else torch.nn.Identity()

        self._has_query_rank = q_rank is not None
        if q_rank is not None:
            self.linear_q_down_proj = make_column_linear(one_rank, hidden, q_rank, stock, tp_group=group_of_one)
            self.q_layernorm = make_norm(q_rank)
        # Else attention drops its own input.
        linear, num_inputs = (up, q_rank) if q_rank is not None else (stock, hidden)
        self.linear_q_up_proj = make_column_linear(config, num_inputs, heads * (self._key + self._position), linear)
        num_outputs = self._rank + self._position
        self.linear_kv_down_proj = make_column_linear(one_rank, hidden, num_outputs, stock, tp_group=group_of_one)
        self.kv_layernorm = make_norm(self._rank)
        self.linear_kv_up_proj = make_column_linear(config, self._rank, heads * (self._key + self._value), up)
        of_keys = dataclasses.replace(config, kv_channels=self._key + self._position)
        self.core_attention: torch.nn.Module = (
            _FusedAttention()
            if is_fused
            else LatentDotProductAttention(of_keys, 1, AttnMaskType.causal, "self", v_channels=self._value)
        )
        self.linear_proj = make_row_linear(config, heads * self._value, hidden, bias=config.add_bias_linear)

    def forward(self, x: Tensor, attention_mask: Tensor | None, **_: Any) -> tuple[Tensor, Tensor | None]:
        config = self._config
        q = self.linear_q_down_proj(x)[0] if self._has_query_rank else x
        kv, positions = torch.split(self.linear_kv_down_proj(x)[0], [self._rank, self._position], dim=-1)
        if config.sequence_parallel:
            positions = tensor_parallel.gather_from_sequence_parallel_region(positions)
        up = DroppedOutput(drops=self._recomputes_up)
        q, k, v = up.run(self._project_up, q, kv, positions)
        del kv, positions
        with up.use():
            if config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules:
                out = tensor_parallel.checkpoint(self.core_attention, False, q, k, v, attention_mask)
            else:
                out = self.core_attention(q, k, v, attention_mask)
        del q, k, v
        up.recompute_for(out)
        found, bias = self.linear_proj(out)
        return found, bias

    def _project_up(self, q: Tensor, kv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.linear_q_up_proj(self.q_layernorm(q) if self._has_query_rank else q)[0]
        q = q.view(*q.shape[:-1], self._num_heads, self._key + self._position)
        # Transformer Engine copies an input that is a view (pytorch/module/base.py: prepare_forward).
        kv = self.linear_kv_up_proj(self.kv_layernorm(kv.contiguous()))[0]
        kv = kv.view(*kv.shape[:-1], self._num_heads, self._key + self._value)
        positions = positions.unsqueeze(-2)
        if self._fuses_rope:
            return (q, *_rotate_keys(kv, positions, self._key))
        # Of all layers and micro batches (rotary_pos_embedding.py: lru_cache), so that it is not this layer's.
        angles = torch.empty(q.size(0), 1, 1, self._position, dtype=torch.float32)
        q, q_rotated = torch.split(q, [self._key, self._position], dim=-1)
        k, v = torch.split(kv, [self._key, self._value], dim=-1)
        q = torch.cat([q, self._rotate(q_rotated, angles)], dim=-1)
        positions = self._rotate(positions, angles).expand(-1, -1, self._num_heads, -1)
        return q, torch.cat([k, positions], dim=-1), v.contiguous()

    def _rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        found: Tensor = apply_rotary_pos_emb(x, angles, config=self._config, cp_group=group)
        return found


class _InputDroppingAttention(DropsInput, _LatentAttention):
    """With norms that can make their outputs again, as TempoMLASelfAttention."""

    up_projection = TempoColumnParallelLinear


class _FusedAttention(torch.nn.Module):
    """Keeps q, k, v, its output and a logsumexp of each query (pytorch/attention/dot_product_attention/backends.py:
    FusedAttnFunc)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        def make(q: Tensor, k: Tensor, v: Tensor) -> Made:
            output = v.new_empty(*q.shape[:-1], v.size(-1))
            statistics = q.new_empty(q.size(1), q.size(2), q.size(0), 1, dtype=torch.float32)
            return output, (q, k, v, output, statistics)

        def differentiate(kept: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v, _, statistics = kept
            return run_or_simulate(differentiate_stock_attention, q, k, v, statistics)

        found: Tensor = stand_in(make, q, k, v, differentiate=differentiate)
        return found.flatten(2)


def _rotate_keys(kv: Tensor, positions: Tensor, qk_head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values of their projection and of the part with positions; queries are rotated in their place
    (fusions/fused_mla_yarn_rope_apply.py: ApplyMLARotaryEmbKV, ApplyMLARotaryEmbQ)."""
    sizes = qk_head_dim + positions.size(-1), kv.size(-1) - qk_head_dim
    found: Any = stand_in(
        lambda kv, _: (tuple(kv.new_empty(*kv.shape[:-1], size) for size in sizes), ()), kv, positions
    )
    keys, values = found
    return keys, values

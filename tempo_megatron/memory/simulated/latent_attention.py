"""Stands in for multi-latent attention as Transformer Engine's modules compute it, on fake tensors.

Megatron's own modules differ: their down projections are split over ranks, where Transformer Engine's are on every
rank, and their attention takes no values of another size than keys. References are to megatron-core 0.16.1, from
megatron/core/, and to Transformer Engine 2.20.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from tempo_kernels.opaque import run_or_simulate
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.simulated.device import differentiate_stock_attention
from tempo_megatron.memory.simulated.dropped_output import DroppedOutput
from tempo_megatron.memory.simulated.stand_in import Made, stand_in
from tempo_megatron.slots.linear import DropsInput, TempoColumnParallelLinear


def put_latent_attention(
    model: torch.nn.Module, config: Any, run: Run, *, is_fused: bool, recomputes_up: bool = False
) -> None:
    """Let the model's layers attend through latent vectors.

    Args:
        model: built with ordinary attention.
        config: of its layers.
        run: whose attention it is.
        is_fused: whether core attention is one kernel.
        recomputes_up: Megatron's recompute module mla_up_proj.
    """
    for layer in model.modules():
        if hasattr(layer, "self_attention"):
            norm: Any = type(layer.input_layernorm)
            attention = _InputDroppingAttention if getattr(norm, "keep", "") == "recompute" else _LatentAttention
            layer.self_attention = attention(config, run, norm, is_fused, recomputes_up)


class _LatentAttention(torch.nn.Module):
    """transformer/multi_latent_attention.py: MLASelfAttention with the modules of models/gpt/gpt_layer_specs.py:
    get_gpt_layer_with_transformer_engine_spec. Where queries and keys are normalised, the up projections do it.

    Args, beside those of `put_latent_attention`:
        norm: class of the layer's norms, which is Tempo's or stock.
    """

    up_projection: ClassVar[Any] = ColumnParallelLinear

    def __init__(self, config: Any, run: Run, norm: Any, is_fused: bool, recomputes_up: bool) -> None:
        super().__init__()
        self._fuses_rope, self._recomputes_up = run.fuses_latent_rope, recomputes_up
        self._rank, self._key, self._position, self._value = run.model.latent_sizes
        # Queries and keys are rotated by pairs of neighbours.
        self._config = dataclasses.replace(config, multi_latent_attention=True)
        self._num_heads = config.num_attention_heads // config.tensor_model_parallel_size
        heads, hidden, q_rank = config.num_attention_heads, config.hidden_size, run.model.q_lora_rank
        # On every rank all of it: split over a group of one rank.
        one_rank = dataclasses.replace(config, tensor_model_parallel_size=1, sequence_parallel=False)
        group_of_one = parallel_state.get_context_parallel_group()

        def down(size: int) -> ColumnParallelLinear:
            return _make_linear(one_rank, hidden, size, tp_group=group_of_one)

        self._has_query_rank = q_rank is not None
        if q_rank is not None:
            self.linear_q_down_proj, self.q_layernorm = down(q_rank), _make_norm(norm, config, q_rank)
        # Attention drops its own input.
        up = self.up_projection if q_rank is not None and config.qk_layernorm else ColumnParallelLinear
        self.linear_q_up_proj = _make_linear(config, q_rank or hidden, heads * (self._key + self._position), up)
        self.linear_kv_down_proj = down(self._rank + self._position)
        self.kv_layernorm = _make_norm(norm, config, self._rank)
        up = self.up_projection if config.qk_layernorm else ColumnParallelLinear
        self.linear_kv_up_proj = _make_linear(config, self._rank, heads * (self._key + self._value), up)
        self.core_attention: torch.nn.Module = (
            _FusedAttention()
            if is_fused
            else _make_unfused_attention(config, self._key + self._position, self._num_heads * self._value)
        )
        self.linear_proj = RowParallelLinear(
            heads * self._value,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
        )

    def forward(self, x: Tensor, attention_mask: Tensor | None, **_: Any) -> tuple[Tensor, Tensor | None]:
        config = self._config
        q = self.linear_q_down_proj(x)[0] if self._has_query_rank else x
        kv, positions = torch.split(self.linear_kv_down_proj(x)[0], [self._rank, self._position], dim=-1)
        if config.sequence_parallel:
            positions = tensor_parallel.gather_from_sequence_parallel_region(positions)
        up = DroppedOutput() if self._recomputes_up else None
        q, k, v = self._project_up(q, kv, positions) if up is None else up.run(self._project_up, q, kv, positions)
        del kv, positions
        with contextlib.nullcontext() if up is None else up.use():
            if config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules:
                out = tensor_parallel.checkpoint(self._attend, False, q, k, v, attention_mask)
            else:
                out = self._attend(q, k, v, attention_mask)
        del q, k, v
        if up is not None:
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

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        found: Tensor = self.core_attention(q, k, v, attention_mask)
        return found


class _InputDroppingAttention(DropsInput, _LatentAttention):
    """With norms that can make their outputs again, as TempoMLASelfAttention."""

    up_projection = TempoColumnParallelLinear


def _make_linear(
    config: Any, num_inputs: int, num_outputs: int, linear: Any = ColumnParallelLinear, **group: Any
) -> ColumnParallelLinear:
    found: ColumnParallelLinear = linear(
        num_inputs,
        num_outputs,
        config=config,
        init_method=config.init_method,
        bias=False,
        gather_output=False,
        **group,
    )
    return found


def _make_norm(norm: Any, config: Any, size: int) -> torch.nn.Module:
    if not config.qk_layernorm:
        return torch.nn.Identity()
    found: torch.nn.Module = norm(config=config, hidden_size=size, eps=config.layernorm_epsilon)
    return found


def _make_unfused_attention(config: Any, key_size: int, output_size: int) -> DotProductAttention:
    """Megatron's, which is for values of the keys' size but for the size of its output."""
    found = DotProductAttention(dataclasses.replace(config, kv_channels=key_size), 1, AttnMaskType.causal, "self")
    found.hidden_size_per_partition = output_size
    return found


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
    found: tuple[Tensor, Tensor] = stand_in(
        lambda kv, _: (tuple(kv.new_empty(*kv.shape[:-1], size) for size in sizes), ()), kv, positions
    )
    return found

"""A small GPT with latent attention, whose heads have two sizes, and what its core attention is held against."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from gpt import SEQ_LENGTH, VOCAB_SIZE, gpt_config
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from tempo_megatron import TempoConfig, tempoize, tempoize_embedding, tempoize_loss

SIZES = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6}


class PlainAttention(DotProductAttention):  # type: ignore[misc,unused-ignore]
    """Megatron's own where keys and values have one size, the only one that it takes; else plain torch."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **keywords: Any) -> Tensor:
        if query.size(-1) == value.size(-1):
            return super().forward(query, key, value, attention_mask, **keywords)
        scores = torch.einsum("ibad,jbad->baij", query, key) * self.softmax_scale
        scores = scores.masked_fill(attention_mask, float("-inf"))
        # As Megatron's own, in float32 at least.
        probabilities = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
        return torch.einsum("baij,jbad->ibad", probabilities, value).flatten(2)


def construct_latent(
    config: Any, tempo_config: TempoConfig, *sizes: int, down: Any = ColumnParallelLinear, **stages: Any
) -> GPTModel:
    """A GPTModel of these sizes of the vocabulary and the sequence; with `TempoConfig.off()` around PlainAttention.

    down: class of the down projections: Megatron's, of which a rank has a part, or modelopt's, which each has whole.
    """
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True, normalization=config.normalization)
    slots = spec.submodules.self_attention.submodules
    slots.linear_q_down_proj = slots.linear_kv_down_proj = down
    if config.q_lora_rank is None:
        slots.q_layernorm = IdentityOp  # a norm that is never built, which megatron-core 0.19 refuses
    if tempo_config.is_off:
        spec.submodules.self_attention.submodules.core_attention = PlainAttention
    # Without Transformer Engine Megatron does not define what its latent attention looks for.
    with mock.patch.multiple(multi_latent_attention, TELinear=torch.nn.Bilinear, Linear=Linear):
        spec = tempoize(spec, config, tempo_config)
        return GPTModel(config, spec, *sizes, position_embedding_type="none", **stages)


def build_latent(
    tempo_config: TempoConfig, dtype: torch.dtype = torch.float64, down: Any = ColumnParallelLinear, **settings: Any
) -> GPTModel:
    """In training mode, with weights that depend on the shapes only."""
    config = gpt_config(
        MLATransformerConfig,
        qk_layernorm=True,
        params_dtype=dtype,
        **{"rope_type": "rope", "normalization": "RMSNorm", **SIZES, **settings},
    )
    torch.manual_seed(7)
    model = construct_latent(config, tempo_config, VOCAB_SIZE, SEQ_LENGTH, down=down)
    tempoize_embedding(model, tempo_config)
    tempoize_loss(model, tempo_config)
    return model.to(dtype).train()

"""What a layer of experts keeps, at full width on tensors without memory."""

from __future__ import annotations

import pytest
import torch

from tempo_megatron import TempoConfig
from tempo_megatron.memory.run import Experts, Run
from tempo_megatron.memory.simulated.chunk import record_chunk
from tempo_megatron.models.shape import make_shape

QWEN3_30B_A3B = make_shape(
    num_layers=1, hidden_size=2048, ffn_hidden_size=6144, num_attention_heads=32, num_query_groups=4, kv_channels=128,
    seq_length=4096, normalization="RMSNorm", activation="swiglu", position_embedding_type="rope", qk_layernorm=True,
    add_bias_linear=False, attention_dropout=0.0, hidden_dropout=0.0, vocab_size=128,
)  # fmt: skip
EXPERTS = Experts(
    num_experts=128, per_token=8, ffn_hidden_size=768, layers=(True,), dispatcher="alltoall", grouped=True,
    aux_loss_coefficient=1e-3,
)  # fmt: skip
RECOMPUTED = {"activation": "recompute", "norm": "recompute", "attention": "flash", "dropout": "recompute"}


def keep(tempo_config: TempoConfig) -> dict[str, float]:
    """Bytes in sbh, of the experts, of the projection, the norms and core attention, and of all."""
    run = Run(
        model=QWEN3_30B_A3B,
        tempo=tempo_config,
        micro_batch_size=1,
        dtype=torch.bfloat16,
        stock="transformer_engine",
        experts=EXPERTS,
    )
    saved = record_chunk(run)[0]["decoder", 0]
    sbh = QWEN3_30B_A3B.seq_length * QWEN3_30B_A3B.hidden_size

    def count(*names: str) -> float:
        return round(sum(each.num_bytes for each in saved if any(name in each.operation for name in names)) / sbh, 1)

    return {"experts": count("mlp.experts"), "attention": count("self_attention"), "all": count("")}


# Megatron's advice for a run, which changes nothing here.
@pytest.mark.filterwarnings("ignore:Using a large number of experts")
def test_a_layer_of_qwen3_30b_a3b_keeps_less_without_another_product_or_collective() -> None:
    assert keep(TempoConfig.off()) == {"experts": 34.0, "attention": 20.1, "all": 60.5}
    assert keep(TempoConfig(**RECOMPUTED)) == {"experts": 28.0, "attention": 9.6, "all": 42.0}
    permuted = TempoConfig(**RECOMPUTED, moe_permute="recompute")
    assert keep(permuted) == {"experts": 12.0, "attention": 9.6, "all": 26.0}

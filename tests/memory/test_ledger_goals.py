"""Bytes that a layer may keep at most, bf16, s 2048, 128 channels a head: per token and hidden unit, on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tempo_megatron import TempoConfig, cpu
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.memory.kept.ledger import build_ledger_config, measure
from tempo_megatron.models.shape import make_shape

SIZES: dict[str, Any] = {"num_layers": 1, "hidden_size": 3072, "num_attention_heads": 24, "seq_length": 2048}
SWIGLU = {"activation": "swiglu", "ffn_hidden_size": 8192, "normalization": "RMSNorm", "add_bias_linear": False}
RECOMPUTE = TempoConfig(activation="recompute", norm="recompute")
GOALS: dict[str, tuple[dict[str, Any], TempoConfig, float]] = {
    "GELU in place": ({}, TempoConfig(), 20.6),
    "GELU recomputed": ({}, RECOMPUTE, 20.1),
    "SwiGLU": (SWIGLU, TempoConfig(), 22.8),
    "SwiGLU, a quarter of the groups": ({**SWIGLU, "num_query_groups": 6}, TempoConfig(), 19.8),
    "BERT": ({"family": "bert", "num_tokentypes": 2, "add_binary_head": True}, TempoConfig(), 20.6),
}


def kept(values: dict[str, Any], tempo_config: TempoConfig, tp: int) -> float:
    cpu.use_cpu()
    shape = make_shape(**{**SIZES, **values})
    with simulate_layout(tp):
        config = build_ledger_config(shape, sequence_parallel=tp > 1, dtype=torch.bfloat16, recompute=())
        ledger = measure(config, tempo_config, shape=shape, seq_length=2048, vocab_size=1024, on_fake_tensors=True)
    assert ledger.scores_bytes == 0
    return ledger.layer_sbh


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("values", "tempo_config", "goal"), GOALS.values(), ids=GOALS)
def test_a_layer_keeps_at_most_its_goal(
    values: dict[str, Any], tempo_config: TempoConfig, goal: float, tp: int
) -> None:
    found = kept(values, tempo_config, tp)
    assert goal - 0.2 < found * tp <= goal, f"{found * tp:.3f} sbh"


def test_rope_keeps_its_cosines_and_sines_beside_that() -> None:
    """Megatron's unfused rope rounds both to bf16 anew for q and for k: 4 of 128 channels for each token of a layer."""
    without, rope = (kept({**SWIGLU, **more}, TempoConfig(), 1) for more in ({}, {"position_embedding_type": "rope"}))
    assert rope - without == pytest.approx(4 * 2 * 128 / 3072, abs=1e-9)

"""The formula of kept bytes is the measurement, to the byte, and meets what is published of stock on a GPU."""

from __future__ import annotations

import pytest
import torch
from formula_cases import Layer, draw_layer, list_ledger_and_formula, measure_and_count
from grid.models import LLAMA, SETTINGS, Sizes
from kept_formula import LayerShape, count_layer_bytes

from tempo_megatron import TempoConfig

OFF = TempoConfig.off()
INPLACE = TempoConfig(activation="inplace", norm="inplace", dropout="recompute", attention="flash", loss="off")
RECOMPUTE = TempoConfig(activation="recompute", norm="recompute", dropout="recompute", attention="flash", loss="off")


@pytest.mark.slow
def test_the_formula_is_the_measurement_to_the_byte() -> None:
    """Of every family, dtype, activation, value of Tempo's and recomputation, each several times."""
    for seed, layer in enumerate(map(draw_layer, range(96))):
        for stack, (measured, counted) in measure_and_count(layer).items():
            assert counted == measured, (seed, stack, layer)


@pytest.mark.parametrize("tempo", [OFF, RECOMPUTE], ids=["stock", "recompute"])
@pytest.mark.parametrize(
    "changes",
    [
        {"window_size": (8, 0)},
        {"window_size": (8, 0), "recompute": "core_attn"},
        {"attention_softmax_in_fp32": False},
        {"attention_softmax_in_fp32": False, "attention_dropout": 0.0},
        {"bias_activation_fusion": True},
    ],
    ids=lambda changes: ", ".join(changes),
)
def test_a_setting_that_changes_what_stock_keeps_is_in_the_formula(
    changes: dict[str, object], tempo: TempoConfig
) -> None:
    sizes = {"hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "num_query_groups": 2}
    usual = {**LLAMA, **sizes, "kv_channels": 16, "dtype": torch.bfloat16, "dropout": 0.1}
    measured, counted = measure_and_count(Layer("Llama", 1, {**usual, **changes}, tempo, Sizes(32, 2, 8)))["decoder"]
    assert counted == measured


@pytest.mark.parametrize(("tp", "dropout"), [(1, 0.1), (2, 0.0)])
@pytest.mark.parametrize(
    ("family", "changes", "tempo"),
    [
        ("MLA", {}, {}),
        ("MLA", {"q_lora_rank": None}, {"attention": "recompute"}),
        ("MLA", {"rope_type": "yarn"}, {"activation": "recompute"}),
        ("MTP", {}, {}),
        ("MTP", {"recompute": "full"}, {}),
    ],
)
def test_latent_attention_and_further_predictions_keep_what_the_formula_says(
    family: str, changes: dict[str, object], tempo: dict[str, str], tp: int, dropout: float
) -> None:
    settings = {**SETTINGS[family], **changes, "dropout": dropout, "sequence_parallel": tp > 1, "dtype": torch.bfloat16}
    layer = Layer(family, tp, settings, TempoConfig(**tempo), Sizes(16, 3, 16))
    missing = {"q_layernorm"} if changes.get("q_lora_rank", 1) is None else set()
    found = measure_and_count(layer)
    assert set(found) == ({"decoder", "mtp"} if family == "MTP" else {"decoder"})
    for measured, counted in found.values():
        assert counted == measured > 0
    if family == "MLA":
        ledger, formula = list_ledger_and_formula(layer)
        assert ledger == formula
        assert {"q_layernorm", "kv_layernorm", "self_attention (q, k, v)", "core_attention"} <= {*ledger, *missing}


def test_stock_on_a_gpu_is_the_34_sbh_of_the_paper_and_tempo_20() -> None:
    shape = LayerShape(
        seq_length=2048, micro_batch_size=1, hidden_size=4096, ffn_hidden_size=16384, num_attention_heads=32,
        num_query_groups=32, kv_channels=128, hidden_dropout=0.1, attention_dropout=0.1,
    )  # fmt: skip

    def sbh(tempo: TempoConfig) -> float:
        return count_layer_bytes(shape, tempo, stock="transformer_engine") / (2048 * 4096)

    # Logsumexp of 32 heads and the statistics of two norms are all that is not of size s b h.
    small = (4 * 32 + 16) / 4096
    assert sbh(OFF) == pytest.approx(34 + small, rel=1e-6)
    assert sbh(RECOMPUTE) == pytest.approx(20 + small, rel=1e-6)
    assert 20.5 < sbh(INPLACE) < 20.6

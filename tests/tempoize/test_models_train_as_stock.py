"""Models of transformers with modules of their own kind train as stock under tempoize, or are refused in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import GROUPS, assert_same_step, build, list_reasons, step
from torch import Tensor, nn

from tempo_torch import report_on, tempoize

pytestmark = pytest.mark.filterwarnings("ignore")
IDS = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(1))
SEEN = torch.ones_like(IDS)
SEEN[1, -5:] = 0
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
ROPES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
CAPPED = {**ROPES, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.0}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
STATES = {"n_groups": 1, "chunk_size": 8}
NEMOTRON = {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8}
GRANITE = {"layer_types": ["mamba", "attention"], "num_local_experts": 2, "num_experts_per_tok": 1}
LLAMA4 = {**EXPERTS, "no_rope_layers": [1, 0], "interleave_moe_layer_step": 4, "intermediate_size_mlp": 24}

QKV: dict[str, tuple[dict[str, Any], set[str]]] = {
    "Llama": ({}, {"tile"}),
    "Qwen3": ({}, {"tile"}),
    "Olmo2": ({}, {"tile"}),
    "Gemma2": (CAPPED, {"tile"}),
    "VaultGemma": (CAPPED, {"tile"}),
    "Gemma3": (ROPES, {"tile"}),
    "BitNet": ({"head_dim": 4}, {"tile"}),
    "Ministral3": ({}, {"tile"}),
    "Afmoe": ({**EXPERTS, **ROPES}, {"tile"}),
    "Qwen3Next": ({**EXPERTS, **LINEAR}, {"tile"}),
    "Qwen3_5": (LINEAR, {"tile"}),
    "Llama4": (LLAMA4, {"tile", "it numbers its tokens by itself, which it would do in each tile"}),
}
"""Attention in tiles that goes straight to o_proj, has a gate or norm between, or stays stock in some layers."""
GATED_NORMS: dict[str, dict[str, Any]] = {
    "Bamba": {**MAMBA, "attn_layer_indices": [1]},
    "FalconH1": {**MAMBA, "mamba_d_ssm": 64, "mamba_rms_norm": True},
    "GraniteMoeHybrid": {**MAMBA, **GRANITE, "shared_intermediate_size": 16},
    "Mamba2": {**STATES, "num_heads": 8, "state_size": 8},
    "NemotronH": {**STATES, **NEMOTRON},
}
"""Mamba hybrids, whose norms may be called with a gate."""


def train(kind: str, settings: dict[str, Any], **choices: str) -> tuple[Any, list[Any]]:
    """(The model, steps with and without padding and logits in eval), under tempoize if there are choices."""
    model = build(kind, weights=8.0, **{**GROUPS, "hidden_size": 16, "intermediate_size": 24, **settings})
    if choices:
        tempoize(model, **choices)
    padded = {"attention_mask": SEEN, "labels": IDS.masked_fill(SEEN == 0, -100)}
    steps = [step(model, IDS), step(model, IDS, **padded)]
    with torch.no_grad():
        return model, [*steps, model.eval()(input_ids=IDS).logits]


def assert_trains_as_stock(kind: str, settings: dict[str, Any], **choices: str) -> Any:
    (model, found), (_, expected) = train(kind, settings, **choices), train(kind, settings)
    for ours, stock in zip(found[:2], expected[:2], strict=True):
        assert_same_step(ours, stock, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[2], expected[2], rtol=1e-4, atol=1e-5)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", QKV)
def test_attention_in_tiles_trains_as_stock(kind: str) -> None:
    settings, found = QKV[kind]
    assert list_reasons(assert_trains_as_stock(kind, settings, qkv="tile"), "qkv") == found


@pytest.mark.slow
@pytest.mark.parametrize("kind", GATED_NORMS)
def test_mamba_hybrids_train_as_stock(kind: str) -> None:
    model = assert_trains_as_stock(kind, {"hidden_size": 32, "intermediate_size": 48, **GATED_NORMS[kind]}, norm="auto")
    assert any("Gated" in type(module).__name__ for module in model.modules())


GEMMA4 = {**ROPES, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "global_head_dim": 8}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "SeedOss": ({"residual_dropout": 0.1}, "it has a dropout behind or in front of attention, and .*"),
    "DiffLlama": ({}, "it asks for attention once more"),
    "Doge": ({}, "it makes a mask from what it projects"),
    "GptOss": ({**EXPERTS, **ROPES}, "it differs from stock: grad of attention.sinks by 1 of its largest, .*"),
    "Gemma4": (GEMMA4, 'Gemma4TextAttention does not get Tempo\'s attention: .* is "sdpa".*'),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED)
def test_attention_that_is_another_thing_in_tiles_is_refused_with_the_reason(kind: str) -> None:
    settings, why = REFUSED[kind]
    with pytest.raises(ValueError, match=f'qkv is "tile", but {why}; set (it|qkv) to "off"'):
        tempoize(build(kind, **{**GROUPS, **settings}), qkv="tile")


class GatedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(8) + 0.5), 1e-5

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        x = x if gate is None else x * nn.functional.silu(gate)
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


def test_a_norm_that_is_called_with_a_gate_is_the_stock_classs_however_it_is_given() -> None:
    norm, (x, gate) = nn.Sequential(GatedNorm()), torch.randn(2, 3, 8)
    calls: Any = [lambda: norm[0](x, gate), lambda: norm[0](x, gate=gate), lambda: norm[0](gate=gate, x=x)]
    calls += [lambda: norm[0](x), lambda: norm[0](x=x)]
    expected = [call() for call in calls]
    assert [entry.now for entry in report_on(tempoize(norm)).entries if entry.operation == "norm"] == ["inplace"]
    found = [call() for call in calls]
    assert all(map(torch.equal, found[:3], expected[:3]))
    torch.testing.assert_close(found, expected)

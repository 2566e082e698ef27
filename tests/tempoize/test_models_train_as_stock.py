"""Models of transformers with modules that no other model has train as stock under tempoize."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import GROUPS, assert_same_step, build, step
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
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
STATES = {"n_groups": 1, "chunk_size": 8}
NEMOTRON = {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8}
GRANITE = {"layer_types": ["mamba", "attention"], "num_local_experts": 2, "num_experts_per_tok": 1}
LLAMA4 = {**EXPERTS, "no_rope_layers": [1, 0], "interleave_moe_layer_step": 4, "intermediate_size_mlp": 24}

WIDE = {"hidden_size": 32, "intermediate_size": 48}
GATED: dict[str, dict[str, Any]] = {
    "Bamba": {**MAMBA, "attn_layer_indices": [1]},
    "FalconH1": {**MAMBA, "mamba_d_ssm": 64, "mamba_rms_norm": True},
    "GraniteMoeHybrid": {**MAMBA, **GRANITE, "shared_intermediate_size": 16},
    "Mamba2": {**STATES, "num_heads": 8, "state_size": 8},
    "NemotronH": {**STATES, **NEMOTRON},
    "Qwen3Next": {**EXPERTS, **LINEAR},
}
"""Hybrids, whose norms may be called with a gate."""
OTHERS: dict[str, dict[str, Any]] = {
    "Afmoe": {**EXPERTS, **ROPES},
    "BitNet": {"head_dim": 4},
    "Llama4": LLAMA4,
    "Qwen3_5": LINEAR,
}


def train(kind: str, settings: dict[str, Any], **choices: str) -> tuple[Any, list[Any]]:
    """(The model, steps with and without padding and logits in eval), under tempoize if there are choices."""
    model = build(kind, weights=8.0, **{**GROUPS, "hidden_size": 16, "intermediate_size": 24, **settings})
    if choices:
        tempoize(model, **choices)
    padded = {"attention_mask": SEEN, "labels": IDS.masked_fill(SEEN == 0, -100)}
    steps = [step(model, IDS), step(model, IDS, **padded)]
    with torch.no_grad():
        return model, [*steps, model.eval()(input_ids=IDS).logits]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*GATED, *OTHERS])
def test_models_train_as_stock(kind: str) -> None:
    settings = OTHERS[kind] if kind in OTHERS else {**WIDE, **GATED[kind]}
    (model, found), (_, expected) = train(kind, settings, norm="auto"), train(kind, settings)
    for ours, stock in zip(found[:2], expected[:2], strict=True):
        assert_same_step(ours, stock, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[2], expected[2], rtol=1e-4, atol=1e-5)
    assert kind in OTHERS or any("Gated" in type(module).__name__ for module in model.modules())


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

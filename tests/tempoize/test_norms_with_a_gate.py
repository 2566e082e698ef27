"""Norms that may be called with a gate, as those of Mamba hybrids, are Tempo's for calls without one only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tempo_torch import report_on, tempoize

IDS = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(1))
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
HYBRIDS: dict[str, dict[str, Any]] = {
    "Bamba": {**GROUPED, "attn_layer_indices": [1]},
    "FalconH1": {**GROUPED, "mamba_d_ssm": 64, "mamba_rms_norm": True},
    "GraniteMoeHybrid": {**GROUPED, "layer_types": ["mamba", "attention"], "num_local_experts": 2,
                         "num_experts_per_tok": 1, "shared_intermediate_size": 16},
    "Mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8, "chunk_size": 8},
    "NemotronH": {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 8,
                  "n_groups": 1, "ssm_state_size": 8, "chunk_size": 8, "head_dim": 8},
}  # fmt: skip


class GatedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(8) + 0.5), 1e-5

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        x = x if gate is None else x * nn.functional.silu(gate)
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


def test_a_call_with_a_gate_is_the_stock_classs_however_it_is_given() -> None:
    norm, (x, gate) = nn.Sequential(GatedNorm()), torch.randn(2, 3, 8)
    calls: Any = [lambda: norm[0](x, gate), lambda: norm[0](x, gate=gate), lambda: norm[0](gate=gate, x=x)]
    expected = [call() for call in calls] + [norm[0](x), norm[0](x=x)]
    assert [entry.now for entry in report_on(tempoize(norm)).entries if entry.operation == "norm"] == ["inplace"]
    found = [call() for call in calls] + [norm[0](x), norm[0](x=x)]
    assert all(map(torch.equal, found[:3], expected[:3]))
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", HYBRIDS)
def test_mamba_hybrids_train_and_evaluate_as_stock(kind: str) -> None:
    found = []
    for change in (lambda model: model, tempoize):
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**{**SIZES, **HYBRIDS[kind]})
        model = change(getattr(transformers, f"{kind}ForCausalLM")(config).train())
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        with torch.no_grad():
            logits = model.eval()(input_ids=IDS).logits
        assert any("Gated" in type(module).__name__ for module in model.modules())
        found.append((loss.detach(), logits, {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)

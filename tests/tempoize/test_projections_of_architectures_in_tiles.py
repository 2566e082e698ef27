"""qkv="tile" for attention with gates, norms, scales or keys of its own: equal to stock, or refused in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tempo_torch import report_on, tempoize

Step = tuple[Tensor, dict[str, Tensor | None]]
IDS = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(1))
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "use_cache": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
ROPES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}

EQUAL: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Olmo2": {},
    "Gemma2": {**ROPES, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.0},
    "VaultGemma": {**ROPES, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.0},
    "Gemma3": ROPES,
    "BitNet": {"head_dim": 4},
    "Ministral3": {},
    "Afmoe": {**EXPERTS, **ROPES},
    "Qwen3Next": {**EXPERTS, **LINEAR},
    "Qwen3_5": LINEAR,
}
"""Those whose module goes from attention to o_proj, and those with a gate or a norm between."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "SeedOss": ({"residual_dropout": 0.1}, "has a dropout of its own behind or in front of attention, and .*"),
    "DiffLlama": ({}, "asks for attention once more"),
    "Doge": ({}, "makes a mask from what it projects"),
    "GptOss": ({**EXPERTS, **ROPES}, "differs from stock: grad of attention.sinks by 1 of its largest, .*"),
}


def build(kind: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    name = f"{kind}Text" if hasattr(transformers, f"{kind}TextConfig") else kind
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{name}Config")(**{**SIZES, **settings}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0 if parameter.dim() > 1 else 1.0)  # large enough for a cap of scores to matter
    return model.train()


def step(model: Any) -> Step:
    """Loss and gradients with and without padding behind."""
    mask = torch.ones_like(IDS)
    mask[1, -5:] = 0
    loss = model(input_ids=IDS, labels=IDS).loss
    loss = loss + model(input_ids=IDS, labels=IDS.masked_fill(mask == 0, -100), attention_mask=mask).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def check_equal(found: Step, expected: Step) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values() if gradient is not None)
    for name, wanted in expected[1].items():
        gradient = found[1][name]
        assert (gradient is None) == (wanted is None), name
        if gradient is not None and wanted is not None:
            assert (gradient - wanted).abs().max() <= 1e-4 * wanted.abs().max() + 1e-6 * largest, name


def list_refusals(model: Any) -> list[str]:
    return sorted({entry.why for entry in report_on(model).left if entry.operation == "qkv"})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", EQUAL)
def test_loss_and_gradients_are_those_of_stock(kind: str) -> None:
    expected = step(build(kind, EQUAL[kind]))
    model = tempoize(build(kind, EQUAL[kind]), qkv="tile")
    assert {entry.now for entry in report_on(model).entries if entry.operation == "qkv"} == {"tile"}
    check_equal(step(model), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_another_thing_in_tiles_is_refused_with_the_reason(kind: str) -> None:
    settings, why = REFUSED[kind]
    with pytest.raises(ValueError, match=f'qkv is "tile", but it {why}; set it to "off"'):
        tempoize(build(kind, settings), qkv="tile")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        ("Llama4", {**EXPERTS, "no_rope_layers": [1, 0], "interleave_moe_layer_step": 4, "intermediate_size_mlp": 24},
         "it numbers its tokens by itself, which it would do in each tile"),
    ],
)  # fmt: skip
def test_layers_that_can_run_in_tiles_do_and_the_others_stay(kind: str, settings: dict[str, Any], why: str) -> None:
    expected = step(build(kind, settings))
    model = tempoize(build(kind, settings), qkv="tile")
    assert why in list_refusals(model)
    check_equal(step(model), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tiles_of_a_model_that_does_not_get_tempos_attention_are_refused_with_its_reason() -> None:
    more = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "global_head_dim": 8}
    with pytest.raises(ValueError, match='does not get Tempo.s attention: .* is "sdpa".*; set qkv to "off"'):
        tempoize(build("Gemma4", {**ROPES, **more}), qkv="tile")

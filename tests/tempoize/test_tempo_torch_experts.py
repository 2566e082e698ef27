"""Experts of transformers in each of its implementations: stock's loss and gradients, without gated outputs and copies
of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny_models import assert_equal_step, assert_same_step, step
from tiny_models import build as build_tiny

from tempo_megatron.memory.kept.recorder import GraphReader
from tempo_torch import report_on, restore, tempoize

if not hasattr(transformers.PreTrainedModel, "set_experts_implementation"):
    pytest.skip(f"transformers {transformers.__version__} has no experts implementations", allow_module_level=True)

TOKENS, TOP, INNER = 32, 2, 24
LAYERS, HIDDEN = 2, 32
IDS = torch.arange(TOKENS).view(2, -1) * 7 % 90
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "intermediate_size": INNER},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": INNER},
    "GptOss": {"num_local_experts": 4, "intermediate_size": INNER, "head_dim": 8},
    "DeepseekV3": {
        **{"n_routed_experts": 4, "moe_intermediate_size": INNER, "n_group": 2, "topk_group": 1, "q_lora_rank": 8},
        **{"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
        **{"first_k_dense_replace": 0, "n_shared_experts": TOP},
    },
}
OTHERS = {"norm": "off", "dropout": "off", "attention": "off", "loss": "off"}


def build(name: str, implementation: str) -> Any:
    sizes = {"vocab_size": 96, "num_key_value_heads": 4, "num_experts_per_tok": TOP}
    model = build_tiny(name, **sizes, **MODELS[name])
    model.set_experts_implementation(implementation)
    return model


def measure(model: Any) -> int:
    """The bytes that autograd holds after a forward."""
    reader = GraphReader(model)
    return sum(saved.num_bytes for saved in reader.list_saved([model(input_ids=IDS, labels=IDS).loss]))


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_the_inputs_of_products_are_made_again(name: str, implementation: str) -> None:
    stock = build(name, implementation)
    expected, kept = step(stock, IDS), measure(stock)
    model = tempoize(build(name, implementation), activation="recompute", **OTHERS)
    found, own_kept = step(model, IDS), measure(model)
    assert torch.equal(found[0], expected[0])
    # The derivative of Tempo's silu rounds otherwise than torch's; gpt-oss writes its own function out.
    assert_same_step(found, expected, rtol=0.0 if name == "GptOss" else 1e-6, atol=0.0)
    # The function of the gate and the product, in float32; gpt-oss keeps what it clamps and adds besides, and DeepSeek
    # has as many shared experts, whose linears are modules.
    gated = 2 * LAYERS * TOKENS * TOP * INNER * 4 * (1 + (name == "DeepseekV3"))
    # A copy of each token for each of its experts; the tokens themselves are kept anyway.
    copies = LAYERS * TOKENS * TOP * HIDDEN * 4
    assert kept - own_kept == gated + copies if name != "GptOss" else kept - own_kept >= 2 * gated + copies
    replaced = [entry for entry in report_on(model).replaced if entry.module.endswith("Experts")]
    assert len(replaced) == LAYERS
    assert_equal_step(step(restore(model), IDS), expected)
    assert measure(model) == kept


def test_what_cannot_be_recomputed_is_reported() -> None:
    model = build("Qwen3Moe", "grouped_mm")
    model.config._experts_implementation = "sonicmoe"
    why = {entry.why for entry in report_on(tempoize(model, **OTHERS)).left if entry.module == "Qwen3MoeExperts"}
    assert why == {"its experts run in sonicmoe, and Tempo has eager, grouped_mm, batched_mm"}
    model = tempoize(build("GptOss", "grouped_mm"), activation="auto", **OTHERS)
    model.set_experts_implementation("eager")
    # One that is chosen later is followed.
    assert measure(model) < measure(build("GptOss", "eager"))

"""Tiny language models of transformers, and one training step of a model, which tests compare with stock's."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from witness import assert_same

from tempo_torch import report_on

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPS = {"num_key_value_heads": 2, "head_dim": 8}
NAMES = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM", "ModernBert": "ModernBertForMaskedLM"}
NAMES |= {"T5": "T5ForConditionalGeneration"}
Step = tuple[Tensor, dict[str, Tensor | None]]
"""The loss, and the gradient of each parameter."""


def build(kind: str, dtype: torch.dtype = torch.float32, weights: float = 1.0, **settings: Any) -> Any:
    """A model in training; `weights` multiplies its matrices, so that scores and caps of them matter."""
    torch.manual_seed(0)
    name = f"{kind}TextConfig" if hasattr(transformers, f"{kind}TextConfig") else f"{kind}Config"
    config = getattr(transformers, name)(**{**SIZES, **settings})
    model = getattr(transformers, NAMES.get(kind, f"{kind}ForCausalLM"))(config).to(dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(weights if parameter.dim() > 1 else 1.0)
    return model


def step(model: Any, ids: Tensor, **inputs: Any) -> Step:
    """A forward with labels and its backward."""
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, **{"labels": ids, **inputs}).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_step(found: Step, expected: Step, rtol: float = 1e-5, atol: float = 1e-9) -> None:
    """Gradients agree up to `rtol` of each one's largest element and `atol` of the largest of all."""
    torch.testing.assert_close(found[0], expected[0], rtol=min(rtol, 1e-5), atol=0)
    assert found[1].keys() == expected[1].keys()
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values() if gradient is not None)
    for name, wanted in expected[1].items():
        gradient = found[1][name]
        assert (gradient is None) == (wanted is None), name
        if gradient is not None and wanted is not None:
            assert (gradient - wanted).abs().max() <= rtol * wanted.abs().max() + atol * largest, name


def assert_equal_step(found: Step, expected: Step) -> None:
    """No bit differs."""
    assert found[1].keys() == expected[1].keys()
    assert_same([found[0], *found[1].values()], [expected[0], *expected[1].values()])


def list_reasons(model: nn.Module, operation: str) -> set[str]:
    """What modules do for an operation, or why not, by the report."""
    return {entry.now or entry.why for entry in report_on(model).entries if entry.operation == operation}

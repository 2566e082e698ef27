"""Tempo's attention in Megatron's core_attention slot, where stock Megatron cannot be asked on a CPU."""

from __future__ import annotations

import pytest
import torch
from distributed import run_megatron_ranks
from gpt import SEQ_LENGTH, build_gpt, gpt_config, gradients, tokens_of

from tempo_megatron import TempoConfig, dropout_rng


def with_mask(overrides, mask, attention):
    """Losses and gradients of a GPT whose attention masks, where it has no window of its own, are `mask`."""
    model = build_gpt(gpt_config(dropout=0.1, **overrides), TempoConfig(attention=attention))
    dropout_rng.set_micro_batch(5, 0)
    tokens = tokens_of(0, 2)
    positions = torch.arange(SEQ_LENGTH).expand(2, -1)
    losses = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())
    losses.mean().backward()
    return losses.detach(), gradients(model)


@pytest.mark.parametrize("attention", ["flash", "softmax"])
@pytest.mark.parametrize("left", [0, 3, 100])
def test_a_sliding_window_is_the_mask_that_megatron_makes_of_it(left, attention):
    ones = torch.ones(SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool)
    hidden = ~(ones.triu(-left) & ones.tril(0))
    (found,) = run_megatron_ranks(with_mask, 1, 1, {"window_size": (left, 0)}, None, attention)
    (expected,) = run_megatron_ranks(with_mask, 1, 1, {}, hidden.view(1, 1, SEQ_LENGTH, SEQ_LENGTH), attention)
    torch.testing.assert_close(found[0], expected[0])
    for name, grad in expected[1].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-6)


def test_both_forms_of_attention_draw_the_same_masks():
    (flash,) = run_megatron_ranks(with_mask, 1, 1, {}, None, "flash")
    (softmax,) = run_megatron_ranks(with_mask, 1, 1, {}, None, "softmax")
    torch.testing.assert_close(flash[0], softmax[0])
    for name, grad in flash[1].items():
        torch.testing.assert_close(softmax[1][name], grad, rtol=1e-4, atol=1e-6)

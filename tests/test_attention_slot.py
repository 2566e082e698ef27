"""Tempo's attention in Megatron's core_attention slot, where stock Megatron cannot be asked on a CPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from distributed import run_megatron_ranks
from gpt import SEQ_LENGTH, build_gpt, gpt_config, gradients, tokens_of
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from tempo_kernels.attention import describe
from tempo_megatron import TempoConfig
from tempo_megatron.slots import dropout_rng
from tempo_megatron.slots.attention import TempoDotProductAttention


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


def token_beside_a_cache():
    """What stock's and Tempo's attention give for one new query and eight keys."""
    config = gpt_config(dropout=0.1)
    arguments = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    q, k, v = (torch.randn(s, 2, 4, 8) for s in (1, 8, 8))
    with mock.patch.object(
        DotProductAttention, "forward", autospec=True, side_effect=DotProductAttention.forward
    ) as stock:
        found = [
            cls(config, **arguments).eval()(q, k, v, None) for cls in (DotProductAttention, TempoDotProductAttention)
        ]
    return found, stock.call_count


def test_a_token_beside_a_cache_of_keys_is_stocks_business():
    (((stock, tempo), calls),) = run_megatron_ranks(token_beside_a_cache, 1, 1)
    assert torch.equal(stock, tempo) and calls == 2


def test_what_runs_is_said_in_words():
    assert describe("cpu") == describe("cuda", "softmax") == "plain torch"
    assert describe("cuda").startswith("triton")


def test_both_forms_of_attention_draw_the_same_masks():
    (flash,) = run_megatron_ranks(with_mask, 1, 1, {}, None, "flash")
    (softmax,) = run_megatron_ranks(with_mask, 1, 1, {}, None, "softmax")
    torch.testing.assert_close(flash[0], softmax[0])
    for name, grad in flash[1].items():
        torch.testing.assert_close(softmax[1][name], grad, rtol=1e-4, atol=1e-6)

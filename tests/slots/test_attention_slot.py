"""Tempo's attention in Megatron's core_attention slot, where stock Megatron cannot be asked on a CPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from covering import parametrize_covering
from gpt import SEQ_LENGTH, build_gpt, gpt_config, gradients, tokens_of
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from tempo_kernels.attention import describe
from tempo_megatron import TempoConfig, cpu
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.memory.kept.ledger import build_ledger_config, measure
from tempo_megatron.models.shape import make_shape
from tempo_megatron.slots import dropout_rng
from tempo_megatron.slots.attention import TempoDotProductAttention

ONE_RANK = pytest.mark.usefixtures("one_rank")


def with_mask(overrides, mask, attention):
    """Losses and gradients of a GPT whose attention masks, where it has no window of its own, are `mask`."""
    model = build_gpt(gpt_config(dropout=0.1, **overrides), TempoConfig(attention=attention))
    dropout_rng.set_micro_batch(5, 0)
    tokens = tokens_of(0, 2)
    positions = torch.arange(SEQ_LENGTH).expand(2, -1)
    losses = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())
    losses.mean().backward()
    return losses.detach(), gradients(model)


@ONE_RANK
@pytest.mark.parametrize("left", [0, 3, 100])
def test_a_sliding_window_is_the_mask_that_megatron_makes_of_it_and_both_forms_draw_the_same_masks(left):
    ones = torch.ones(SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool)
    hidden = ~(ones.triu(-left) & ones.tril(0)).view(1, 1, SEQ_LENGTH, SEQ_LENGTH)
    ways = [({"window_size": (left, 0)}, None), ({}, hidden)]
    expected, *others = (with_mask(*way, attention) for way in ways for attention in ("flash", "softmax"))
    for losses, grads in others:
        torch.testing.assert_close(losses, expected[0])
        for name, grad in expected[1].items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6)


@ONE_RANK
def test_a_token_beside_a_cache_of_keys_is_stocks_business():
    """One new query and eight keys."""
    arguments = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    q, k, v = (torch.randn(s, 2, 4, 8) for s in (1, 8, 8))
    stock, tempo = (
        cls(gpt_config(dropout=0.1), **arguments).eval() for cls in (DotProductAttention, TempoDotProductAttention)
    )
    with mock.patch.object(
        DotProductAttention, "forward", autospec=True, side_effect=DotProductAttention.forward
    ) as called:
        assert torch.equal(tempo(q, k, v, None), stock(q, k, v, None))
    assert called.call_count == 2


def test_what_runs_is_said_in_words():
    assert describe("cpu") == describe("cuda", "softmax") == "plain torch"
    assert describe("cuda").startswith("triton")


NUM_TOKENS = 64
FORMS = {"flash": 0.125, "softmax": 0.0}
"""logsumexp, 4 bytes per token and head, in sbh where a head has 32 columns."""


def kept_by_grouped_queries(num_query_groups, attention, **settings):
    """sbh of a layer of 8 heads."""
    sizes = {"num_layers": 1, "hidden_size": 256, "ffn_hidden_size": 1024, "num_attention_heads": 8}
    config = build_ledger_config(
        make_shape(**sizes, num_query_groups=num_query_groups, seq_length=NUM_TOKENS),
        sequence_parallel=parallel_state.get_tensor_model_parallel_world_size() > 1,
        dtype=torch.bfloat16,
        recompute=(),
    )
    tempo_config = TempoConfig(attention=attention, norm=settings.pop("norm", "inplace"))
    for name, value in settings.items():
        setattr(config, name, value)
    return measure(config, tempo_config, vocab_size=64, seq_length=NUM_TOKENS).layer_sbh


@parametrize_covering(num_query_groups=[8, 4, 2], tp=[1, 2], attention=list(FORMS))
def test_attention_keeps_q_k_and_v_and_nothing_of_their_size_beside(num_query_groups, tp, attention):
    cpu.use_cpu()
    with simulate_layout(tp):
        found = kept_by_grouped_queries(num_query_groups, attention)
    # 16-bit q, k, v, context, two norms and gelu output; a bit per gelu element; rstd of two norms.
    per_rank = 2 + 2 * 2 * num_query_groups / 8 + 2 + 2 * 2 + 8 + 0.5 + FORMS[attention]
    # Each rank of a sequence-parallel group holds its rows of a norm's output, and all of two norms' gamma and beta.
    assert found == pytest.approx((per_rank + 2 * 4 / 256) / tp + 2 * 8 / NUM_TOKENS, abs=1e-9)


# Bytes per head and token: rstd; none, they are made again; torch's of 16 bits on a CPU.
STATISTICS = {"inplace": 4, "recompute": 0, "off": 4}


@pytest.mark.parametrize("norm", STATISTICS)
def test_copies_are_not_made_where_a_norm_of_q_or_k_keeps_the_projection(norm):
    cpu.use_cpu()
    with simulate_layout(1):
        found = kept_by_grouped_queries(8, "softmax", qk_layernorm=True, norm=norm)
        plain = kept_by_grouped_queries(8, "softmax", norm=norm)
    statistics = 2 * 8 * STATISTICS[norm] / 256
    # In place the norms keep q and k themselves, with gamma and beta of a head's 32 columns. Stock keeps the
    # projection, and q and k are attention's. Recomputed, the projection alone is kept.
    beside = {"inplace": 2 * 8 * 32 / (NUM_TOKENS * 256), "recompute": 0, "off": 4}
    assert found - plain == pytest.approx(statistics + beside[norm], abs=1e-9)

"""Tempo's attention in Megatron's core_attention slot, where stock Megatron cannot be asked on a CPU."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from covering import exhaustive
from gpt import SEQ_LENGTH, build_gpt, gpt_config, gradients, run_tokens, tokens_of
from megatron.core.fusions import fused_softmax
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from runs import build_run
from torch.nn import functional as F

from tempo_kernels.attention import describe
from tempo_megatron import TempoConfig
from tempo_megatron.memory.show.ledger import measure_run
from tempo_megatron.models.shape import make_shape
from tempo_megatron.slots import dropout_rng
from tempo_megatron.slots.attention import (
    TempoDotProductAttention,
    TempoSoftmaxDotProductAttention,
    apply_rotary_pos_emb,
)
from tempo_megatron.slots.block_slots import CLASSES

ONE_RANK = pytest.mark.usefixtures("one_rank")


def with_mask(overrides, mask, attention):
    """Losses and gradients of a GPT whose attention masks, where it has no window of its own, are `mask`."""
    model = build_gpt(gpt_config(dropout=0.1, **overrides), TempoConfig(attention=attention))
    dropout_rng.set_micro_batch(5, 0)
    losses = run_tokens(model, tokens_of(0, 2), mask)
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


WINDOWS = (None, (7, 3), (0, 0), (0, 2), (100, 100), (-1, 0), (-1, -1), (-1, 3), (4, -1))
MASK_TYPES = ("causal", "padding", "no_mask", "padding_causal", "arbitrary")


def draw_operands(num_queries, num_keys):
    """q, k and v of four heads in two groups."""
    torch.manual_seed(3)
    sizes = {"q": (num_queries, 4), "k": (num_keys, 2), "v": (num_keys, 2)}
    return [torch.randn(length, 2, heads, 8, requires_grad=True) for length, heads in sizes.values()]


def attend(cls, mask_type, window, mask, num_queries, num_keys):
    """Output and gradients of a core attention."""
    module = cls(gpt_config(window_size=window, num_query_groups=2), 1, AttnMaskType[mask_type], "self")
    operands = draw_operands(num_queries, num_keys)
    hidden = torch.rand(2, 1, num_queries, num_keys) < 0.4 if mask else None
    out = module(*operands, hidden, attn_mask_type=AttnMaskType[mask_type])
    return [out.detach(), *torch.autograd.grad(out.square().sum(), operands)]


@ONE_RANK
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("mask_type", MASK_TYPES)
@pytest.mark.parametrize("tempo", [TempoDotProductAttention, *exhaustive([TempoSoftmaxDotProductAttention])])
def test_each_mask_type_and_window_hides_what_stocks_local_attention_hides(tempo, mask_type, window, monkeypatch):
    # Stock's own is made on the literal device "cuda".
    monkeypatch.setattr(fused_softmax, "get_default_causal_mask", lambda n: torch.ones(n, n, dtype=torch.bool).triu(1))
    lengths = [(12, 12)] if mask_type == "causal" and window is None else [(12, 12), (9, 14), (14, 9)]
    for has_mask, (num_queries, num_keys) in itertools.product((False, True), lengths):
        given = mask_type, window, has_mask, num_queries, num_keys
        for found, expected in zip(attend(tempo, *given), attend(DotProductAttention, *given), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# As Transformer Engine's check_set_window_size completes them; under others it ends in an AssertionError.
ENGINE_WINDOWS = {
    "causal": {None: (-1, 0), (7, 3): (7, 0), (7, 0): (7, 0), (0, 0): (0, 0), (-1, 0): (-1, 0), (-1, -1): (-1, 0)},
    "no_mask": {None: (-1, -1), (7, 3): (7, 3), (7, 0): (7, 0), (0, 0): (0, 0), (-1, 0): (-1, -1), (-1, -1): (-1, -1)},
}


@ONE_RANK
@pytest.mark.parametrize("mask_type", ENGINE_WINDOWS)
@pytest.mark.parametrize("tempo", [CLASSES["attention", value][1] for value in ("flash", "softmax", "recompute")])
def test_in_the_place_of_transformer_engines_attention_windows_hide_what_they_hide_there(tempo, mask_type):
    distance = torch.arange(12) - torch.arange(12).view(-1, 1)
    for window, (left, right) in ENGINE_WINDOWS[mask_type].items():
        is_seen = ((distance >= -left) | (left < 0)) & ((distance <= right) | (right < 0))
        # A mask that is given does not count.
        found, *gradients = attend(tempo, mask_type, window, True, 12, 12)
        q, k, v = operands = draw_operands(12, 12)
        heads = (each.permute(1, 2, 0, 3) for each in (q, k, v))
        expected = F.scaled_dot_product_attention(*heads, attn_mask=is_seen, enable_gqa=True).permute(2, 0, 1, 3)
        torch.testing.assert_close(found, expected.flatten(2), rtol=1e-5, atol=1e-5)
        for gradient, other in zip(gradients, torch.autograd.grad(expected.square().sum(), operands), strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-5)


@ONE_RANK
def test_a_window_under_which_a_token_sees_none_is_refused_where_attention_takes_no_mask():
    config = gpt_config(window_size=(-1, 0))
    module = TempoDotProductAttention(config, 1, AttnMaskType.causal, "self")
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 4, 9], dtype=torch.int32))
    q = torch.randn(9, 4, 8)
    with pytest.raises(ValueError, match=r"window_size is \(-1, 0\), under which some tokens see none"):
        module(q, q, q, None, packed_seq_params=packed)


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


def layer_sbh(norm, **settings):
    """Of a layer of 8 heads with unfused attention in Tempo's form."""
    sizes = {"num_layers": 1, "hidden_size": 256, "ffn_hidden_size": 1024, "num_attention_heads": 8, "vocab_size": 64}
    shape = make_shape(**sizes, seq_length=NUM_TOKENS, **settings)
    return measure_run(build_run(shape, TempoConfig(attention="softmax", norm=norm), stock="cpu")).layer_sbh


# Bytes per head and token: rstd; none, they are made again; torch's of 16 bits on a CPU.
STATISTICS = {"inplace": 4, "recompute": 0, "off": 4}


@pytest.mark.parametrize("norm", STATISTICS)
def test_copies_are_not_made_where_a_norm_of_q_or_k_keeps_the_projection(norm):
    found, plain = layer_sbh(norm, qk_layernorm=True), layer_sbh(norm)
    statistics = 2 * 8 * STATISTICS[norm] / 256
    # In place the norms keep q and k themselves, with gamma and beta of a head's 32 columns. Stock keeps the
    # projection, and q and k are attention's. Recomputed, the projection alone is kept.
    beside = {"inplace": 2 * 8 * 32 / (NUM_TOKENS * 256), "recompute": 0, "off": 4}
    assert found - plain == pytest.approx(statistics + beside[norm], abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotary_embeddings_are_megatrons_bit_for_bit_and_keep_nothing(dtype):
    for is_interleaved, channels, mscale in itertools.product((False, True), (16, 32), (1.0, 1.27)):
        config = SimpleNamespace(
            apply_rope_fusion=False, multi_latent_attention=False, rotary_interleaved=is_interleaved, mrope_section=None
        )
        # Any angles, not only those of which each pair of channels has one.
        freqs = torch.randn(64, 1, 1, channels) * 100
        t, grad = (torch.randn(64, 2, 3, 32).to(dtype) for _ in range(2))
        found = []
        for rotate in (rope_utils.apply_rotary_pos_emb, apply_rotary_pos_emb):
            x = t.clone().requires_grad_()
            y = rotate(x, freqs, config=config, mscale=mscale, cp_group=SimpleNamespace(size=lambda: 1))
            kept = getattr(y.grad_fn, "saved_tensors", None)
            found.append((y, *torch.autograd.grad(y, x, grad)))
        stock, tempo = found
        assert torch.equal(tempo[0], stock[0]) and torch.equal(tempo[1], stock[1])
        assert kept == ()

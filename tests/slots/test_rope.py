"""Rotary position embeddings that keep the angles only, beside Megatron's own."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from tempo_megatron.slots.attention import apply_rotary_pos_emb

ONE_RANK = SimpleNamespace(size=lambda: 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_result_and_gradient_are_megatrons_bit_for_bit(dtype):
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
            y = rotate(x, freqs, config=config, mscale=mscale, cp_group=ONE_RANK)
            kept = getattr(y.grad_fn, "saved_tensors", None)
            found.append((y, *torch.autograd.grad(y, x, grad)))
        stock, tempo = found
        assert torch.equal(tempo[0], stock[0]) and torch.equal(tempo[1], stock[1])
        assert kept == ()

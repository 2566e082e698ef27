"""Attention's backward in one walk, kernel_heads.py, against its specification; interpreted.py says where it runs."""

from __future__ import annotations

import pytest
import torch
from attention_kernel_cases import KEY, check, dropped_elements, random_inputs, run, settings
from covering import parametrize_covering
from interpreted import DEVICE, kernel_test

from tempo_kernels.attention import kernel as attention_kernel
from tempo_kernels.attention.settings import Inputs
from tempo_kernels.philox import drop_mask

# sq, sk, b, a, g, d; causal; window
ONE_WALK = {
    "odd": ((37, 37, 2, 1, 1, 32), True, None),
    "blocks": ((130, 130, 1, 1, 1, 64), True, None),
    "head_dim 128": ((140, 150, 1, 1, 1, 128), True, None),
    "head_dim 36, grouped": ((70, 80, 1, 2, 1, 36), False, None),
    "more queries than keys": ((150, 11, 1, 1, 1, 64), False, None),
    "window": ((150, 150, 1, 1, 1, 64), False, (40, 3)),
}


@kernel_test
@parametrize_covering(each={"form": ONE_WALK, "splits": [1, 2]})
def test_one_walk_for_all_gradients_does_what_is_specified(form, splits, monkeypatch):
    shape, causal, window = form
    monkeypatch.setattr(attention_kernel, "choose_splits", lambda inputs: splits)
    check(*random_inputs(*shape, torch.bfloat16), settings(causal, window_size=window))


@kernel_test
def test_one_walk_of_float16_with_a_mask_and_lengths_does_what_is_specified(monkeypatch):
    monkeypatch.setattr(attention_kernel, "choose_splits", lambda inputs: 2)
    q, k, v, grad = random_inputs(70, 70, 3, 2, 1, 32, torch.float16)
    lengths = torch.tensor([70, 50, 0], device=DEVICE)
    k[50:, 1], v[50:, 1] = float("nan"), float("nan")
    mask = (torch.rand(3, 2, 70, 70) < 0.4).to(DEVICE)
    check(q, k, v, grad, settings(False, 0.0), mask, lengths)


@kernel_test
@pytest.mark.parametrize("splits", [1, 2])
def test_one_walk_drops_the_specified_elements_bit_for_bit(splits, monkeypatch):
    monkeypatch.setattr(attention_kernel, "choose_splits", lambda inputs: splits)
    sq, sk, chosen = 100, 125, settings(False, 0.4, first_sample=2**47)
    where = {"sample": torch.tensor(2**47), "head": torch.tensor(3), "row": torch.arange(sq)}
    expected = drop_mask(KEY, 0.4, **where, num_columns=sk)
    for name, found in zip(("forward", "grad_q", "grad_v"), dropped_elements(chosen, sq, sk, 1, 1, 128), strict=True):
        assert torch.equal(found[0, 0].cpu(), expected), name


def test_one_walk_is_chosen_where_it_keeps_the_gpu_busy(monkeypatch):
    monkeypatch.setattr(attention_kernel, "count_multiprocessors", lambda device: 132)
    monkeypatch.setattr(attention_kernel, "find_architecture", lambda device: 90)

    def choose(heads, groups, head_dim, sk=2048, dtype=torch.bfloat16):
        k = torch.empty(sk, 1, groups, head_dim, dtype=dtype)
        return attention_kernel.choose_splits(Inputs(k.new_empty(sk, 1, heads, head_dim), k, k))

    assert [choose(n, n, 128) for n in (8, 64, 128, 140, 200, 264)] == [0, 2, 1, 2, 1, 1]
    assert [choose(n, n, 64) for n in (64, 128, 256, 280)] == [0, 2, 1, 2]
    assert choose(128, 8, 128) == choose(64, 64, 128, sk=64) == 0
    assert choose(128, 128, 256) == choose(128, 128, 128, dtype=torch.float32) == 0
    monkeypatch.setattr(attention_kernel, "find_architecture", lambda device: 100)
    assert choose(128, 128, 128) == 0


@kernel_test
def test_gradients_of_one_walk_are_the_same_bits_every_time(monkeypatch):
    monkeypatch.setattr(attention_kernel, "choose_splits", lambda inputs: 2)
    inputs = random_inputs(70, 70, 1, 1, 1, 64, torch.bfloat16)
    first, second = (run(attention_kernel, *inputs, None, None, settings()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

"""Which channels a norm's output cannot carry, and which it may soon not carry: the specification."""

from __future__ import annotations

import pytest
import torch

from tempo_kernels.norm.lost_channels import find_candidate_channels, find_lost_channels

HIDDEN = 64


def test_candidates_are_what_a_small_move_could_lose():
    weight, bias = torch.ones(HIDDEN), torch.zeros(HIDDEN)
    weight[0], weight[1], bias[2], bias[3] = 0.09, 0.1, 1.83, -1.8
    candidates = find_candidate_channels(weight, bias, torch.bfloat16, False)
    assert candidates.nonzero().flatten().tolist() == [0, 2]
    assert not find_lost_channels(weight, bias, torch.bfloat16, False).any()
    assert torch.equal(find_candidate_channels(weight - 1, bias, torch.bfloat16, True), candidates)
    small = torch.tensor([0.0058, 0.006] * 32)
    assert find_candidate_channels(small, bias * 0, torch.bfloat16, False).tolist() == [True, False] * 32


def test_candidates_of_several_norms_at_once_are_those_of_each():
    weights, biases = torch.randn(7, HIDDEN) * torch.rand(7, 1), torch.randn(7, HIDDEN)
    for bias in (biases, None):
        together = find_candidate_channels(weights, bias, torch.bfloat16, False)
        for number, weight in enumerate(weights):
            alone = find_candidate_channels(weight, None if bias is None else bias[number], torch.bfloat16, False)
            assert torch.equal(together[number], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_lost_channel_is_a_candidate(dtype):
    weight = torch.cat([torch.zeros(100), torch.logspace(-40, 0, 400), -torch.rand(500)])
    bias = torch.randn(1000) * torch.logspace(-40, 1, 1000)
    for beta in (bias, None):
        lost = find_lost_channels(weight, beta, dtype, False)
        assert lost.any() and not (lost & ~find_candidate_channels(weight, beta, dtype, False)).any()

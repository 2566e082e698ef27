"""How the norms' kernels know, without waiting for the GPU, how much room lost channels need: the host's part."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch

from tempo_kernels.norm import eager, recount
from tempo_kernels.norm import reserve as module
from tempo_kernels.norm.reserve import PERIOD, capacity_for, reserve_of

HIDDEN = 64


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(module, "_reserves", {})


def norm(hidden_size=HIDDEN):
    return torch.nn.Parameter(torch.ones(hidden_size)), torch.nn.Parameter(torch.zeros(hidden_size))


def call(weight, bias, candidates=None, beyond=0, dtype=torch.float32, zero_centered=False):
    """One forward, whose kernel counts `candidates` and finds so many channels beyond the capacity."""
    reserve = reserve_of(weight, bias, dtype, zero_centered)
    if candidates is not None:
        reserve.counts[0] = candidates
        reserve.counts[1] = max(int(reserve.counts[1]), beyond)
    return reserve.capacity


def test_the_first_call_counts_the_parameters_themselves():
    weight, bias = norm()
    assert call(weight, bias) == 0
    weight, bias = norm()
    weight.data[:3], bias.data[10:20] = 0.0, 1.5
    assert call(weight, bias) == 16
    weight, bias = norm()
    weight.data.fill_(-1.0)
    assert call(weight, bias, zero_centered=True) == HIDDEN


def test_what_a_forward_counts_is_used_from_a_fixed_call_on_and_not_before():
    weight, bias = norm()
    capacities = [call(weight, bias, candidates=5) for _ in range(3 * PERIOD)]
    assert capacities == [0] * 2 * PERIOD + [8] * PERIOD
    capacities = [call(weight, bias, candidates=0) for _ in range(3 * PERIOD)]
    assert capacities == [8] * 2 * PERIOD + [0] * PERIOD


def test_the_host_waits_only_for_a_copy_that_is_a_whole_period_old():
    events = []

    class Event:
        def record(self):
            events.append(("copied", count))

        def synchronize(self):
            events.append(("read", count))

    weight, bias = norm()
    reserve = reserve_of(weight, bias, torch.float32, False)
    reserve._copied = Event()
    for count in range(1, 3 * PERIOD):  # noqa: B007  (the event reads it)
        call(weight, bias, candidates=0)
    assert events == [("copied", PERIOD), ("read", 2 * PERIOD), ("copied", 2 * PERIOD)]


def test_too_little_room_warns_once_and_makes_room():
    weight, bias = norm()
    call(weight, bias, candidates=0)
    for _ in range(2 * PERIOD - 1):
        call(weight, bias, candidates=20, beyond=20)
    with pytest.warns(RuntimeWarning, match="20 of 64 channels.* tempo_kernels.norm.recount"):
        assert call(weight, bias, candidates=20) == 24
    for _ in range(5 * PERIOD):
        assert call(weight, bias, candidates=20) == 24
    for _ in range(PERIOD):
        call(weight, bias, candidates=40, beyond=16)
    with pytest.warns(RuntimeWarning, match="16 of 64 channels"):
        for _ in range(2 * PERIOD):
            call(weight, bias, candidates=40)


def test_a_warning_turned_into_an_error_leaves_the_room_made():
    weight, bias = norm()
    for _ in range(2 * PERIOD):
        call(weight, bias, candidates=20, beyond=20)
    with warnings.catch_warnings(), pytest.raises(RuntimeWarning):
        warnings.simplefilter("error")
        call(weight, bias)
    assert [call(weight, bias, candidates=20) for _ in range(4 * PERIOD)] == [24] * 4 * PERIOD


def test_recount_makes_the_next_call_of_every_norm_count():
    norms = [norm(), norm()]
    for weight, bias in norms:
        assert call(weight, bias) == 0
        weight.data.zero_()
        assert call(weight, bias) == 0
    recount()
    for weight, bias in norms:
        assert call(weight, bias) == HIDDEN


def test_an_optimizer_step_does_not_make_the_host_count(monkeypatch):
    weight, bias = norm()
    call(weight, bias)
    monkeypatch.setattr(eager, "candidate_channels", None)
    optimizer = torch.optim.SGD([weight, bias], lr=0.1)
    weight.grad, bias.grad = torch.ones(HIDDEN), torch.ones(HIDDEN)
    for _ in range(3 * PERIOD):
        optimizer.step()
        call(weight, bias, candidates=0)


def test_two_norms_two_dtypes_and_two_forms_share_nothing():
    (first, first_bias), (second, second_bias) = norm(), norm()
    second.data[:10] = 0.0
    assert [call(first, first_bias), call(second, second_bias), call(second, None)] == [0, 16, 16]
    assert call(second, second_bias, zero_centered=True) == 0
    first.data.fill_(1e-6)
    recount()
    assert call(first, None, dtype=torch.float32) == 0 and call(first, None, dtype=torch.float16) == HIDDEN
    reserves = [id(reserve.counts) for reserve in module._reserves.values()]
    assert len(set(reserves)) == len(reserves) == 6


def test_what_is_known_goes_with_the_parameters():
    (weight, bias), (other, _) = norm(), norm()
    call(weight, bias), call(weight, None), call(other, None)
    assert len(module._reserves) == 3
    del bias
    gc.collect()
    assert len(module._reserves) == 2
    loss = (weight * weight).sum()
    del weight
    gc.collect()
    assert len(module._reserves) == 2, "the graph of a loss still holds the parameter"
    del loss
    gc.collect()
    assert len(module._reserves) == 1


def test_views_made_anew_for_each_call_are_the_norm_whose_place_they_show():
    flat = torch.ones(4 * HIDDEN)
    flat[2 * HIDDEN :] = 0.0
    for _ in range(2):
        parts = flat.view(4, HIDDEN)
        assert [call(parts[i], None) for i in range(4)] == [0, 0, HIDDEN, HIDDEN]
    assert len(module._reserves) == 4
    del flat, parts
    gc.collect()
    assert not module._reserves


def test_a_captured_graph_keeps_the_room_of_before_and_an_unknown_norm_refuses_it(monkeypatch):
    (weight, bias), unknown = norm(), norm()
    for _ in range(2 * PERIOD):
        call(weight, bias, candidates=20)
    monkeypatch.setattr(module, "_is_captured", lambda weight: True)
    assert [call(weight, bias) for _ in range(3 * PERIOD)] == [0] * 3 * PERIOD
    with pytest.raises(RuntimeError, match="CUDA graph is being captured.* run it once before"):
        call(*unknown)
    assert len(module._reserves) == 1
    recount()
    with pytest.raises(RuntimeError, match="CUDA graph is being captured"):
        call(weight, bias)


@pytest.mark.parametrize("candidates", [0, 1, 7, 8, 63, 64, 999, 1000])
def test_there_is_room_for_every_candidate_in_multiples_of_eight_and_none_where_there_are_none(candidates):
    capacity = capacity_for(candidates, 1000)
    assert capacity % 8 == 0 and (capacity > 0) == (candidates > 0)
    assert candidates <= capacity <= 1000


def test_candidates_are_half_of_the_offset_and_an_eighth_of_the_mean_away():
    weight, bias = torch.ones(HIDDEN), torch.zeros(HIDDEN)
    weight[0], weight[1], bias[2], bias[3] = 0.12, 0.13, 1.01, -0.99
    candidates = eager.candidate_channels(weight, bias, torch.bfloat16, False)
    assert candidates.nonzero().flatten().tolist() == [0, 2]
    assert not eager.lost_channels(weight, bias, torch.bfloat16, False).any()
    assert torch.equal(eager.candidate_channels(weight - 1, bias, torch.bfloat16, True), candidates)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_lost_channel_is_a_candidate(dtype):
    weight = torch.cat([torch.zeros(100), torch.logspace(-40, 0, 400), -torch.rand(500)])
    bias = torch.randn(1000) * torch.logspace(-40, 1, 1000)
    for beta in (bias, None):
        lost = eager.lost_channels(weight, beta, dtype, False)
        assert lost.any() and not (lost & ~eager.candidate_channels(weight, beta, dtype, False)).any()

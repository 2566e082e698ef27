"""Which channels are lost or may soon be, how much room they need, and when the host waits: the host's part."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch.nn import Parameter

from tempo_kernels.norm import reserve as module
from tempo_kernels.norm.lost_channels import find_candidate_channels, find_lost_channels
from tempo_kernels.norm.reserve import MAX_MOVES, check_after_backward, choose_capacity, find_reserve

HIDDEN = 64
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(module, "_reserves", {})
    monkeypatch.setattr(module, "_written", copy.deepcopy(module._written))


@pytest.fixture
def waits(monkeypatch):
    """What the host waited for: "count" or "read"."""
    found = []
    wait_for = module._wait_for

    def noted(counts, *copied):
        found.append("read" if copied else "count")
        return wait_for(counts, *copied)

    monkeypatch.setattr(module, "_wait_for", noted)
    return found


def norm(hidden_size=HIDDEN):
    return Parameter(torch.ones(hidden_size)), Parameter(torch.zeros(hidden_size))


def call(weight, bias, dtype=torch.float32, zero_centered=False, needs_grad=True):
    """The capacity that one forward finds."""
    return find_reserve(weight, bias, dtype, zero_centered, needs_grad).capacity


class Norm(torch.autograd.Function):
    """Its kernel counts `candidates`, and finds so many channels beyond the capacity."""

    @staticmethod
    def forward(ctx, x, weight, bias, candidates, beyond):
        reserve = find_reserve(weight, bias, x.dtype, False, True)
        reserve.counts.copy_(torch.tensor([candidates, max(int(reserve.counts[1]), beyond)]))
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        check_after_backward(CPU)
        return grad * 2, None, None, None, None


def forward(leaves, candidates=0, beyond=0, x=None):
    return Norm.apply(torch.ones(3, requires_grad=True) if x is None else x, *leaves, candidates, beyond)


def test_the_first_call_counts_the_parameters_themselves():
    weight, bias = norm()
    assert call(weight, bias) == 0
    weight, bias = norm()
    weight.data[:3], bias.data[10:20] = 0.0, 2.5
    assert call(weight, bias) == 16
    weight, bias = norm()
    weight.data.fill_(-1.0)
    assert call(weight, bias, zero_centered=True) == HIDDEN


def test_every_change_that_torch_sees_is_counted_before_the_next_call(waits):
    weight, bias = norm()
    assert call(weight, bias) == 0
    with torch.no_grad():
        weight[10:20] = 0.0
    assert call(weight, bias) == 16
    module_ = torch.nn.LayerNorm(HIDDEN)
    assert call(module_.weight, module_.bias) == 0
    module_.load_state_dict({"weight": torch.zeros(HIDDEN), "bias": torch.zeros(HIDDEN)})
    assert call(module_.weight, module_.bias) == HIDDEN
    weight.data = torch.ones(HIDDEN)
    assert call(weight, bias) == 0
    assert waits == ["count"] * 5


def test_norms_that_changed_are_counted_together_whatever_their_form(waits):
    norms = [norm() for _ in range(5)] + [norm(32)]
    forms = [{}, {}, {"zero_centered": True}, {"dtype": torch.float16}, {"dtype": torch.bfloat16}, {}]
    rms = Parameter(torch.ones(HIDDEN))

    def capacities():
        return [call(*leaves, **form) for leaves, form in zip(norms, forms, strict=True)] + [call(rms, None)]

    assert capacities() == [0] * 2 + [0] * 4 + [0]
    assert waits == ["count"] * 7
    with torch.no_grad():
        for number, leaves in enumerate(norms):
            leaves[0][: 7 * number] = 0.0
        rms[0] = 0.0
        norms[2][0].fill_(-1.0)
    waits.clear()
    assert capacities() == [0, 8, HIDDEN, 24, 32, 32, 8] and waits == ["count"]
    assert capacities() == [0, 8, HIDDEN, 24, 32, 32, 8] and waits == ["count"]


def test_an_optimizer_costs_one_wait_a_step_for_all_norms(waits):
    norms = [norm() for _ in range(6)]
    leaves = [leaf for each in norms for leaf in each]
    optimizer = torch.optim.AdamW(leaves, lr=1e-3, foreach=True)
    for each in norms:
        call(*each)
    for _ in range(3):
        for leaf in leaves:
            leaf.grad = torch.ones(HIDDEN)
        optimizer.step()
        waits.clear()
        for _ in range(3):
            for each in norms:
                call(*each)
        assert waits == ["count"]


def test_memory_that_always_moves_is_not_counted_each_time(waits):
    weight, bias = norm()
    for _ in range(MAX_MOVES + 5):
        weight.data = weight.detach().clone()
        call(weight, bias)
    assert len(waits) == 1 + MAX_MOVES
    with torch.no_grad():
        weight.zero_()
    assert call(weight, bias) == HIDDEN


def test_parameters_without_memory_at_present_are_left_out(waits):
    (weight, bias), (gone, gone_bias), flat = norm(), norm(), torch.ones(2 * HIDDEN)
    call(gone, gone_bias), call(flat[HIDDEN:], None)
    call(weight, bias)
    gone.data = torch.empty(0)
    flat.untyped_storage().resize_(0)
    with torch.no_grad():
        weight[:3] = 0.0
    assert call(weight, bias) == 8
    flat.untyped_storage().resize_(2 * HIDDEN * 4)
    gone.data = torch.zeros(HIDDEN)
    flat.zero_()
    waits.clear()
    assert [call(gone, gone_bias), call(flat[HIDDEN:], None)] == [HIDDEN, HIDDEN] and waits == ["count"]


def test_a_call_without_gradients_never_counts(waits):
    weight, bias = norm()
    weight.data.zero_()
    assert call(weight, bias, needs_grad=False) == 0 and not waits
    assert call(weight, bias) == HIDDEN and waits == ["count"]


def test_what_forwards_count_is_there_for_the_forward_after_the_backward(waits):
    first, second = norm(), norm()
    y = forward(second, 9, x=forward(first, 5))
    forward(first, 5)
    waits.clear()
    assert [call(*first), call(*second)] == [0, 0]
    y.sum().backward()
    assert waits == ["read"]
    assert [call(*first), call(*second)] == [8, 16]
    forward(first, 0).sum().backward()
    assert [call(*first), call(*second)] == [0, 16]
    assert waits == ["read"] * 2


def test_a_backward_before_which_no_forward_counted_waits_for_nothing(waits):
    y = forward(norm())
    y.sum().backward(retain_graph=True)
    waits.clear()
    y.sum().backward()
    assert not waits


def test_counts_that_are_older_than_the_hosts_are_not_used():
    first, second, third = norm(), norm(), norm()
    y = forward(third, 9, x=forward(first, 0))
    with torch.no_grad():
        first[0][:20] = second[0][:20] = 0.0
    call(*second)
    y.sum().backward()
    assert [call(*first), call(*third)] == [24, 16]


def test_too_little_room_raises_in_that_backward_and_makes_room():
    leaves = norm()
    for _ in range(2):
        forward(leaves).sum().backward()
        with pytest.raises(
            RuntimeError,
            match=r"norm \d+ in the order of first calls \(hidden size 64, torch.float32\): 20 channels "
            r'more than there was room for.* set norm to "recompute"',
        ):
            forward(leaves, 20, beyond=20).sum().backward()
        assert call(*leaves) == 24
        forward(leaves, 20).sum().backward()
        with torch.no_grad():
            leaves[0][0] = 1.0
        assert call(*leaves) == 0


def test_an_error_elsewhere_in_a_backward_leaves_its_counts_to_the_next():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("broken")

    leaves, other = norm(), norm()
    with pytest.raises(ArithmeticError):
        forward(leaves, 20, x=Broken.apply(torch.ones(3, requires_grad=True))).sum().backward()
    forward(other).sum().backward()
    assert call(*leaves) == 24


def test_two_norms_two_dtypes_and_two_forms_share_nothing():
    (first, first_bias), (second, second_bias) = norm(), norm()
    second.data[:10] = 0.0
    assert [call(first, first_bias), call(second, second_bias), call(second, None)] == [0, 16, 16]
    assert call(second, second_bias, zero_centered=True) == 0
    with torch.no_grad():
        first.fill_(6e-3)
    assert call(first, None) == 0
    with torch.no_grad():
        first.fill_(1e-6)
    assert call(first, None) == call(first, None, dtype=torch.float16) == HIDDEN
    pointers = [reserve.counts.data_ptr() for reserve in module._reserves.values()]
    assert len(set(pointers)) == len(pointers) == 6


def test_what_is_known_goes_with_the_parameters():
    (weight, bias), (other, _) = norm(), norm()
    call(weight, bias), call(weight, None), call(other, None)
    assert len(module._reserves) == len(module._written[CPU]) == 3
    del bias
    gc.collect()
    assert len(module._reserves) == len(module._written[CPU]) == 2
    loss = (weight * weight).sum()
    del weight
    gc.collect()
    assert len(module._reserves) == 2, "the graph of a loss still holds the parameter"
    del loss
    gc.collect()
    assert len(module._reserves) == len(module._written[CPU]) == 1


def test_views_made_anew_for_each_call_are_the_norm_whose_place_they_show(waits):
    flat = torch.ones(4 * HIDDEN)
    flat[2 * HIDDEN :] = 0.0
    for _ in range(2):
        parts = flat.view(4, HIDDEN)
        assert [call(parts[i], None) for i in range(4)] == [0, 0, HIDDEN, HIDDEN]
    assert len(module._reserves) == len(waits) == 4
    flat[:HIDDEN] = 0.0
    assert [call(parts[i], None) for i in range(4)] == [HIDDEN, 0, HIDDEN, HIDDEN]
    assert len(module._reserves) == 4 and len(waits) == 5
    del flat, parts
    gc.collect()
    assert not module._reserves


def test_a_captured_graph_keeps_the_room_of_before_and_an_unknown_norm_refuses_it(monkeypatch, waits):
    (weight, bias), unknown, uncounted = norm(), norm(), norm()
    call(weight, bias)
    call(*uncounted, needs_grad=False)
    monkeypatch.setattr(module, "_is_capturing", lambda device: True)
    with torch.no_grad():
        weight.zero_()
    waits.clear()
    assert call(weight, bias) == 0
    for leaves in (unknown, uncounted):
        with pytest.raises(RuntimeError, match="CUDA graph is being captured.* run it once before"):
            call(*leaves)
    assert len(module._reserves) == 2
    forward((weight, bias), 5).sum().backward()
    assert not waits


@pytest.mark.parametrize("candidates", [0, 1, 7, 8, 63, 64, 999, 1000])
def test_there_is_room_for_every_candidate_in_multiples_of_eight_and_none_where_there_are_none(candidates):
    capacity = choose_capacity(candidates, 1000)
    assert capacity % 8 == 0 and (capacity > 0) == (candidates > 0)
    assert candidates <= capacity <= 1000


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

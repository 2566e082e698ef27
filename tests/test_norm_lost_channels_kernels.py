"""The channels that a norm's output cannot carry, in its Triton kernels: see interpreted.py for where they run."""

from __future__ import annotations

import warnings

import pytest
import torch
from interpreted import DEVICE, DTYPES, kernel_test
from test_norm_kernels import check_norm, norm_forward_and_backward, random_norm

from tempo_kernels.norm import eager, function, layer_norm, recount
from tempo_kernels.norm import kernel as norm_kernel
from tempo_kernels.norm import kernel_long_rows as long_rows
from tempo_kernels.norm.kernel_lost_channels import find_lost
from tempo_kernels.norm.reserve import PERIOD, reserve_of


@pytest.fixture
def rows_are_long(monkeypatch, request):
    if request.param:
        for constant in ("FORWARD_ROW_BYTES", "BACKWARD_ROW_BYTES"):
            monkeypatch.setattr(norm_kernel, constant, 64)
        monkeypatch.setitem(long_rows.OPTIONS, "BLOCK_COLUMNS", 32)


both_lengths = pytest.mark.parametrize("rows_are_long", [False, True], ids=["whole rows", "long rows"], indirect=True)


def random_parameters(hidden_size, dtype):
    """Of every kind: carried, lost by a small gamma or by a large beta, and candidates."""
    weight = torch.randn(hidden_size) * torch.tensor([1.0, 0.05, 0.0, 1e-37, 1.0])[torch.arange(hidden_size) % 5]
    bias = torch.randn(hidden_size) * torch.tensor([1.0, 0.0, 3.0])[torch.arange(hidden_size) % 3]
    return weight.to(DEVICE, dtype), bias.to(DEVICE, dtype)


@kernel_test
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(
    ("hidden_size", "dtype"), [(1, DTYPES[0]), (33, DTYPES[1]), (4096, DTYPES[2]), (9000, DTYPES[2])]
)
def test_slots_and_counts_are_the_specified_ones(hidden_size, dtype, zero_centered):
    weight, bias = random_parameters(hidden_size, dtype)
    x = torch.zeros(1, hidden_size, dtype=dtype, device=DEVICE)
    for beta in (bias, None):
        reserve = reserve_of(weight, beta, dtype, zero_centered)
        lost = eager.lost_channels(weight, beta, dtype, zero_centered).nonzero().flatten().tolist()
        candidates = int(eager.candidate_channels(weight, beta, dtype, zero_centered).sum())
        for capacity in (8, hidden_size + 8, max(1, len(lost) - 3)):
            reserve.capacity = capacity
            reserve.counts.fill_(-1)
            slots, *_ = find_lost(x, weight, beta, zero_centered)
            found = {channel: slot for channel, slot in enumerate(slots.tolist()) if slot != -1}
            assert found == {channel: slot for slot, channel in enumerate(lost) if slot < capacity}
            assert reserve.counts.tolist() == [candidates, max(0, len(lost) - capacity)]


@kernel_test
@both_lengths
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(("shape", "dtype"), [((9, 130), DTYPES[0]), ((2, 600), DTYPES[2])])
def test_a_forward_without_room_counts_what_is_specified(shape, dtype, zero_centered, rows_are_long):
    weight = torch.full(shape[-1:], 1.0 - zero_centered, device=DEVICE, dtype=dtype)
    bias = torch.zeros_like(weight)
    x = torch.randn(shape, device=DEVICE).to(dtype)
    counts = reserve_of(weight, bias, dtype, zero_centered).counts
    for changed in range(3):
        weight[: 3 * changed], bias[20 : 20 + changed] = -1.0 * zero_centered, 1.5
        norm_kernel.forward(x, weight, bias, 1e-5, True, zero_centered)
        assert counts.tolist() == [4 * changed, 3 * changed]
    weight.fill_(1.0 - zero_centered)
    norm_kernel.forward(x, weight, bias, 1e-5, True, zero_centered)
    assert counts.tolist() == [2, 6], "the most that were beyond the capacity stay until they are read"


@kernel_test
def test_nothing_is_launched_and_nothing_kept_for_lost_channels_where_none_is_near(monkeypatch):
    x, weight, bias, _ = random_norm("initial", (4, 64), torch.float32)
    monkeypatch.setattr(norm_kernel.find_lost.__globals__["_slots_kernel"], "fn", None)
    slots, lost_xhat = norm_kernel.forward(x, weight, bias, 1e-5, True, False)[2:]
    assert slots.shape == (0,) and lost_xhat.shape == (4, 0)


@kernel_test
def test_a_column_is_kept_for_each_candidate_in_multiples_of_eight():
    x, weight, bias, grad = random_norm("initial", (4, 64), torch.float32)
    weight[3], weight[17], weight[30], bias[60] = 0.0, -1e-35, 1e-5, 50.0
    slots, lost_xhat = norm_kernel.forward(x, weight, bias, 1e-5, True, False)[2:]
    assert lost_xhat.shape == (4, 8)
    assert {channel: slot for channel, slot in enumerate(slots.tolist()) if slot >= 0} == {3: 0, 17: 1, 60: 2}
    # 30 is no candidate that is lost already, but it is lost at once when an optimizer makes it so.
    weight[30] = 0.0
    assert norm_kernel.forward(x, weight, bias, 1e-5, True, False)[2][30] == 2
    check_norm(x, weight, bias, grad)


@kernel_test
def test_gradients_are_right_in_every_step_while_an_optimizer_takes_gammas_through_zero():
    x, weight, bias, grad = random_norm("initial", (6, 64), torch.float32)
    moves = (torch.arange(64) % 6 == 0).to(DEVICE)
    weight[moves] = 0.3 + torch.rand(64, device=DEVICE)[moves] * 0.1
    bias += 0.02
    step = torch.where(moves, 0.006, 0.0)
    lost = set()
    for _ in range(80):
        weight -= step
        lost.add(int(eager.lost_channels(weight, bias, torch.float32, False).sum()))
        check_norm(x, weight, bias, grad)
    assert len(lost) > 3


@kernel_test
@both_lengths
@pytest.mark.parametrize("room", [0, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lost_channels_without_room_are_recovered_as_well_as_can_be_and_spoil_no_other(dtype, room, rows_are_long):
    x, weight, bias, grad = random_norm("initial", (9, 136), dtype)
    weight[: room - 1 if room else 0] = 0.0
    reserve_of(weight, bias, dtype, False)
    gone = torch.arange(136) % 8 == 7
    weight.data[gone] = torch.tensor([0.0, 1e-30, 1e-3, 0.3], dtype=dtype, device=DEVICE).repeat(5)[: gone.sum()]
    bias.data[gone] = 100.0
    gone[7] &= room == 0  # for which there is room
    found = norm_forward_and_backward(norm_kernel, x, weight, bias, grad)
    assert norm_kernel.forward(x, weight, bias, 1e-5, True, False)[3].size(1) == room
    exact = norm_forward_and_backward(eager, *(t.cpu().double() for t in (x, weight, bias, grad)))
    eps, grad = torch.finfo(dtype).eps, grad.cpu().double()
    for name, ours, truth in zip(["y", "grad_x", "grad_weight", "grad_bias"], found, exact, strict=True):
        error, limit = (ours.cpu().double() - truth).abs(), 16 * eps * truth.abs().max()
        assert error.isfinite().all(), name
        if name == "grad_x":
            assert error[:, gone].max() <= 0.25 * truth.abs().max()
            error, limit = error[:, ~gone], min(1600 * eps, 0.25) * truth.abs().max()
        if name == "grad_weight":
            # No xhat is off by more than it is itself, or by the rounding of y to half a step of 100 eps.
            assert (error[gone] <= (grad.abs() * 4).sum(0)[gone]).all()
            error = error[~gone]
        assert error.max() <= limit, name


@kernel_test
def test_parameters_replaced_behind_torchs_back_warn_once_and_are_right_afterwards(monkeypatch):
    monkeypatch.setattr(function, "_backend", lambda x: norm_kernel)
    x, weight, bias, grad = random_norm("initial", (4, 64), torch.float32)
    layer_norm(x, weight, bias)
    weight.data[10:20] = 0.0
    with pytest.warns(RuntimeWarning, match="10 of 64 channels") as caught:
        for _ in range(4 * PERIOD):
            layer_norm(x, weight, bias)
    assert len(caught) == 1
    check_norm(x, weight, bias, grad)
    weight.data[30:60] = 0.0
    recount()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_norm(x, weight, bias, grad)


@kernel_test
def test_a_norm_that_changed_since_its_forward_is_differentiated_with_the_channels_of_its_forward():
    x, weight, bias, grad = random_norm("initial", (6, 64), torch.float32)
    first, second = weight.clone(), weight.clone()
    first[5], second[40:50] = 0.0, 0.0
    wanted = norm_forward_and_backward(norm_kernel, x, first, bias, grad)
    y, rstd, slots, lost_xhat = norm_kernel.forward(x, first, bias, 1e-5, True, False)
    norm_kernel.forward(x, second, bias, 1e-5, True, False)
    found = norm_kernel.backward(grad, y, rstd, first, bias, slots, lost_xhat, True, False)
    assert all(torch.equal(a, b) for a, b in zip([y, *found], wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_no_call_but_the_first_waits_for_the_gpu():
    x, weight, bias, grad = random_norm("one in a hundred gamma 0", (256, 768), torch.bfloat16)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    layer_norm(*leaves).backward(grad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3 * PERIOD):
            layer_norm(*leaves).backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_captured_graph_gives_the_gradients_of_ordinary_calls():
    x, weight, bias, grad = random_norm("one in a hundred gamma 0", (256, 768), torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            wanted = norm_forward_and_backward(norm_kernel, x, weight, bias, grad)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = norm_forward_and_backward(norm_kernel, x, weight, bias, grad)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    with pytest.raises(RuntimeError, match="run it once before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        norm_forward_and_backward(norm_kernel, x, weight.clone(), bias, grad)

"""The channels that a norm's output cannot carry, in its Triton kernels: see interpreted.py for where they run."""

from __future__ import annotations

import pytest
import torch
from covering import parametrize_covering
from interpreted import DEVICE, DTYPES, kernel_test
from norm_kernel_checks import cast_sums, check_norm, norm_forward_and_backward, norm_of, random_norm

from tempo_kernels.norm import eager, layer_norm
from tempo_kernels.norm import kernel as norm_kernel
from tempo_kernels.norm import kernel_long_rows as long_rows
from tempo_kernels.norm import kernel_whole_rows as whole_rows
from tempo_kernels.norm.kernel_lost_channels import prepare_lost_channels
from tempo_kernels.norm.lost_channels import find_candidate_channels, find_lost_channels
from tempo_kernels.norm.reserve import find_reserve

SLEEP_CYCLES = 1_000_000_000  # half a second


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
        reserve = find_reserve(weight, beta, dtype, zero_centered, True)
        lost = find_lost_channels(weight, beta, dtype, zero_centered).nonzero().flatten().tolist()
        candidates = int(find_candidate_channels(weight, beta, dtype, zero_centered).sum())
        for capacity in (8, hidden_size + 8, max(1, len(lost) - 3)):
            reserve.capacity = capacity
            reserve.counts.fill_(-1)
            slots, _, _, affine = prepare_lost_channels(norm_of(weight, beta, zero_centered), x, True)
            found = {channel: slot for channel, slot in enumerate(slots.tolist()) if slot != -1}
            assert found == {channel: slot for slot, channel in enumerate(lost) if slot < capacity}
            assert reserve.counts.tolist() == [candidates, max(0, len(lost) - capacity)]
            parameters = [weight.float() + zero_centered] if beta is None else [weight.float() + zero_centered, beta]
            smallest = torch.finfo(torch.float32).tiny  # what is smaller may count as 0
            torch.testing.assert_close(affine, torch.stack([t.float() for t in parameters]), rtol=0, atol=smallest)


@kernel_test
@both_lengths
def test_a_gamma_whose_inverse_would_count_as_0_keeps_its_column(rows_are_long):
    weight = torch.ones(40, device=DEVICE)
    weight[3], weight[17], weight[29], weight[31] = 1.5 * 2.0**126, 2.0**62, 1e-20, 1e-18
    x, grad_y = torch.randn(3, 40, device=DEVICE) * 0.3, torch.randn(3, 40, device=DEVICE)
    grad_y[:, 3], grad_y[:, 17] = grad_y[:, 3] * 2.0**-126, grad_y[:, 17] * 2.0**-62
    grad_y *= 1e5
    norm = norm_of(weight, None, False)
    norm_kernel.forward(x, norm)  # counts the channels
    y, kept = norm_kernel.forward(x, norm)
    assert kept.lost.tolist() == [{3: 0, 29: 1}.get(channel, -1) for channel in range(40)]
    grad_x, sums = norm_kernel.backward(grad_y, y, kept, False, x.dtype, norm.sums_dtype)
    exact = [t.double() for t in (grad_y, x, weight)]
    _, statistics = eager.forward_from_input(exact[1].cpu(), norm_of(exact[2].cpu(), None, False))
    expected = eager.backward_from_input(
        exact[0].cpu(), exact[1].cpu(), norm_of(exact[2].cpu(), None, False), statistics
    )
    torch.testing.assert_close(grad_x.cpu().double(), expected[0], rtol=1e-5, atol=1)
    torch.testing.assert_close(sums.cpu().double(), expected[1], rtol=1e-5, atol=1)


@kernel_test
@both_lengths
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(("shape", "dtype"), [((9, 130), DTYPES[0]), ((2, 600), DTYPES[2])])
def test_a_forward_without_room_counts_what_is_specified(shape, dtype, zero_centered, rows_are_long):
    weight = torch.full(shape[-1:], 1.0 - zero_centered, device=DEVICE, dtype=dtype)
    bias = torch.zeros_like(weight)
    x = torch.randn(shape, device=DEVICE).to(dtype)
    counts = find_reserve(weight, bias, dtype, zero_centered, True).counts
    for changed in range(3):
        weight.data[: 3 * changed], bias.data[20 : 20 + changed] = -1.0 * zero_centered, 1.9
        _, kept = norm_kernel.forward(x, norm_of(weight, bias, zero_centered))
        assert kept.lost.shape == (0,) and counts.tolist() == [4 * changed, 3 * changed]
        assert torch.equal(kept.affine, torch.stack([weight.float() + zero_centered, bias.float()]))
    weight.data.fill_(1.0 - zero_centered)
    norm_kernel.forward(x, norm_of(weight, bias, zero_centered))
    assert counts.tolist() == [2, 6], "the most that were beyond the capacity stay until they are read"


@kernel_test
@both_lengths
def test_the_first_program_counts_and_computes_no_row(monkeypatch, rows_are_long):
    """What counts takes longest, so it has to start first; rows that lie outside would only make it longer."""
    rows = long_rows if norm_kernel.FORWARD_ROW_BYTES == 64 else whole_rows
    kernel, grids = rows._forward_kernel, []

    class FirstProgram:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[(1,)]

    x, weight, bias, _ = random_norm("initial", (9, 130), torch.float32)
    monkeypatch.setattr(rows, "_forward_kernel", FirstProgram())
    y, kept = norm_kernel.forward(x, norm_of(weight, bias))
    assert grids == [(10,) if rows is long_rows else (3,)]
    assert torch.equal(kept.affine, torch.stack([weight, bias])), "the first program has not counted"
    assert y.isnan().all() and kept.rstd.isnan().all(), "the first program computed rows too"


@kernel_test
def test_nothing_is_launched_and_nothing_kept_for_lost_channels_where_none_is_near(monkeypatch):
    x, weight, bias, _ = random_norm("initial", (4, 64), torch.float32)
    monkeypatch.setattr(norm_kernel.prepare_lost_channels.__globals__["_slots_kernel"], "fn", None)
    _, _, slots, lost_xhat = norm_kernel.forward(x, norm_of(weight, bias))[1]
    assert slots.shape == (0,) and lost_xhat.shape == (4, 0)


@kernel_test
def test_a_column_is_kept_for_each_candidate_in_multiples_of_eight():
    x, weight, bias, grad = random_norm("initial", (4, 64), torch.float32)
    weight[3], weight[17], weight[30], bias[60] = 0.0, -1e-35, 1e-5, 50.0
    _, _, slots, lost_xhat = norm_kernel.forward(x, norm_of(weight, bias))[1]
    assert lost_xhat.shape == (4, 8)
    assert {channel: slot for channel, slot in enumerate(slots.tolist()) if slot >= 0} == {3: 0, 17: 1, 60: 2}
    # 30 is no candidate that is lost already, but it is lost at once when an optimizer makes it so.
    weight.data[30] = 0.0
    assert norm_kernel.forward(x, norm_of(weight, bias))[1].lost[30] == 2
    check_norm(x, weight, bias, grad)


@kernel_test
@both_lengths
@parametrize_covering(has_bias=[True, False], room=[0, 8], dtype=DTYPES)
def test_lost_channels_without_room_have_nan_gradients_and_spoil_no_other_sum(dtype, room, has_bias, rows_are_long):
    x, weight, bias, grad = random_norm("initial", (5, 136), dtype)
    bias = bias if has_bias else None
    weight[: room - 1 if room else 0] = 0.0
    find_reserve(weight, bias, dtype, False, True)
    gone = torch.arange(136) % 8 == 7
    values = [0.0, 1e-30, 1e-3, 0.3] if has_bias and dtype != torch.float16 else [0.0]
    weight.data[gone] = torch.tensor(values * 20, dtype=dtype, device=DEVICE)[: gone.sum()]
    if has_bias:
        bias.data[gone] = 100.0
    else:
        weight.data[gone] = 0.0
    gone[7] &= room == 0  # for which there is room
    found = norm_forward_and_backward(norm_kernel, x, weight, bias, grad)
    assert norm_kernel.forward(x, norm_of(weight, bias))[1].lost_xhat.size(1) == room
    inputs = [t if t is None else t.cpu().double() for t in (x, weight, bias, grad)]
    exact = norm_forward_and_backward(eager, *inputs)
    # Without a bias, y itself is all that the other channels' gradients need of a lost one.
    assert found[1][:, gone].isnan().all() and torch.equal(found[2].isnan().cpu(), gone)
    assert found[1].isnan().all() or not has_bias
    for name, ours, truth in zip(["y", "grad_x", "grad_weight", "grad_bias"], found, exact, strict=False):
        error, limit = (ours.cpu().double() - truth).abs(), 16 * torch.finfo(dtype).eps * truth.abs().max()
        assert (error[error.isfinite()] <= limit).all(), name


@kernel_test
def test_a_norm_that_changed_since_its_forward_is_differentiated_with_the_channels_of_its_forward():
    x, weight, bias, grad = random_norm("initial", (6, 64), torch.float32)
    first, second = weight.clone(), weight.clone()
    first[5], second[40:50] = 0.0, 0.0
    expected = norm_forward_and_backward(norm_kernel, x, first, bias, grad)
    norm = norm_of(first, bias)
    y, kept = norm_kernel.forward(x, norm)
    first.copy_(second)
    norm_kernel.forward(x, norm)
    found = cast_sums(norm, *norm_kernel.backward(grad, y, kept, True, x.dtype, norm.sums_dtype))
    assert all(torch.equal(a, b) for a, b in zip([y, *found], expected, strict=True))


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu_but_the_end_of_a_backward_for_what_came_before_its_norms():
    x, weight, bias, grad = random_norm("one in a hundred gamma 0", (256, 768), torch.bfloat16)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    layer_norm(*leaves).backward(grad)
    before, after = torch.cuda.Event(), torch.cuda.Event()

    def sleep(_: torch.Tensor) -> None:
        torch.cuda._sleep(SLEEP_CYCLES)
        after.record()

    leaves[0].register_hook(sleep)  # runs after the norm's backward
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    before.record()
    for _ in range(3):
        y = layer_norm(*leaves)
    assert not before.query()
    y.backward(grad)
    assert before.query() and not after.query()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_captured_graph_gives_the_gradients_of_ordinary_calls():
    x, weight, bias, grad = random_norm("one in a hundred gamma 0", (256, 768), torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            expected = norm_forward_and_backward(norm_kernel, x, weight, bias, grad)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = norm_forward_and_backward(norm_kernel, x, weight, bias, grad)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with pytest.raises(RuntimeError, match="run it once before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        norm_forward_and_backward(norm_kernel, x, weight.clone(), bias, grad)

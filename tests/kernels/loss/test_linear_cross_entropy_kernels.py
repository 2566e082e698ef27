"""The loss head's Triton kernels against their specification: see interpreted.py for where they run."""

from __future__ import annotations

import functools

import loss_head_inputs
import pytest
import torch
from covering import parametrize_covering
from interpreted import DEVICE, DTYPES, INTERPRETED, assert_as_specified, kernel_test
from loss_head_inputs import HEADS, head_inputs, random_labels
from witness import assert_three_witnesses

from tempo_kernels.linear_cross_entropy import eager, function, kernel
from tempo_kernels.linear_cross_entropy.settings import Rows, Shares

# The target's share and every other column's; has padding left out; softcap; temperature.
PLAIN, SMOOTHED = (1.0, 0.0), (0.87, 1e-3)
SCALINGS = {
    "plain": (False, 0.0, 1.0),
    "temperature": (False, 0.0, 0.7),
    "softcap": (False, 5.0, 1.0),
    "padding": (True, 0.0, 1.0),
    "everything": (True, 30.0, 0.01),
}

chunk_of_logits = functools.partial(loss_head_inputs.chunk_of_logits, device=DEVICE)


def check(logits, targets, shares):
    """Each statistic, and the gradient with and without a part of the entropy's."""
    found = kernel.compute_statistics(logits, targets, shares)
    num_used = shares.num_real if shares.excludes_padding else logits.size(1)
    is_here = ((targets >= 0) & (targets < num_used)).cpu()
    assert torch.equal(found[2].cpu() > -torch.inf, is_here)
    if tuple(shares[3:6]) == SCALINGS["plain"]:
        assert torch.equal(found[0].cpu(), logits.float().amax(-1).cpu())

    def finite(statistics):
        return [row.nan_to_num(neginf=0.0) for row in statistics]

    names = ["top", "total", "target", "entropy" if shares.has_entropy else "sum"][: len(found)]
    assert_as_specified(
        finite(found), [logits], lambda t: finite(eager.compute_statistics(t, targets.cpu(), shares)), *names
    )
    top = found[0] + torch.rand(logits.size(0), device=DEVICE)  # another shard's is larger
    top = top.masked_fill(top == -torch.inf, 3.0)
    grad, slope = (torch.randn(logits.size(0), device=DEVICE) for _ in range(2))
    grad[-1:] = 0
    slope[-1:] = slope[:1] = 0
    total = found[1].clamp_min(1)

    def gradient(module, values, *vectors):
        values = values.clone()
        module.write_gradient_(values, Rows(targets.to(values.device), *vectors), shares)
        return [values]

    for vectors in ([top, grad / total, grad], [top, grad / total, grad, slope / total])[: 1 + shares.has_entropy]:
        assert_as_specified(
            gradient(kernel, logits, *vectors), [logits, *vectors], lambda *t: gradient(eager, *t), "grad_logits"
        )


@kernel_test
@parametrize_covering(
    each={"shape": [(5, 1000), (3, 4096), (2, 4097), (3, 12289), (1, 1), (4, 7), (9, 33), (2, 8200)]}, dtype=DTYPES
)
def test_statistics_and_gradient_are_as_specified_for_any_vocabulary(shape, dtype):
    logits, targets = chunk_of_logits(*shape, dtype)
    for num_real in {shape[1], max(1, shape[1] - 5), 0}:
        check(logits, targets, Shares(*SMOOTHED, num_real))
    check(logits, targets, Shares(*PLAIN, shape[1]))


@kernel_test
@parametrize_covering(each={"shape": [(5, 1000), (2, 4097), (3, 8200), (1, 1), (4, 7)]}, dtype=DTYPES, scaling=SCALINGS)
def test_scaled_logits_and_the_entropy_are_as_specified(shape, scaling, dtype):
    logits, targets = chunk_of_logits(*shape, dtype)
    for num_real in {shape[1], max(1, shape[1] - 5), 0} if scaling[0] else {shape[1]}:
        for has_entropy in (False, True):
            check(logits, targets, Shares(*PLAIN, num_real, *scaling, has_entropy))


@kernel_test
@pytest.mark.parametrize("scale", [1e-3, 0.3, 100.0])
def test_the_cap_is_as_exact_as_torchs_tanh(scale):
    logits, targets = chunk_of_logits(3, 5000, torch.float32, scale)
    check(logits, targets, Shares(*PLAIN, 5000, False, 1.0, 1.0, True))


@kernel_test
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_statistics_of_logits_around_ten_thousand_lose_no_digits(offset):
    logits, targets = chunk_of_logits(4, 5000, torch.float32)
    check(logits + offset, targets, Shares(*SMOOTHED, 5000))
    check(torch.randn(4, 5000, device=DEVICE) * 1e4, targets, Shares(*SMOOTHED, 4990))


@kernel_test
@pytest.mark.parametrize(("largest", "has_entropy"), [(400, False), (40, True)])
def test_rows_that_grow_to_their_end_and_that_fall_have_the_right_statistics(largest, has_entropy):
    rising = torch.linspace(-largest, largest, 3 * kernel.BLOCK, device=DEVICE)
    logits = torch.stack([rising, rising.flip(0), torch.full_like(rising, -3e38), 25.0 * rising])
    targets = torch.tensor([5, -1, 7, 9], device=DEVICE)
    check(logits, targets, Shares(*PLAIN, logits.size(1), has_entropy=has_entropy))


@kernel_test
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter's numpy
def test_logits_up_to_the_largest_number_and_minus_infinity_have_the_right_exponentials():
    logits = torch.full((4, kernel.BLOCK + 24), -3e38, device=DEVICE)
    logits[0, [9, kernel.BLOCK]] = 3e38
    logits[1, 7:] = -torch.inf
    logits[2, 16:] = torch.linspace(2.9e38, 3e38, kernel.BLOCK + 8, device=DEVICE)
    logits[3] = -torch.inf  # a shard of which every column is excluded
    targets = torch.tensor([9, 3, -1, 0], device=DEVICE)
    shares = Shares(1.0, 0.0, logits.size(1), has_entropy=True)
    found = kernel.compute_statistics(logits, targets, shares)
    assert found[0].tolist() == logits.amax(-1).tolist()
    assert found[1].tolist() == [2, 7, 1, 0] and found[3].tolist() == [0, 0, 0, 0]
    grad = torch.tensor([1.0, 1.0, 1.0, 0.0], device=DEVICE)
    kernel.write_gradient_(logits, Rows(targets, found[0], grad / found[1].clamp_min(1), grad), shares)
    expected = torch.zeros_like(logits)
    expected[0, [9, kernel.BLOCK]] = torch.tensor([-0.5, 0.5], device=DEVICE)
    expected[1, :7] = 1 / 7
    expected[1, 3] -= 1
    expected[2, -1] = 1
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=0)


@kernel_test
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter's numpy
@parametrize_covering(has_entropy=[False, True], value=[float("nan"), float("inf")], place=[3, kernel.BLOCK + 1])
def test_nan_and_infinity_stay_in_their_row(has_entropy, value, place):
    logits, targets = chunk_of_logits(3, kernel.BLOCK + 9, torch.bfloat16)
    logits[1, place] = value
    shares = Shares(1.0, 0.0, logits.size(1), has_entropy=has_entropy)
    found = kernel.compute_statistics(logits, targets, shares)
    for statistics in found[1::2]:
        assert statistics.isnan().tolist() == [False, True, False]
    grad = torch.ones(3, device=DEVICE)
    more = [(grad / found[1]).masked_fill(found[1].isnan(), 0.0)] if has_entropy else []
    kernel.write_gradient_(logits, Rows(targets, found[0], grad / found[1], grad, *more), shares)
    assert logits.isnan().any(-1).tolist() == [False, True, False]
    assert has_entropy or logits[1].isnan().all()
    grad[1] = 0
    kernel.write_gradient_(logits, Rows(targets, found[0], grad / found[1], grad, *more), shares)
    assert not logits[1].any()


@kernel_test
@pytest.mark.parametrize("has_entropy", [False, True])
def test_columns_of_minus_infinity_count_for_nothing_and_have_no_gradient(has_entropy):
    logits, targets = chunk_of_logits(3, 2 * kernel.BLOCK, torch.float32)[0], torch.full((3,), -1, device=DEVICE)
    logits[:, : kernel.BLOCK] = -torch.inf
    shares = Shares(1.0, 0.0, logits.size(1) if has_entropy else 1, has_entropy=has_entropy)
    alone = kernel.compute_statistics(logits[:, kernel.BLOCK :].contiguous(), targets, shares)
    found = kernel.compute_statistics(logits, targets, shares)
    chosen = [0, 1, 3] if has_entropy else [0, 1]
    assert torch.equal(found[chosen], alone[chosen])
    one = torch.ones(3, device=DEVICE)
    kernel.write_gradient_(logits, Rows(targets, found[0], one, one, *[one] * has_entropy), shares)
    assert logits.isfinite().all() and not logits[:, : kernel.BLOCK].any()


@kernel_test
@pytest.mark.parametrize("more", [(), (True, 30.0, 0.5, True)], ids=["smoothed", "everything"])
def test_no_rows_give_no_statistics(more):
    logits, targets = chunk_of_logits(0, 9, torch.float32)
    shares = Shares(1.0, 0.0, 5, *more) if more else Shares(0.9, 0.1, 9)
    assert kernel.compute_statistics(logits, targets, shares).shape == (4, 0)
    kernel.write_gradient_(logits, Rows(targets, *torch.empty(3 + bool(more), 0, device=DEVICE)), shares)


WHOLE = {
    "losses": (HEADS["losses"], {"label_smoothing": 0.1, "vocab_size": 90}),
    **{f"log_probs, {case}": (HEADS["log_probs"], HEADS["log_probs"].cases[case]) for case in ("plain", "everything")},
    "log_probs, small temperature": (HEADS["log_probs"], {"softcap": 30.0, "temperature": 0.01}),
}


@kernel_test
@pytest.mark.parametrize(("head", "case"), WHOLE.values(), ids=WHOLE)
def test_the_whole_function_is_right_by_the_three_witnesses(head, case, monkeypatch):
    monkeypatch.setattr(function, "choose_backend", lambda x, cpu: kernel if x.dtype in DTYPES else cpu)
    labels = random_labels(5, 2, 90, ignored=(0,))

    def ours(*tensors):
        device = DEVICE if tensors[0].dtype in DTYPES else "cpu"
        return head.ours(*(t.to(device) for t in (*tensors, labels)), chunk_tokens=4, **case).cpu()

    for dtype in DTYPES:
        inputs, grad = head_inputs(s=5, b=2), head.random_grad(labels)
        assert_three_witnesses(ours, lambda *t: head.reference(*t, labels, **case), inputs, grad, dtype)


@kernel_test
def test_float64_is_refused_where_kernels_run():
    logits = torch.zeros(1, 8, dtype=torch.float64, device=DEVICE)
    with pytest.raises(ValueError, match="logits are torch.float64; expected float32, float16 or bfloat16"):
        kernel.compute_statistics(logits, torch.zeros(1, dtype=torch.int64, device=DEVICE), Shares(1.0, 0.0, 8))
    assert INTERPRETED or logits.is_cuda

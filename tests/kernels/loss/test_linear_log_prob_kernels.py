"""The kernels of linear_log_prob against their specification: see interpreted.py for where they run."""

from __future__ import annotations

import pytest
import torch
from covering import parametrize_covering
from interpreted import DEVICE, DTYPES, assert_as_specified, kernel_test
from log_prob_inputs import CASES, reference
from loss_head_inputs import head_inputs, random_labels
from witness import assert_three_witnesses

from tempo_kernels.linear_cross_entropy import eager, kernel, linear_log_prob, operators
from tempo_kernels.linear_cross_entropy.settings import Rows, Shares

SCALINGS = {
    "plain": (False, 0.0, 1.0),
    "temperature": (False, 0.0, 0.7),
    "softcap": (False, 5.0, 1.0),
    "padding": (True, 0.0, 1.0),
    "everything": (True, 30.0, 0.01),
}


def chunk_of_logits(rows, columns, dtype, scale=8.0):
    """Logits, and targets of which some are on other shards."""
    logits = (torch.randn(rows, columns, device=DEVICE) * scale).to(dtype)
    targets = torch.randint(-columns // 4, columns + columns // 4 + 1, (rows,), device=DEVICE)
    targets[:2] = torch.tensor([0, columns - 1], device=DEVICE)[:rows]
    return logits, targets


def check(logits, targets, shares):
    found = kernel.find_statistics(logits, targets, shares)
    num_used = shares.num_real if shares.excludes_padding else logits.size(1)
    is_here = ((targets >= 0) & (targets < num_used)).cpu()
    assert torch.equal(found[2].cpu() > -torch.inf, is_here)

    def finite(statistics):
        return [statistics.nan_to_num(neginf=0.0)]

    assert_as_specified(
        finite(found), [logits], lambda t: finite(eager.find_statistics(t, targets.cpu(), shares)), "statistics"
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

    for vectors in ([top, grad / total, grad, slope / total], [top, grad / total, grad]):
        assert_as_specified(
            gradient(kernel, logits, *vectors), [logits, *vectors], lambda *t: gradient(eager, *t), "grad_logits"
        )


@kernel_test
@parametrize_covering(each={"shape": [(5, 1000), (2, 4097), (3, 8200), (1, 1), (4, 7)]}, dtype=DTYPES, scaling=SCALINGS)
def test_statistics_and_gradient_are_as_specified_for_any_vocabulary(shape, scaling, dtype):
    logits, targets = chunk_of_logits(*shape, dtype)
    for num_real in {shape[1], max(1, shape[1] - 5), 0} if scaling[0] else {shape[1]}:
        for has_entropy in (False, True):
            check(logits, targets, Shares(1.0, 0.0, num_real, *scaling, has_entropy))


@kernel_test
@pytest.mark.parametrize("scale", [1e-3, 0.3, 100.0])
def test_the_cap_is_as_exact_as_torchs_tanh(scale):
    logits, targets = chunk_of_logits(3, 5000, torch.float32, scale)
    check(logits, targets, Shares(1.0, 0.0, 5000, False, 1.0, 1.0, True))


@kernel_test
def test_a_row_that_grows_to_its_end_and_one_that_falls_have_the_right_entropy():
    rising = torch.linspace(-40, 40, 3 * kernel.BLOCK, device=DEVICE)
    logits = torch.stack([rising, rising.flip(0), torch.full_like(rising, -3e38), 1e3 * rising])
    check(logits, torch.tensor([5, -1, 7, 9], device=DEVICE), Shares(1.0, 0.0, logits.size(1), has_entropy=True))


@kernel_test
def test_columns_of_minus_infinity_count_for_nothing_and_have_no_gradient():
    logits, targets = chunk_of_logits(3, 2 * kernel.BLOCK, torch.float32)[0], torch.full((3,), -1, device=DEVICE)
    logits[:, : kernel.BLOCK] = -torch.inf
    shares = Shares(1.0, 0.0, logits.size(1), has_entropy=True)
    alone = kernel.find_statistics(logits[:, kernel.BLOCK :].contiguous(), targets, shares)
    found = kernel.find_statistics(logits, targets, shares)
    assert torch.equal(found[[0, 1, 3]], alone[[0, 1, 3]])
    one = torch.ones(3, device=DEVICE)
    kernel.write_gradient_(logits, Rows(targets, found[0], one, one, one), shares)
    assert logits.isfinite().all() and not logits[:, : kernel.BLOCK].any()


@kernel_test
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter's numpy
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [3, kernel.BLOCK + 1])
def test_nan_and_infinity_stay_in_their_row(place, value):
    logits, targets = chunk_of_logits(3, kernel.BLOCK + 9, torch.bfloat16)
    logits[1, place] = value
    shares = Shares(1.0, 0.0, logits.size(1), has_entropy=True)
    found = kernel.find_statistics(logits, targets, shares)
    assert found[1].isnan().tolist() == found[3].isnan().tolist() == [False, True, False]
    grad = torch.ones(3, device=DEVICE)
    slope = (grad / found[1]).masked_fill(found[1].isnan(), 0.0)
    kernel.write_gradient_(logits, Rows(targets, found[0], grad / found[1], grad, slope), shares)
    assert logits.isnan().any(-1).tolist() == [False, True, False]
    grad[1] = 0
    kernel.write_gradient_(logits, Rows(targets, found[0], grad / found[1], grad, slope), shares)
    assert not logits[1].any()


@kernel_test
def test_no_rows_give_no_statistics():
    logits, targets = chunk_of_logits(0, 9, torch.float32)
    shares = Shares(1.0, 0.0, 5, True, 30.0, 0.5, True)
    assert kernel.find_statistics(logits, targets, shares).shape == (4, 0)
    kernel.write_gradient_(logits, Rows(targets, *torch.empty(4, 0, device=DEVICE)), shares)


@kernel_test
@pytest.mark.parametrize("case", [CASES["plain"], CASES["everything"], {"softcap": 30.0, "temperature": 0.01}], ids=str)
def test_the_whole_function_is_right_by_the_three_witnesses(case, monkeypatch):
    monkeypatch.setattr(operators, "choose_backend", lambda x, cpu: kernel if x.dtype in DTYPES else cpu)
    labels = random_labels(5, 2, 90, ignored=(0,))

    def ours(hidden, weight, bias):
        device = DEVICE if hidden.dtype in DTYPES else "cpu"
        inputs = [t.to(device) for t in (hidden, weight, labels)]
        found = linear_log_prob(*inputs, bias=bias.to(device), chunk_tokens=4, return_entropy=True, **case)
        return torch.stack(found).cpu()

    inputs = head_inputs(s=5, b=2)
    for dtype in DTYPES:
        assert_three_witnesses(ours, lambda *t: reference(*t, labels, **case), inputs, torch.randn(2, 2, 5), dtype)

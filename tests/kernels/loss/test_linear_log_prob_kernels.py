"""The kernels' softcap, temperature and entropy against their specification: see interpreted.py for where they run.

The whole of linear_log_prob is in test_linear_cross_entropy_kernels.py.
"""

from __future__ import annotations

import functools

import loss_head_inputs
import pytest
import torch
from covering import parametrize_covering
from interpreted import DEVICE, DTYPES, assert_as_specified, kernel_test

from tempo_kernels.linear_cross_entropy import eager, kernel
from tempo_kernels.linear_cross_entropy.settings import Rows, Shares

SCALINGS = {
    "plain": (False, 0.0, 1.0),
    "temperature": (False, 0.0, 0.7),
    "softcap": (False, 5.0, 1.0),
    "padding": (True, 0.0, 1.0),
    "everything": (True, 30.0, 0.01),
}


chunk_of_logits = functools.partial(loss_head_inputs.chunk_of_logits, device=DEVICE)


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

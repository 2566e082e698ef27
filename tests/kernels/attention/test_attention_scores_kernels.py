"""Sinks, softcap, ALiBi and biases in attention's kernels, against unfused attention; see interpreted.py."""

from __future__ import annotations

import pytest
import torch
from attention_kernel_cases import check, random_inputs, run, settings
from covering import parametrize_covering
from interpreted import DEVICE, DTYPES, kernel_test

from tempo_kernels.attention import kernel as attention_kernel

BATCH, HEADS, SQ, SK = 2, 4, 40, 70

# What is given: a sink, the softcap, ALiBi's slopes, the bias's [b, a, sq].
CHANGES = {
    "sink": (True, None, False, None),
    "softcap": (False, 0.7, False, None),
    "slopes": (False, None, True, None),
    "bias of heads": (False, None, False, (1, HEADS, SQ)),
    "bias of samples": (False, None, False, (BATCH, 1, SQ)),
    "all": (True, 1.5, True, (BATCH, 1, 1)),
}
SEEN = {"causal": (True, None, False), "window": (False, (20, 2), False), "mask": (False, None, True)}


@kernel_test
@parametrize_covering(each={"change": CHANGES}, seen=SEEN, dtype=DTYPES, p=[0.0, 0.1])
def test_changed_scores_are_as_specified(change, seen, dtype, p):
    has_sink, softcap, has_slopes, bias_shape = change
    causal, window_size, has_mask = seen
    inputs = random_inputs(SQ, SK, BATCH, HEADS, 2, 32, dtype)
    mask = torch.rand(BATCH, 1, SQ, SK) < 0.3
    mask[0, 0, 2] = True
    check(
        *inputs,
        settings(causal, p, window_size=window_size, softcap=softcap),
        mask.to(DEVICE) if has_mask else None,
        sink=torch.randn(HEADS, device=DEVICE).to(dtype) if has_sink else None,
        bias=None if bias_shape is None else torch.randn(*bias_shape, SK, device=DEVICE).to(dtype),
        alibi_slopes=torch.tensor([0.5, 0.25, 0.0625, 0.3], device=DEVICE) if has_slopes else None,
    )  # fmt: skip


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sinks_no_larger_than_a_masked_score_share_a_row_whose_keys_are_all_masked(dtype):
    inputs = random_inputs(20, 20, 1, 4, 2, 32, dtype)
    mask = torch.rand(1, 1, 20, 20) < 0.3
    mask[0, 0, 5:9] = True
    sink = torch.tensor([-10000.0, -10008.0, -9984.0, float("-inf")], device=DEVICE).to(dtype)
    check(*inputs, settings(False, 0.1), mask.to(DEVICE), sink=sink)


@kernel_test
@pytest.mark.parametrize("value", [float("-inf"), torch.finfo(torch.float32).min])
def test_a_bias_hides_keys_and_a_query_that_sees_none_gets_zeros(value):
    q, k, v, grad = random_inputs(20, 20, 1, 2, 2, 32, torch.float32)
    bias = torch.zeros(1, 1, 20, 20, device=DEVICE)
    bias[..., 12:], bias[:, :, 3] = value, value
    whole = run(attention_kernel, q, k, v, grad, None, None, settings(False, 0.0), bias=bias)
    assert all(t.isfinite().all() for t in whole) and not whole[4][..., 12:].any()
    assert not whole[0][3].any() and not whole[1][3].any() and not whole[2][12:].any() and not whole[3][12:].any()
    seen = [row for row in range(20) if row != 3]
    part = run(attention_kernel, q[seen], k[:12], v[:12], grad[seen], None, None, settings(False, 0.0))
    for found, expected, rows in zip(whole[:4], part, (seen, seen, slice(12), slice(12)), strict=True):
        torch.testing.assert_close(found[rows], expected, rtol=1e-5, atol=1e-6)


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_bias_of_keys_alone_sums_over_samples_heads_and_queries_of_any_lengths(dtype):
    inputs = random_inputs(70, 40, 3, 2, 1, 32, dtype)
    bias = torch.randn(1, 1, 1, 40, device=DEVICE).to(dtype)
    lengths = torch.tensor([40, 33, 0], device=DEVICE)
    check(*inputs, settings(False, 0.1), None, lengths, bias=bias)
    first, again = (run(attention_kernel, *inputs, None, lengths, settings(False), bias=bias) for _ in range(2))
    assert all(map(torch.equal, first, again))


@kernel_test
def test_a_bias_of_float64_is_refused():
    q = torch.zeros(4, 1, 1, 16, device=DEVICE)
    bias = torch.zeros(1, 1, 1, 4, dtype=torch.float64, device=DEVICE)
    with pytest.raises(ValueError, match="bias is torch.float64; expected float32, float16 or bfloat16 on a GPU"):
        run(attention_kernel, q, q, q, q, None, None, settings(), bias=bias)


@kernel_test
def test_a_bias_whose_rows_lie_too_far_apart_is_refused():
    q = torch.zeros(4, 1, 1, 16, device=DEVICE)
    far = torch.empty(3 * 2**23 + 4, dtype=torch.bfloat16, device=DEVICE).as_strided((1, 1, 4, 4), (0, 0, 2**23, 1))
    with pytest.raises(
        ValueError, match="bias has strides .* expected fewer than 8388608 elements from query to query"
    ):
        run(attention_kernel, q, q, q, q, None, None, settings(), bias=far)

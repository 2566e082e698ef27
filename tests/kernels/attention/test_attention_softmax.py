"""The paper's form of attention: the softmax's output is kept, the dropout's output and mask are made again."""

from __future__ import annotations

import pytest
import torch
from attention_cases import CASES, DTYPES, assert_case_obeys_the_rule, ours, reference, settings
from witness import assert_three_witnesses, kept_storages

from tempo_kernels.attention import attention


def softmax_form(q, k, v, chosen, mask=None, key_lengths=None):
    return attention(q, k, v, mask=mask, key_lengths=key_lengths, form="softmax", **vars(chosen))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_forward_and_backward_obey_the_rule(case, p, dtype, nan_poison):
    assert_case_obeys_the_rule(softmax_form, case, p, dtype)


def test_windows_and_lengths_obey_the_rule():
    q, k, v, grad = (torch.randn(150, 3, heads, 16) for heads in (4, 2, 2, 4))
    chosen, lengths = settings(False, window_size=(20, 3)), torch.tensor([150, 70, 0])
    assert_three_witnesses(
        lambda *t: softmax_form(*t, chosen, None, lengths),
        lambda *t: reference(*t, chosen, None, lengths),
        [q, k, v],
        grad,
        torch.bfloat16,
    )


def test_its_output_is_that_of_the_flash_form_bit_for_bit():
    q, k, v = (torch.randn(100, 2, 4, 16).bfloat16() for _ in range(3))
    assert torch.equal(softmax_form(q, k, v, settings()), ours(q, k, v, settings()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_keeps_q_k_v_and_the_softmax_output(dtype):
    s, b, a, d = 32, 2, 4, 16
    mixed = torch.randn(s, b, a, 3 * d).to(dtype).requires_grad_()
    kept = kept_storages(lambda mixed: softmax_form(*mixed.split(d, dim=-1), settings()), mixed)
    assert kept.pop(mixed.data_ptr()) == mixed.numel() * mixed.element_size()
    assert list(kept.values()) == [b * a * s * s * mixed.element_size()]


def test_a_second_derivative_raises():
    q = torch.randn(4, 1, 1, 8, requires_grad=True)
    out = softmax_form(q, q, q, settings())
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="not twice differentiable"):
        grad.sum().backward()

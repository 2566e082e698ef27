from __future__ import annotations

import math

import pytest
import torch
from log_prob_inputs import CASES, reference
from loss_head_inputs import B, H, S, V, head_inputs, random_labels
from witness import assert_three_witnesses, assert_within_rule, kept_storages

from tempo_kernels.linear_cross_entropy import linear_cross_entropy, linear_log_prob

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def ours(hidden, weight, bias, labels, *, return_entropy=True, **settings):
    """[log_prob, entropy] stacked, or log_prob."""
    found = linear_log_prob(hidden, weight, labels, bias=bias, return_entropy=return_entropy, **settings)
    return torch.stack(found) if return_entropy else found


def assert_right(inputs, labels, dtype, grad=None, **case):
    if grad is None:
        grad = torch.randn(2, *labels.shape) if case.get("return_entropy", True) else torch.randn(labels.shape)
    exact = lambda *t: reference(*t, labels, **case)  # noqa: E731
    assert_three_witnesses(lambda *t: ours(*t, labels, **case), exact, inputs, grad, dtype)


@pytest.mark.parametrize("chunk_tokens", [1, 4, None])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_and_gradients_are_right_by_the_three_witnesses(case, dtype, chunk_tokens):
    for has_bias in (False, True):
        for return_entropy in (False, True):
            more = {"return_entropy": return_entropy, "chunk_tokens": chunk_tokens}
            assert_right(head_inputs(has_bias), random_labels(v=90), dtype, **case, **more)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("used", ["log_prob", "entropy"])
def test_one_of_the_results_alone_may_be_differentiated(used, dtype):
    labels, index = random_labels(), ["log_prob", "entropy"].index(used)
    case = {"temperature": 0.7, "softcap": 5.0}
    assert_three_witnesses(
        lambda *t: ours(*t, labels, **case)[index],
        lambda *t: reference(*t, labels, **case)[index],
        head_inputs(),
        torch.randn(B, S),
        dtype,
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradcheck(case):
    hidden, weight, bias = (t.double().requires_grad_() for t in head_inputs(s=3, b=2, v=11))
    labels = random_labels(3, 2, 9, ignored=(1,))
    case = {**case, **({"vocab_size": 9} if "vocab_size" in case else {})}
    assert torch.autograd.gradcheck(lambda *t: ours(*t, labels, chunk_tokens=4, **case), (hidden, weight, bias))


@pytest.mark.parametrize(
    "case",
    [{"softcap": 30.0}, {"temperature": 0.01}, {"softcap": 30.0, "temperature": 0.01}, {"temperature": 100.0}, {}],
    ids=str,
)
@pytest.mark.parametrize("scale", [0.01, 1.0, 400.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_and_large_logits(dtype, scale, case):
    inputs, labels = head_inputs(scale=scale), random_labels()
    assert_right(inputs, labels, dtype, **case)
    log_prob, entropy = ours(*(t.to(dtype) for t in inputs), labels, **case)
    assert (entropy >= 0).all() and (entropy <= math.log(V) + 1e-5).all() and (log_prob <= 0).all()


def test_a_certain_distribution_has_entropy_zero_and_a_uniform_one_the_logarithm_of_the_vocabulary():
    weight = torch.zeros(V, H)
    hidden, labels = torch.ones(2, 1, H), torch.tensor([[7, 8]])
    log_prob, entropy = linear_log_prob(hidden, weight, labels, return_entropy=True)
    torch.testing.assert_close(torch.stack((-log_prob, entropy)), torch.full((2, 1, 2), math.log(V)))
    weight[7] = 1e4
    hidden.requires_grad_()
    log_prob, entropy = linear_log_prob(hidden, weight, labels, return_entropy=True)
    assert entropy.tolist() == [[0.0, 0.0]] and log_prob[0, 0] == 0 and log_prob[0, 1] == -1e4 * H
    assert not log_prob.signbit()[0, 0] and not entropy.signbit().any()
    (grad,) = torch.autograd.grad(entropy.sum(), hidden)
    assert not grad.any()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logits_of_minus_infinity_have_no_probability_and_no_part_of_the_entropy(temperature):
    hidden, weight, bias = (t.requires_grad_() for t in head_inputs())
    few = torch.randperm(V)[:60]
    with torch.no_grad():
        bias[few] = -torch.inf
    kept = [i for i in range(V) if i not in few.tolist()]
    labels = torch.randint(len(kept), (B, S))
    found = ours(hidden, weight, bias, torch.tensor(kept)[labels], temperature=temperature)
    alone = ours(hidden, weight[kept], bias[kept], labels, temperature=temperature)
    torch.testing.assert_close(found, alone)
    grads, expected = (torch.autograd.grad(t.sum(), [hidden, weight]) for t in (found, alone))
    for ours_, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours_, theirs, rtol=1e-4, atol=1e-5)
    assert not grads[1][few].any()
    hit = linear_log_prob(hidden, weight, few[:S].expand(B, S).contiguous(), bias=bias)
    assert (hit == -torch.inf).all()


def test_the_log_probability_is_minus_the_cross_entropy():
    hidden, weight, bias = head_inputs()
    labels = random_labels()
    losses = linear_cross_entropy(hidden, weight, labels, bias=bias)
    assert torch.equal(linear_log_prob(hidden, weight, labels, bias=bias), -losses)
    assert torch.equal(linear_log_prob(hidden, weight, labels, 1.0, 0, True, bias=bias)[0], -losses)


def test_ignored_tokens_have_neither_results_nor_gradients_whatever_they_hold():
    hidden, weight, bias = head_inputs()
    hidden[2, 1] = torch.nan
    hidden.requires_grad_()
    labels = random_labels(ignored=())
    labels[1, 2] = labels[0, 3] = 7
    found = ours(hidden, weight, bias, labels, ignore_index=7, temperature=2.0, softcap=9.0)
    assert found.isfinite().all() and not found[:, 1, 2].any() and not found[:, 0, 3].any()
    found.sum().backward()
    assert hidden.grad.isfinite().all() and not hidden.grad[2, 1].any() and hidden.grad[2, 2].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_token_with_nan_or_infinity_has_nan_and_its_neighbours_do_not(value):
    hidden, weight, bias = head_inputs()
    labels = random_labels(ignored=())
    clean = ours(hidden, weight, bias, labels)
    hidden[3, 1, 2] = value
    hidden.requires_grad_()
    found = ours(hidden, weight, bias, labels)
    hurt = torch.zeros(B, S, dtype=torch.bool)
    hurt[1, 3] = True
    assert found[0].isnan().equal(hurt) and found[1].isnan().equal(hurt)
    assert torch.equal(found[:, ~hurt], clean[:, ~hurt])
    (grad,) = torch.autograd.grad(found.sum(), hidden)
    assert grad.isnan().any(-1).t().equal(hurt)


def test_a_label_outside_of_the_vocabulary_has_the_log_probability_minus_infinity():
    hidden, weight, _ = head_inputs(False)
    labels = random_labels(ignored=())
    labels[0, 0], labels[1, 1], labels[2, 2] = V, -1, 95
    found = ours(hidden, weight, None, labels, softcap=4.0, vocab_size=90)
    assert found[1].isfinite().all()
    expected = (labels < 0) | (labels >= 90)
    assert expected.sum() >= 3 and (found[0] == -torch.inf).equal(expected)


@pytest.mark.parametrize("case", [{}, {"temperature": 0.5, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize(("s", "b", "v"), [(1, 1, V), (0, 2, V), (2, 0, V), (3, 2, 1), (3, 2, 2), (2, 3, 257)])
def test_one_token_none_and_small_vocabularies(s, b, v, case):
    assert_right(head_inputs(s=s, b=b, v=v), torch.randint(v, (b, s)), torch.float32, **case)


def test_any_strides():
    hidden = torch.randn(H, B, S).permute(2, 1, 0)
    weight, bias = torch.randn(H, 2 * V)[:, ::2].t(), torch.randn(2 * V)[::2]
    labels, grad = random_labels(B, S).t(), torch.randn(S, B, 2).permute(2, 1, 0)
    assert_right([hidden, weight, bias], labels, torch.float32, grad, temperature=0.7, chunk_tokens=8)


def test_two_runs_give_the_same_bits():
    inputs, labels = head_inputs(), random_labels()
    runs = []
    for _ in range(2):
        leaves = [t.clone().requires_grad_() for t in inputs]
        found = ours(*leaves, labels, temperature=0.7, softcap=5.0, chunk_tokens=4)
        found.square().sum().backward()
        runs.append([found.detach(), *(leaf.grad for leaf in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_only_the_gradients_that_are_needed_are_made():
    inputs, labels = head_inputs(), random_labels()
    for leaf in inputs:
        leaf.requires_grad_()
        (grad,) = torch.autograd.grad(ours(*inputs, labels, temperature=2.0).sum(), leaf)
        (expected,) = torch.autograd.grad(reference(*inputs, labels, temperature=2.0).sum(), leaf)
        torch.testing.assert_close(grad, expected)
        leaf.requires_grad_(False)


@pytest.mark.parametrize(("return_entropy", "bytes_per_token"), [(False, 8), (True, 12)])
def test_hidden_states_weight_labels_and_two_or_three_numbers_a_token_are_kept(return_entropy, bytes_per_token):
    hidden, weight, _ = (t if t is None else t.bfloat16().requires_grad_() for t in head_inputs(False))
    labels = random_labels()
    keywords = {"return_entropy": return_entropy, "temperature": 0.7, "softcap": 30.0}
    kept = kept_storages(lambda h, w: ours(h, w, None, labels, **keywords), hidden, weight)
    known = {t.untyped_storage().data_ptr() for t in (hidden, weight, labels)}
    assert known <= kept.keys()
    assert sum(size for pointer, size in kept.items() if pointer not in known) == bytes_per_token * S * B
    with torch.no_grad():
        assert not kept_storages(lambda h, w: ours(h, w, None, labels, **keywords), hidden, weight)


def test_a_policy_gradient_is_that_of_the_whole_computation():
    """As an RL trainer uses both: a clipped ratio to old log-probabilities, and a bonus for entropy."""
    labels, advantages = random_labels(), torch.randn(B, S)
    old = reference(*head_inputs(), labels)[0].detach()
    inputs = head_inputs(scale=0.3)

    def objective(function):
        def total(*t):
            log_prob, entropy = function(*t, labels, temperature=0.8)
            ratio = (log_prob - old.to(log_prob.dtype)).clamp(-3, 3).exp()
            clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            return (clipped + 0.01 * entropy).mean()

        return total

    assert_three_witnesses(objective(ours), objective(reference), inputs, torch.ones(()), torch.float32)


def test_a_second_derivative_raises_and_names_the_operation():
    hidden, weight, _ = (t if t is None else t.requires_grad_() for t in head_inputs(False))
    for index in (0, 1):
        found = ours(hidden, weight, None, random_labels())[index]
        (grad,) = torch.autograd.grad(found.square().sum(), hidden, create_graph=True)
        with pytest.raises(RuntimeError, match="linear_log_prob is not twice differentiable"):
            grad.sum().backward()


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_the_weights_gradient_is_added_to_main_grad_as_by_megatrons_linears(main_dtype):
    hidden, weight, _ = (t if t is None else t.bfloat16().requires_grad_() for t in head_inputs(False))
    labels, before = random_labels(), torch.randn(V, H).to(main_dtype)
    (expected,) = torch.autograd.grad(reference(hidden, weight, None, labels).sum(), weight)
    weight.main_grad, weight.grad_added_to_main_grad = before.clone(), False
    ours(hidden, weight, None, labels, gradient_accumulation_fusion=True).sum().backward()
    torch.testing.assert_close(weight.main_grad.float(), before.float() + expected.float(), rtol=0.02, atol=0.05)
    assert weight.grad_added_to_main_grad


BAD = {
    "a temperature of 0": ({"temperature": 0.0}, "temperature is 0.0; expected a finite number above 0"),
    "a negative temperature": ({"temperature": -1.0}, "temperature is -1.0; expected a finite number"),
    "no number": ({"temperature": float("nan")}, "temperature is nan; expected a finite number"),
    "infinity": ({"temperature": float("inf")}, "temperature is inf; expected a finite number"),
    "a temperature per token": (
        {"temperature": torch.ones(B, S)},
        r"temperature is a tensor of shape \[3, 7\]; .*; where each token has one, divide hidden by it",
    ),
    "a negative softcap": ({"softcap": -30.0}, "softcap is -30.0; expected a finite number above 0, or None"),
    "a softcap of nan": ({"softcap": float("nan")}, "softcap is nan; expected a finite number"),
    "a vocabulary of nothing": ({"vocab_size": 0}, f"vocab_size is 0; expected 1 to {V}"),
    "labels of the layout of hidden states": ({"labels": torch.zeros(S, B).long()}, r"labels are .*\[b, s\]"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_what_does_not_fit_is_refused_in_one_sentence(change, message):
    arguments = {"labels": torch.zeros(B, S, dtype=torch.int64), **change}
    with pytest.raises(ValueError, match=message):
        linear_log_prob(torch.zeros(S, B, H), torch.zeros(V, H), **arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_size_of_chunks_changes_nothing_but_the_order_of_sums(dtype):
    inputs, labels = [t.to(dtype) for t in head_inputs()], random_labels()
    found = [ours(*inputs, labels, chunk_tokens=n, temperature=0.5) for n in (1, 5, 99)]
    exact = reference(*(t.double() for t in inputs), labels, temperature=0.5)
    for chunked in found:
        assert_within_rule("results", chunked, found[0], exact)

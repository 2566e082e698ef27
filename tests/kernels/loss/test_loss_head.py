"""Losses, and log-probabilities with entropy, against the whole computation in torch."""

from __future__ import annotations

import math

import pytest
import torch
from covering import parametrize_covering
from loss_head_inputs import (
    EVERY_CASE,
    HEADS,
    B,
    H,
    S,
    V,
    head_inputs,
    log_probs,
    losses,
    random_labels,
    reference,
)  # fmt: skip
from torch.nn import functional as F
from witness import assert_three_witnesses, kept_storages

from tempo_kernels.linear_cross_entropy import linear_cross_entropy, linear_log_prob
from tempo_kernels.opaque import use_blocks

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# What is documented of float32 and of few tokens and columns, as here.
ULPS = {torch.float32: 8, torch.float16: 1, torch.bfloat16: 1}
NAN, INF = float("nan"), float("inf")
LOSSES, LOG_PROBS = HEADS["losses"], HEADS["log_probs"]
both_heads = pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)


def assert_right(head, inputs, labels, dtype, grad=None, **case):
    """By the three witnesses."""
    grad = head.random_grad(labels, **case) if grad is None else grad
    ours, theirs = (lambda *t, f=f: f(*t, labels, **case) for f in (head.ours, head.reference))
    assert_three_witnesses(ours, theirs, inputs, grad, dtype, ULPS[dtype])


@parametrize_covering(case=EVERY_CASE, dtype=DTYPES, chunk_tokens=[1, 4, 1000, None])
def test_results_and_gradients_are_right_by_the_three_witnesses(case, dtype, chunk_tokens):
    head, settings = case
    for has_bias in (False, True):
        for more in ({}, {"return_entropy": False}) if head is LOG_PROBS else ({},):
            inputs = head_inputs(has_bias)
            with use_blocks(linear_cross_entropy=5 * V):  # several blocks of a chunk
                assert_right(head, inputs, random_labels(v=90), dtype, chunk_tokens=chunk_tokens, **settings, **more)


@parametrize_covering(case=LOSSES.cases, dtype=DTYPES, chunk_tokens=[1, 4, 1000])
def test_gradients_made_in_forward_are_right_by_the_three_witnesses(case, dtype, chunk_tokens):
    labels, token_weights = random_labels(v=90), torch.rand(B, S)
    token_weights[1] = 0

    def total(function, *t):
        settings = {"token_weights": token_weights, "chunk_tokens": chunk_tokens, **case}
        sum_of_losses, found = function(*t, labels, **settings)
        assert found.shape == (B, S)
        return sum_of_losses

    ours, theirs = (lambda *t, f=f: total(f, *t) for f in (losses, reference))
    assert_three_witnesses(ours, theirs, head_inputs(), torch.tensor(3.0), dtype, ULPS[dtype])


@pytest.mark.parametrize("smoothing", [0.01, 0.1, 0.5])
def test_of_few_tokens_and_columns_the_float32_error_is_what_is_documented(smoothing):
    for seed in range(30):
        torch.manual_seed(seed)
        s, b, v = 1 + seed % 7, 1 + seed % 2, 5 + 6 * (seed % 3)
        case = {"label_smoothing": smoothing, "z_loss": 1e-3 * (seed % 2)}
        assert_right(LOSSES, head_inputs(s=s, b=b, v=v, scale=0.02), torch.randint(v, (b, s)), torch.float32, **case)


@both_heads
@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 6e4), (torch.float32, NAN)], ids=str)
def test_ignored_tokens_have_neither_results_nor_gradients_whatever_they_hold(dtype, value, head):
    hidden, weight, bias = (t.to(dtype) for t in head_inputs())
    hidden[2, 1] = value
    labels = random_labels(ignored=())
    labels[1, 2] = labels[0, 3] = 7
    found = head.ours(hidden.requires_grad_(), weight, bias, labels, ignore_index=7)
    assert found.isfinite().all() and not found[..., 1, 2].any() and not found[..., 0, 3].any()
    found.sum().backward()
    assert hidden.grad.isfinite().all() and not hidden.grad[2, 1].any() and hidden.grad[2, 2].any()


def test_tokens_that_are_all_ignored_have_no_loss_and_no_gradient():
    leaves = [t.requires_grad_() for t in head_inputs()]
    found = losses(*leaves, torch.full((B, S), 7), ignore_index=7, z_loss=0.1, label_smoothing=0.1)
    assert not found.any() and not any(grad.any() for grad in torch.autograd.grad(found.sum(), leaves))


FEW = [(LOSSES, s, b, V) for s, b in ((1, 1), (1, 4), (4, 1), (0, 2), (2, 0))]
FEW += [(LOG_PROBS, *sizes) for sizes in ((1, 1, V), (0, 2, V), (2, 0, V), (3, 2, 1), (3, 2, 2), (2, 3, 257))]


@pytest.mark.parametrize(("head", "s", "b", "v"), FEW)
def test_one_token_none_and_small_vocabularies(head, s, b, v):
    for case in ({}, {"temperature": 0.5, "softcap": 2.0}) if head is LOG_PROBS else ({},):
        assert_right(head, head_inputs(s=s, b=b, v=v), torch.randint(v, (b, s)), torch.float32, **case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_logits_as_large_as_ten_thousand_and_around_it(offset, dtype):
    hidden, weight, bias = head_inputs(scale=400.0 if offset == 0 else 1.0)
    assert F.linear(hidden, weight, bias + offset).abs().max() > 5e3
    inputs = [hidden, weight, bias + offset]
    assert_right(LOSSES, inputs, random_labels(), dtype, torch.ones(B, S), chunk_tokens=8)


SCALINGS = [{}, {"softcap": 30.0}, {"temperature": 0.01}, {"temperature": 100.0}]
SCALINGS += [{"softcap": 30.0, "temperature": 0.01}]


@parametrize_covering(case=SCALINGS, scale=[0.01, 1.0, 400.0], dtype=DTYPES)
def test_small_and_large_logits(case, scale, dtype):
    inputs, labels = head_inputs(scale=scale), random_labels()
    assert_right(LOG_PROBS, inputs, labels, dtype, **case)
    log_prob, entropy = log_probs(*(t.to(dtype) for t in inputs), labels, **case)
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
        bias[few] = -INF
    kept = [i for i in range(V) if i not in few.tolist()]
    labels = torch.randint(len(kept), (B, S))
    found = log_probs(hidden, weight, bias, torch.tensor(kept)[labels], temperature=temperature)
    alone = log_probs(hidden, weight[kept], bias[kept], labels, temperature=temperature)
    torch.testing.assert_close(found, alone)
    grads, expected = (torch.autograd.grad(t.sum(), [hidden, weight]) for t in (found, alone))
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not grads[1][few].any()
    hit = linear_log_prob(hidden, weight, few[:S].expand(B, S).contiguous(), bias=bias)
    assert (hit == -INF).all()


def test_the_log_probability_is_minus_the_cross_entropy():
    hidden, weight, bias = head_inputs()
    labels = random_labels()
    negative = -linear_cross_entropy(hidden, weight, labels, bias=bias)
    assert torch.equal(linear_log_prob(hidden, weight, labels, bias=bias), negative)
    assert torch.equal(linear_log_prob(hidden, weight, labels, 1.0, 0, True, bias=bias)[0], negative)


@both_heads
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_token_with_nan_or_infinity_has_nan_and_its_neighbours_do_not(value, head):
    hidden, weight, bias = head_inputs()
    labels = random_labels(ignored=())
    clean = head.ours(hidden, weight, bias, labels, chunk_tokens=4)
    hidden[3, 1, 2] = value
    found = head.ours(hidden.requires_grad_(), weight, bias, labels, chunk_tokens=4)
    hurt = torch.zeros(B, S, dtype=torch.bool)
    hurt[1, 3] = True
    assert found.isnan().equal(hurt.expand_as(found)) and torch.equal(found[..., ~hurt], clean[..., ~hurt])
    (grad,) = torch.autograd.grad(found.sum(), hidden)
    assert grad.isnan().any(-1).t().equal(hurt)


def test_a_label_outside_of_the_vocabulary_has_an_infinite_loss_and_the_log_probability_minus_infinity():
    hidden, weight, _ = head_inputs(False)
    labels = random_labels(ignored=())
    labels[0, 0], labels[1, 1] = V, -1
    found = losses(hidden, weight, None, labels)
    assert found.isinf().sum() == 2 and found[0, 0] == found[1, 1] == INF
    labels[2, 2] = 95
    found = log_probs(hidden, weight, None, labels, softcap=4.0, vocab_size=90)
    assert found[1].isfinite().all()
    expected = (labels < 0) | (labels >= 90)
    assert expected.sum() >= 3 and (found[0] == -INF).equal(expected)


@both_heads
def test_any_strides(head):
    hidden = torch.randn(H, B, S).permute(2, 1, 0)
    weight, bias = torch.randn(H, 2 * V)[:, ::2].t(), torch.randn(2 * V)[::2]
    labels = random_labels(B, S).t()
    grad = head.random_grad(labels).mT.contiguous().mT
    case = {"temperature": 0.7} if head is LOG_PROBS else {}
    assert_right(head, [hidden, weight, bias], labels, torch.float32, grad, chunk_tokens=8, **case)


WEIGHTED = {"token_weights": torch.ones(B, S)}
ASKED = [(LOSSES, {}), (LOSSES, WEIGHTED), (LOG_PROBS, {"temperature": 2.0})]


@pytest.mark.parametrize(("head", "more"), ASKED, ids=["losses", "weighted losses", "log_probs"])
def test_only_the_gradients_that_are_needed_are_made(head, more):
    inputs, labels = head_inputs(), random_labels()
    for leaf in inputs:
        leaf.requires_grad_()
        ours, theirs = (f(*inputs, labels, **more) for f in head[:2])
        totals = (found[0] if more is WEIGHTED else found.sum() for found in (ours, theirs))
        (grad,), (expected,) = (torch.autograd.grad(total, leaf) for total in totals)
        torch.testing.assert_close(grad, expected)
        leaf.requires_grad_(False)


SCALED = {"temperature": 0.7, "softcap": 30.0}


@pytest.mark.parametrize(
    ("head", "settings", "bytes_per_token"),
    [(LOSSES, {}, 8), (LOG_PROBS, {**SCALED, "return_entropy": False}, 8), (LOG_PROBS, SCALED, 12)],
    ids=["losses", "log_prob", "log_prob and entropy"],
)
def test_hidden_states_weight_labels_and_two_or_three_numbers_a_token_are_kept(head, settings, bytes_per_token):
    hidden, weight = (t.bfloat16().requires_grad_() for t in head_inputs(False)[:2])
    labels = random_labels()
    kept = kept_storages(lambda h, w: head.ours(h, w, None, labels, **settings), hidden, weight)
    known = {t.untyped_storage().data_ptr() for t in (hidden, weight, labels)}
    assert known <= kept.keys()
    assert sum(size for pointer, size in kept.items() if pointer not in known) == bytes_per_token * S * B
    with torch.no_grad():
        assert not kept_storages(lambda h, w: head.ours(h, w, None, labels, **settings), hidden, weight)


@pytest.mark.parametrize(("chunk_tokens", "weight_bytes"), [(None, 2), (4, 4)])
def test_with_token_weights_the_two_gradients_are_kept_in_place_of_the_hidden_states(chunk_tokens, weight_bytes):
    """The weight's in float32 where several chunks are summed."""
    hidden, weight = (t.bfloat16().requires_grad_() for t in head_inputs(False)[:2])
    labels, settings = random_labels(), {**WEIGHTED, "chunk_tokens": chunk_tokens}
    kept = kept_storages(lambda h, w: losses(h, w, None, labels, **settings)[0], hidden, weight)
    assert not {t.untyped_storage().data_ptr() for t in (hidden, weight, labels)} & kept.keys()
    assert sum(kept.values()) == 2 * S * B * H + weight_bytes * V * H + 4


GOOD = {"hidden": torch.zeros(S, B, H), "weight": torch.zeros(V, H), "labels": torch.zeros(B, S, dtype=torch.int64)}
BAD = {
    "a matrix of hidden states": ({"hidden": torch.zeros(S, H)}, r"hidden is .* \[s, b, h\] tensor"),
    "integers": ({"hidden": torch.zeros(S, B, H, dtype=torch.int64)}, "hidden is torch.int64"),
    "a weight of another width": ({"weight": torch.zeros(V, H + 1)}, "weight is .* expected .*as hidden"),
    "a weight of another dtype": ({"weight": torch.zeros(V, H).half()}, "weight is torch.float16 .* cast it"),
    "a bias of another length": ({"bias": torch.zeros(V + 1)}, "bias is .*as weight"),
    "labels of the layout of hidden states": ({"labels": GOOD["labels"].t()}, r"labels are .*\[b, s\] of the whole"),
    "labels in 32 bits": ({"labels": GOOD["labels"].int()}, "labels are torch.int32"),
    "a vocabulary larger than the weight": ({"vocab_size": V + 1}, f"vocab_size is {V + 1}; expected 1 to {V}"),
    "smoothing of 1": ({"label_smoothing": 1.0}, "label_smoothing is 1.0"),
    "smoothing over one row": ({"label_smoothing": 0.1, "vocab_size": 1}, "label_smoothing is 0.1 over 1 rows"),
    "a chunk of nothing": ({"chunk_tokens": 0}, "chunk_tokens is 0; expected at least 1"),
    "weights that need a gradient": ({"token_weights": torch.ones(B, S, requires_grad=True)}, "token_weights are"),
    "weights of another shape": ({"token_weights": torch.ones(S, B)}, "token_weights are .*as labels"),
}
BAD_LOG_PROBS = {
    "a temperature of 0": ({"temperature": 0.0}, "temperature is 0.0; expected a finite number above 0"),
    "a negative temperature": ({"temperature": -1.0}, "temperature is -1.0; expected a finite number"),
    "no number": ({"temperature": NAN}, "temperature is nan; expected a finite number"),
    "infinity": ({"temperature": INF}, "temperature is inf; expected a finite number"),
    "a temperature per token": (
        {"temperature": torch.ones(B, S)},
        r"temperature is a tensor of shape \[3, 7\]; .*; where each token has one, divide hidden by it",
    ),
    "a negative softcap": ({"softcap": -30.0}, "softcap is -30.0; expected a finite number above 0, or None"),
    "a softcap of nan": ({"softcap": NAN}, "softcap is nan; expected a finite number"),
    "a vocabulary of nothing": ({"vocab_size": 0}, f"vocab_size is 0; expected 1 to {V}"),
}
REFUSED = [(linear_cross_entropy, *case) for case in BAD.values()]
REFUSED += [(linear_log_prob, *case) for case in BAD_LOG_PROBS.values()]


@pytest.mark.parametrize(("function", "change", "message"), REFUSED, ids=[*BAD, *BAD_LOG_PROBS])
def test_what_does_not_fit_is_refused_in_one_sentence(function, change, message):
    arguments = {**GOOD, **change}
    with pytest.raises(ValueError, match=message):
        function(arguments.pop("hidden"), arguments.pop("weight"), arguments.pop("labels"), **arguments)

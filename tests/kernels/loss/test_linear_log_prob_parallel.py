"""linear_log_prob over a vocabulary in shards, on gloo, against the whole computation on one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from log_prob_inputs import CASES, reference
from loss_head_inputs import head_inputs, random_labels
from witness import assert_within_rule

from tempo_kernels.linear_cross_entropy import linear_log_prob

S, B, V = 8, 3, 100
# The last of four shards is nothing but padding.
CUT = {"temperature": 0.7, "softcap": 8.0, "vocab_size": 70}


def problem(dtype, num_real):
    torch.manual_seed(77)
    hidden, weight, bias = (t.to(dtype) for t in head_inputs(s=S, b=B, v=V))
    return hidden, weight, bias, random_labels(S, B, num_real), torch.randn(2, B, S)


def results_of(function, inputs, labels, grad):
    leaves = [t.clone().requires_grad_() for t in inputs]
    found = function(*leaves, labels)
    (grad[: len(found)] * found).sum().backward()
    return [found.detach(), *(leaf.grad for leaf in leaves)]


def shard_results(sequence_parallel, dtype, return_entropy, case):
    """[log_prob and entropy, gradients of this rank's hidden, weight, bias], and how many exchanges they took."""
    rank, size = dist.get_rank(), dist.get_world_size()
    hidden, weight, bias, labels, grad = problem(dtype, case.get("vocab_size", V))

    def ours(hidden, weight, bias, labels):
        found = linear_log_prob(
            hidden,
            weight,
            labels,
            bias=bias,
            vocab_start=rank * V // size,
            group=dist.group.WORLD,
            sequence_parallel=sequence_parallel,
            chunk_tokens=8,
            return_entropy=return_entropy,
            **case,
        )
        return torch.stack(found) if return_entropy else found.unsqueeze(0)

    hidden = hidden.chunk(size)[rank] if sequence_parallel else hidden
    return results_of(ours, (hidden, weight.chunk(size)[rank], bias.chunk(size)[rank]), labels, grad)


def joined(ranks, sequence_parallel):
    """The whole from every rank's part, after what all of them have was found to be the same."""
    for of_rank in ranks:
        assert torch.equal(of_rank[0], ranks[0][0])
        assert sequence_parallel or torch.equal(of_rank[1], ranks[0][1])
    hidden = torch.cat([of_rank[1] for of_rank in ranks]) if sequence_parallel else ranks[0][1]
    return [ranks[0][0], hidden, *(torch.cat([of_rank[i] for of_rank in ranks]) for i in (2, 3))]


def assert_equal_to_the_whole(size, sequence_parallel, dtype, return_entropy, case):
    ranks = run_ranks(shard_results, size, sequence_parallel, dtype, return_entropy, case)
    hidden, weight, bias, labels, grad = problem(dtype, case.get("vocab_size", V))

    def whole(*t):
        found = reference(*t, **case, return_entropy=return_entropy)
        return found if return_entropy else found.unsqueeze(0)

    same = results_of(whole, (hidden, weight, bias), labels, grad)
    exact = results_of(whole, [t.double() for t in (hidden, weight, bias)], labels, grad.double())
    names = ("results", "hidden", "weight", "bias")
    for name, ours, theirs, truth in zip(names, joined(ranks, sequence_parallel), same, exact, strict=True):
        assert_within_rule(name, ours, theirs, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "sequence_parallel"),
    [(2, False), (2, True), *(pytest.param(4, sp, marks=pytest.mark.slow) for sp in (False, True))],
)
@pytest.mark.parametrize("return_entropy", [False, True])
def test_shards_of_the_vocabulary_equal_the_whole_computation(return_entropy, size, sequence_parallel, dtype):
    assert_equal_to_the_whole(size, sequence_parallel, dtype, return_entropy, CUT)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_setting_is_right_under_tensor_and_sequence_parallelism(case):
    assert_equal_to_the_whole(2, True, torch.float32, True, case)


def exchanges_of_statistics():
    hidden, weight, _, labels, _ = problem(torch.float32, V)
    rank, gather, calls = dist.get_rank(), dist.all_gather_into_tensor, []

    def recorded(*args, **keywords):
        calls.append(args[1].shape)
        return gather(*args, **keywords)

    dist.all_gather_into_tensor = recorded
    try:
        linear_log_prob(
            hidden,
            weight.chunk(2)[rank],
            labels,
            0.7,
            return_entropy=True,
            group=dist.group.WORLD,
            vocab_start=rank * V // 2,
            chunk_tokens=4,
        )
    finally:
        dist.all_gather_into_tensor = gather
    return calls


def test_the_ranks_exchange_their_statistics_once_in_one_buffer():
    for calls in run_ranks(exchanges_of_statistics, 2):
        assert calls == [torch.Size([4 * S * B])]

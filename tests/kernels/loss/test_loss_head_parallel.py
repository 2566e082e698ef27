"""Losses and log-probabilities over a vocabulary in shards, on gloo, against the whole computation on one rank."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from covering import parametrize_covering
from distributed import run_ranks
from loss_head_inputs import CASES, HEADS, H, head_inputs, losses, random_labels
from witness import assert_within_rule

from tempo_kernels.linear_cross_entropy import linear_cross_entropy, linear_log_prob
from tempo_kernels.linear_cross_entropy.settings import Shards

S, B, V = 8, 3, 100
# Of the last of four shards nothing, or a part, is not padding.
CUT = {"temperature": 0.7, "softcap": 8.0, "vocab_size": 70}
FORMS = {
    "recomputed": ("losses", CASES["everything"]),
    "in forward": ("losses", {**CASES["everything"], "in_forward": True}),
    "log_prob": ("log_probs", {**CUT, "return_entropy": False}),
    "log_prob and entropy": ("log_probs", CUT),
}


def problem(name, dtype, case):
    """Hidden, weight and bias; labels; the gradient of what the function returns."""
    torch.manual_seed(77)
    inputs = [t.to(dtype) for t in head_inputs(s=S, b=B, v=V)]
    labels = random_labels(S, B, case.get("vocab_size", V))
    return inputs, labels, HEADS[name].random_grad(labels, **case)


def results_of(function, inputs, labels, grad):
    leaves = [t.clone().requires_grad_() for t in inputs]
    found = function(*leaves, labels)
    (grad * found).sum().backward()
    return [found.detach(), *(leaf.grad for leaf in leaves)]


def shard_results(name, sequence_parallel, dtype, chunk_tokens, case):
    """What each rank finds: results and gradients of its part of hidden, weight and bias."""
    rank, size = dist.get_rank(), dist.get_world_size()
    (hidden, weight, bias), labels, grad = problem(name, dtype, case)
    hidden = hidden.chunk(size)[rank] if sequence_parallel else hidden
    parts = [hidden, weight.chunk(size)[rank], bias.chunk(size)[rank]]
    more = {name: value for name, value in case.items() if name != "in_forward"}
    more |= {"vocab_start": rank * V // size, "group": dist.group.WORLD, "chunk_tokens": chunk_tokens}
    ours = functools.partial(HEADS[name].ours, sequence_parallel=sequence_parallel, **more)
    if not case.get("in_forward"):
        return results_of(ours, parts, labels, grad)
    leaves = [t.clone().requires_grad_() for t in parts]
    total, found = ours(*leaves, labels, token_weights=grad)
    total.backward()
    return [found.detach(), *(leaf.grad for leaf in leaves)]


def joined(ranks, sequence_parallel):
    """The whole from every rank's part, after what all of them have was found to be the same."""
    for of_rank in ranks:
        assert torch.equal(of_rank[0], ranks[0][0])
        assert sequence_parallel or torch.equal(of_rank[1], ranks[0][1])
    hidden = torch.cat([of_rank[1] for of_rank in ranks]) if sequence_parallel else ranks[0][1]
    return [ranks[0][0], hidden, *(torch.cat([of_rank[i] for of_rank in ranks]) for i in (2, 3))]


def whole_results(name, dtype, case, exact=False):
    inputs, labels, grad = problem(name, dtype, case)
    more = {key: value for key, value in case.items() if key != "in_forward"}
    cast = torch.Tensor.double if exact else lambda t: t
    return results_of(functools.partial(HEADS[name].reference, **more), [cast(t) for t in inputs], labels, cast(grad))


@parametrize_covering(
    each={"size": [2, 4], "dtype": [torch.float32, torch.bfloat16]}, form=FORMS,
    sequence_parallel={"all tokens": False, "parts of the tokens": True},
)  # fmt: skip
def test_shards_of_the_vocabulary_equal_the_whole_computation(size, dtype, form, sequence_parallel):
    name, case = form
    found = joined(run_ranks(shard_results, size, name, sequence_parallel, dtype, 8, case), sequence_parallel)
    witnesses = found, whole_results(name, dtype, case), whole_results(name, dtype, case, exact=True)
    for what, *three in zip(("results", "hidden", "weight", "bias"), *witnesses, strict=True):
        assert_within_rule(what, *three)


@parametrize_covering(each={"chunk_tokens": [1, 5, 1000, None], "case": [{}, {"in_forward": True}]})
def test_sequence_parallel_chunks_of_any_size_give_one_result(chunk_tokens, case):
    ranks = run_ranks(shard_results, 2, "losses", True, torch.float64, chunk_tokens, case)
    for ours, exact in zip(joined(ranks, True), whole_results("losses", torch.float64, case), strict=True):
        torch.testing.assert_close(ours, exact)


def events_of_one_rank():
    """In which order chunks are gathered and given out; what statistics are exchanged; a refusal; a shard's NaN."""
    gather, rank, events, exchanged = dist.all_gather_into_tensor, dist.get_rank(), [], []
    inputs, labels, _ = problem("losses", torch.float32, {})
    hidden, weight = inputs[0], inputs[1].chunk(2)[rank].clone()
    shard = {"group": dist.group.WORLD, "vocab_start": rank * V // 2}

    def recorded(*args, **keywords):
        events.append("gather")
        exchanged.append(args[1].shape)
        return gather(*args, **keywords)

    with mock.patch.object(dist, "all_gather_into_tensor", recorded):
        tokens_of_rank = torch.arange(24.0).view(12, 2)
        for rows, tokens in Shards(dist.group.WORLD, True).gather(tokens_of_rank + 100 * rank, 5):
            events.append("chunk")
            assert torch.equal(tokens, torch.cat([tokens_of_rank[rows] + 100 * each for each in range(2)]))
        exchanged.clear()
        linear_log_prob(hidden, weight, labels, 0.7, return_entropy=True, chunk_tokens=4, **shard)
    with pytest.raises(ValueError) as refused:
        linear_cross_entropy(
            torch.zeros(2, 1, H), torch.zeros(5, H), torch.zeros(1, 2).long(), **{**shard, "vocab_start": 1}
        )
    if rank == 1:
        weight[3] = torch.nan
    found = losses(hidden, weight, None, labels.clamp_max(40), **shard)
    return events[:6], exchanged, str(refused.value), found


def test_ranks_gather_ahead_exchange_once_and_hear_of_each_others_nan():
    for rank, (events, exchanged, refused, found) in enumerate(run_ranks(events_of_one_rank, 2)):
        assert events == ["gather", "gather", "chunk", "gather", "chunk", "chunk"], "while the one before is worked on"
        assert exchanged == [torch.Size([4 * S * B])], "statistics, in one buffer"
        wanted = f"expected {5 * rank}, the rank times the rows of weight"
        assert f"vocab_start is 1 on rank {rank} of the group; {wanted}" in refused
        assert found[found != 0].isnan().all() and found.isnan().any()

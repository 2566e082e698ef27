"""The loss head over a vocabulary in shards, on gloo, against one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from loss_head_inputs import CASES, H, head_inputs, random_labels, reference
from witness import assert_within_rule

from tempo_kernels.linear_cross_entropy import linear_cross_entropy

S, B, V = 8, 3, 100


def problem(dtype):
    torch.manual_seed(77)
    hidden, weight, bias = (t.to(dtype) for t in head_inputs(s=S, b=B, v=V))
    return hidden, weight, bias, random_labels(S, B, 90), torch.rand(B, S) + 0.1


def shard_results(sequence_parallel, dtype, chunk_tokens, in_forward, case):
    """Losses and gradients of this rank's part: [losses, hidden, weight, bias]."""
    rank, size = dist.get_rank(), dist.get_world_size()
    hidden, weight, bias, labels, grad = problem(dtype)
    leaves = [
        hidden.chunk(size)[rank] if sequence_parallel else hidden,
        weight.chunk(size)[rank],
        bias.chunk(size)[rank],
    ]
    leaves = [t.clone().requires_grad_() for t in leaves]
    out = linear_cross_entropy(
        leaves[0],
        leaves[1],
        labels,
        bias=leaves[2],
        vocab_start=rank * V // size,
        group=dist.group.WORLD,
        sequence_parallel=sequence_parallel,
        chunk_tokens=chunk_tokens,
        token_weights=grad if in_forward else None,
        **case,
    )
    total, losses = out if in_forward else ((grad * out).sum(), out)
    total.backward()
    return [losses.detach(), *(leaf.grad for leaf in leaves)]


def whole_results(function, dtype, case):
    hidden, weight, bias, labels, grad = problem(dtype)
    return results_of(function, (hidden, weight, bias), labels, grad, case)


def results_of(function, inputs, labels, grad, case):
    leaves = [t.clone().requires_grad_() for t in inputs]
    losses = function(*leaves, labels, **case)
    (grad.to(losses.dtype) * losses).sum().backward()
    return [losses.detach(), *(leaf.grad for leaf in leaves)]


def exact_results(dtype, case):
    hidden, weight, bias, labels, grad = problem(dtype)
    return results_of(reference, [t.double() for t in (hidden, weight, bias)], labels, grad.double(), case)


def joined(ranks, sequence_parallel):
    """The whole from every rank's part, after what all of them have was found to be the same."""
    for of_rank in ranks:
        assert torch.equal(of_rank[0], ranks[0][0])
        assert sequence_parallel or torch.equal(of_rank[1], ranks[0][1])
    hidden = torch.cat([of_rank[1] for of_rank in ranks]) if sequence_parallel else ranks[0][1]
    return [ranks[0][0], hidden, *(torch.cat([of_rank[i] for of_rank in ranks]) for i in (2, 3))]


@pytest.mark.parametrize("in_forward", [False, True], ids=["recomputed", "in forward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "sequence_parallel"),
    [(2, False), (2, True), *(pytest.param(4, sp, marks=pytest.mark.slow) for sp in (False, True))],
)
def test_shards_of_the_vocabulary_equal_one_rank(size, sequence_parallel, dtype, in_forward):
    case = CASES["everything"]
    ranks = run_ranks(shard_results, size, sequence_parallel, dtype, 8, in_forward, case)
    found = joined(ranks, sequence_parallel)
    same, exact = whole_results(reference, dtype, case), exact_results(dtype, case)
    for name, ours, theirs, truth in zip(("losses", "hidden", "weight", "bias"), found, same, exact, strict=True):
        assert_within_rule(name, ours, theirs, truth)
    one = whole_results(lambda h, w, b, labels, **case: linear_cross_entropy(h, w, labels, bias=b, **case), dtype, case)
    if dtype == torch.float32:
        torch.testing.assert_close(found[0], one[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000, None])
@pytest.mark.parametrize("in_forward", [False, True], ids=["recomputed", "in forward"])
def test_sequence_parallel_chunks_of_any_size_give_one_result(chunk_tokens, in_forward):
    ranks = run_ranks(shard_results, 2, True, torch.float64, chunk_tokens, in_forward, {})
    for ours, exact in zip(joined(ranks, True), exact_results(torch.float64, {}), strict=True):
        torch.testing.assert_close(ours, exact)


def overlapping_gathers():
    """How often a gather was started before the chunk before it was given out."""
    from tempo_kernels.linear_cross_entropy.shards import Shards

    events = []
    gather = dist.all_gather_into_tensor

    def recorded(*args, **keywords):
        events.append("gather")
        return gather(*args, **keywords)

    dist.all_gather_into_tensor = recorded
    try:
        hidden = torch.arange(24.0).view(12, 2) + 100 * dist.get_rank()
        for rows, tokens in Shards(dist.group.WORLD, True).gather(hidden, 5):
            events.append("chunk")
            of_ranks = [torch.arange(24.0).view(12, 2)[rows] + 100 * rank for rank in range(2)]
            assert torch.equal(tokens, torch.cat(of_ranks))
    finally:
        dist.all_gather_into_tensor = gather
    return events


def test_a_chunk_is_gathered_while_the_one_before_it_is_worked_on():
    for events in run_ranks(overlapping_gathers, 2):
        assert events == ["gather", "gather", "chunk", "gather", "chunk", "chunk"]


def refused_vocab_start():
    try:
        linear_cross_entropy(
            torch.zeros(2, 1, H), torch.zeros(5, H), torch.zeros(1, 2).long(), group=dist.group.WORLD, vocab_start=1
        )
    except ValueError as error:
        return str(error)


def test_a_shard_that_does_not_start_where_its_rank_says_is_refused():
    for rank, message in enumerate(run_ranks(refused_vocab_start, 2)):
        assert (
            f"vocab_start is 1 on rank {rank} of the group; expected {5 * rank}, the rank times the rows of weight"
            in message
        )


def nan_of_one_shard():
    hidden, weight, _, labels, _ = problem(torch.float32)
    rank = dist.get_rank()
    weight = weight.chunk(2)[rank].clone()
    if rank == 1:
        weight[3] = torch.nan
    return linear_cross_entropy(hidden, weight, labels.clamp_max(40), group=dist.group.WORLD, vocab_start=rank * V // 2)


def test_a_nan_on_one_shard_reaches_every_rank():
    for losses in run_ranks(nan_of_one_shard, 2):
        assert losses[losses != 0].isnan().all() and losses.isnan().any()

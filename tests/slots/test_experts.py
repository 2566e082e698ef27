"""Mixtures of experts: what Tempo's experts compute, and what they keep, beside Megatron's own."""

from __future__ import annotations

import expert_cases
import pytest
import torch
from distributed import run_megatron_ranks, run_ranks
from gpt import assert_equal_to_stock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_runs import with_sample

from tempo_megatron import TempoConfig
from tempo_megatron.slots.choose import choose


@pytest.fixture(scope="module")
def measured():
    """Of one rank: case -> what stock and Tempo measure."""
    (found,) = run_megatron_ranks(expert_cases.compare_all, 1, 1)
    return found


@pytest.fixture(scope="module")
def of_layouts(request):
    """Layout -> what each of its two or four ranks finds."""
    is_exhaustive = request.config.getoption("--exhaustive")
    sizes: dict[int, dict] = {}
    for name, layout in (expert_cases.LAYOUTS if is_exhaustive else expert_cases.SAMPLE).items():
        sizes.setdefault(4 if "EP 2" in name and "PP 2" in name else 2, {})[name] = layout
    found = {}
    for size, layouts in sizes.items():
        ranks = run_ranks(expert_cases.compare_layouts, size, layouts)
        found |= {name: [rank[name] for rank in ranks] for name in layouts}
    return found


GROUPED = [f"grouped: {name}" for name in expert_cases.GROUPED]
PERMUTED = [f"permuted: {name}" for name in expert_cases.PERMUTED]


@pytest.mark.parametrize("case", [*expert_cases.CASES, *GROUPED, *PERMUTED, "norms of queries and keys"])
def test_experts_that_keep_less_equal_stock(measured, case):
    stock, tempo = measured[case]
    if "norms" in case:  # which are Tempo's
        return assert_equal_to_stock(tempo["found"], stock["found"])
    assert tempo["found"][0] == stock["found"][0]
    assert tempo["found"][1].keys() == stock["found"][1].keys()
    assert all(torch.equal(tempo["found"][1][name], grad) for name, grad in stock["found"][1].items())


# Two layers of 32 tokens, 16 elements of an expert's activation, 24 of the shared experts'; float32. The router keeps
# logits instead of the auxiliary loss's scores, which are as many, and of each choice no place (int64) and probability.
KEPT = {
    "fused swiglu, top 8 of 16, shared experts": 2 * 32 * ((8 * 16 + 24) * 4 + 8 * 12),
    "grouped: fused swiglu, shared experts": 2 * 32 * ((2 * 16 + 24) * 4 + 2 * 12),
    # Each token's two copies of 32 elements.
    "permuted: dropped and padded": 2 * 32 * 2 * ((16 + 32) * 4 + 12),
    # Two bytes each; stock keeps silu(gate), that times up, that times the probability, and a fourth. Scores are
    # float32, logits are not.
    "permuted: one kernel": 2 * 32 * (2 * (4 * 16 + 32) * 2 + 2 * 12 + 4 * 2),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_the_linears_read_is_not_kept(measured, case):
    stock, tempo = measured[case]
    assert stock["kept"] - tempo["kept"] == KEPT[case]


def test_between_projection_and_attention_the_projections_output_alone_is_kept(measured):
    _, tempo = measured["norms of queries and keys"]
    # Of 32 tokens: q, k and v have 64 elements, the output 32, logsumexp one for each head of q; norms of q and k
    # keep no statistics. Two layers, float32.
    assert tempo["kept"] == 2 * 32 * (64 + 32 + 4) * 4


@pytest.mark.slow
@pytest.mark.parametrize("layout", with_sample(expert_cases.LAYOUTS, expert_cases.SAMPLE))
def test_layouts_equal_stock_of_the_same_layout_and_draw_the_masks_of_one_rank(of_layouts, layout):
    ranks = of_layouts[layout]
    for rank in ranks:
        stock, *others = (each["found"] for each in rank["measured"])
        for tempo in others:
            assert_equal_to_stock(tempo, stock)
    # The first half of a pipeline's ranks has no loss.
    for rank in ranks[len(ranks) // 2 :] if "PP" in layout else ranks:
        assert rank["dropped"] == pytest.approx(rank["alone"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["EP 2, all-to-all", "EP 2, all-to-all, a rank without tokens"])
def test_tokens_that_are_sent_again_are_not_kept(of_layouts, layout):
    saved = [kept["kept"] - repeated["kept"] for _, kept, repeated in (rank["measured"] for rank in of_layouts[layout])]
    # Of two layers of 32 elements, float32: on each of two ranks the norm's output of 32 tokens, which is dropped too,
    # and of each token two copies, wherever they are.
    assert sum(saved) == 2 * 2 * 32 * (1 + 2) * 32 * 4
    assert "without" not in layout or saved[1] == 2 * 32 * 32 * 4


def config_of(**settings):
    experts = {"num_moe_experts": 4, "moe_ffn_hidden_size": 16, **settings}
    return TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, **experts)


def test_what_experts_cannot_have_is_refused():
    with pytest.raises(
        ValueError, match='probabilities, which may be 0, .* set tempo.activation to "recompute" or "off"'
    ):
        choose(config_of(), TempoConfig(activation="inplace"))
    assert choose(config_of(), TempoConfig()).config.activation == "recompute"
    with pytest.raises(ValueError, match='expert_model_parallel_size is 2, .* set tempo.moe_permute to "off"'):
        choose(config_of(expert_model_parallel_size=2), TempoConfig(moe_permute="recompute"))
    repeat = TempoConfig(moe_permute="repeat")
    for settings, why in (
        ({}, "all experts are on one rank"),
        ({"expert_model_parallel_size": 2}, "moe_token_dispatcher_type is allgather, and Tempo repeats alltoall only"),
        (
            {**expert_cases.ALL_TO_ALL, **expert_cases.SHARED, **expert_cases.EP_2, "moe_shared_expert_overlap": True},
            "moe_shared_expert_overlap is on, which changes the order of backward",
        ),
    ):
        with pytest.raises(ValueError, match=f"{why}.*; set tempo.moe_permute to "):
            choose(config_of(**settings), repeat)
    with pytest.raises(ValueError, match='the model has no experts .* set tempo.moe_permute to "off"'):
        choose(config_of(num_moe_experts=None, moe_ffn_hidden_size=None), TempoConfig(moe_permute="recompute"))

"""Estimates of runs whose memory NVIDIA has published, and what each part that they showed to be missing is made of."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import published_peaks
import pytest
import torch
from runs import DISTRIBUTED, SMALL, change_run, make_run

from tempo_megatron import TempoConfig
from tempo_megatron.cli import main
from tempo_megatron.memory.rank import libraries
from tempo_megatron.memory.rank.estimate import RankEstimate, estimate_ranks
from tempo_megatron.memory.rank.libraries import get_torch_bytes, list_lasting_tensors, list_workspaces
from tempo_megatron.memory.routing import assume_routing, expect_imbalance
from tempo_megatron.memory.run import Hybrid, Run
from tempo_megatron.memory.show.tree import ModuleMemory, list_modules
from tempo_megatron.memory.simulated.chunk import simulate_chunk
from tempo_megatron.memory.simulated.chunk_memory import LAYERS
from tempo_megatron.memory.simulated.device import choose_attention

MIB = 1 << 20
# Of the published rows one for each GPU, for stages, chunks and tensor parallel ranks, for Megatron's own modules and
# fp16, and for unfused attention.
NEAR = (
    "gpt/gpt3_mcore_te_tp1_pp1_resume_torch_dist_dist_optimizer:dev_dgx_h100",
    "gpt/gpt3_mcore_te_tp1_pp1_dist_optimizer_no_mmap_bin_files_1node:dev_dgx_gb200",
    "gpt/gpt3_mcore_te_tp1_pp4_vp1_resume_torch_decoupled_lr:dev_dgx_h100",
    "gpt/gpt3_7b_tp1_pp4_memory_speed:dev_dgx_gb200",
    "gpt/gpt3_7b_tp4_pp1_memory_speed:dev_dgx_a100",
    "gpt/gpt3_7b_tp4_pp1_memory_speed:dev_dgx_h100",
    "gpt/gpt3_mcore_tp1_pp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce_param_gather:dev_dgx_h100",
    "hybrid/hybrid_mr_mcore_te_tp1_pp2_vpp2_cp1_dgx_a100_1N8G:dev_dgx_h100",
)
GOLDENS = json.loads((Path(published_peaks.__file__).parent / "published" / "megatron.json").read_text("utf-8"))
ROWS = {row["id"]: row for row in GOLDENS["megatron_goldens"]}


@pytest.mark.parametrize("name", NEAR)
def test_a_published_run_is_estimated_within_half_a_percent(name: str) -> None:
    """From the arguments of its test case to the bytes of its last rank."""
    found = published_peaks.estimate_row(ROWS[name])
    assert found.refusal is None
    assert abs(found.rest_error) < 0.5 and abs(found.peak_error) < 0.5


def test_rows_of_another_run_are_counted_both_ways() -> None:
    known = published_peaks.Result("a:dev_dgx_h100", 1000, 2000, 1001, 1990, seconds=1.0)
    other = dataclasses.replace(known, id="b:dev_dgx_h100", peak=1000, of_another_run="copied from c.")
    assert published_peaks.summarize([known, other]) == (
        "2 of 2 rows are expressed: at rest within 0.5 % on 2, peak within 3 % on 1, 1 under by more than 3 % (without "
        "the 1 marked, of another run: at rest within 0.5 % on 1, peak within 3 % on 1, 0 under by more than 3 %); the "
        "slowest took 1.0 s of a CPU"
    )
    assert "marked" not in published_peaks.summarize([known])
    # In the data those rows say how it is known.
    assert sum("of_another_run" in row for row in ROWS.values()) == 3


def test_workspaces_are_those_of_the_gpu_the_modules_and_the_mode() -> None:
    def count_workspaces(run: Run, *, has_head: bool) -> int:
        return sum(map(sum, list_workspaces(run, has_head=has_head).values()))

    run = make_run(SMALL, gpu="a100", deterministic=False)
    assert count_workspaces(dataclasses.replace(run, gpu=None), has_head=True) == 0
    assert count_workspaces(dataclasses.replace(run, gpu="h100", stock="cpu"), has_head=True) == 0
    # Products of torch are in the loss head, in unfused attention, and everywhere in Megatron's own modules.
    engine = count_workspaces(run, has_head=False)
    with_torch = count_workspaces(run, has_head=True)
    assert with_torch == count_workspaces(dataclasses.replace(run, stock_attention="unfused"), has_head=False)
    assert with_torch - engine == count_workspaces(dataclasses.replace(run, stock="local"), has_head=False)
    deterministic = count_workspaces(dataclasses.replace(run, deterministic=True), has_head=True)
    assert deterministic - with_torch == 2 * (32 * MIB - 8.125 * MIB)
    found = [get_torch_bytes("gb200", version) for version in ("2.11.1+cu130", "2.12.0a0+5bcf4f1e31")]
    assert found == [8.125 * MIB, 32 * MIB]


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_mamba_layer_keeps_what_its_kernels_save(tensor_parallel: int) -> None:
    """Beside its input: the norm's output, its projection in the scan's order, the scan before its gate, the second
    norm's input and output, and float32 statistics of both norms."""
    h, heads, groups, tokens = SMALL["hidden_size"], 16, 8, 4 * SMALL["seq_length"]
    hybrid = Hybrid(pattern="M" * SMALL["num_layers"], num_heads=heads)
    run = make_run(SMALL | {"hidden_dropout": 0.0, "normalization": "RMSNorm"}, hybrid=hybrid, tp=tensor_parallel)
    two, one = (
        simulate_chunk(run, range(number), pre_process=False, post_process=False).kept_bytes for number in (2, 1)
    )
    inner = heads * 64
    split = 2 * (2 * inner + 2 * groups * 128 + heads) + 2 * 3 * inner + 4 * groups
    # A and its exponent, and the biases of steps, in float32.
    small = 3 * 4 * heads // tensor_parallel
    assert two - one - small == tokens * (2 * h + 2 * h + 4 + split // tensor_parallel)


def test_deterministic_experts_keep_what_they_hand_back_and_local_routers_have_a_workspace() -> None:
    """Tokens are added up by index, which keeps them, unless a kernel does it; the router's product is Transformer
    Engine's also beside Megatron's own modules."""
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 64}
    sizes = {**SMALL, "seq_length": 64, "num_layers": 2}

    def count_kept(**settings: Any) -> int:
        run = make_run({**sizes, **experts}, dispatcher="alltoall", **settings)
        return simulate_chunk(run, range(2)).kept_bytes

    kept = count_kept(deterministic=False)
    assert count_kept() - kept == 2 * (2 * 4 * 64) * 512 * 2
    # The kernel keeps no probabilities to choose from, [tokens, experts] of each layer.
    assert count_kept(moe_permute_fusion=True) == kept - 2 * (4 * 64) * 4 * 2
    local = make_run(sizes, gpu="h100", stock="local")
    of_torch = list_workspaces(local, has_head=True)
    assert of_torch == {libraries.TORCH: [32 * MIB], libraries.TORCH_BACKWARD: [32 * MIB]}
    of_router = list_workspaces(change_run(local, **experts), has_head=True)
    assert of_router == of_torch | {libraries.ENGINE: [32 * MIB + 1024]}


def test_float8_halves_the_inputs_that_linears_keep_and_has_weights_of_its_own() -> None:
    """A layer's linears have inputs of h, h, h and 4h; attention keeps its output, the second of them, all the same."""
    run = make_run({**SMALL, "seq_length": 64, "num_layers": 1}, gpu="h100")
    tokens, parameters = 4 * 64, 12 * 512 * 512

    def count_kept(recipe: str | None) -> int:
        return simulate_chunk(dataclasses.replace(run, float8=recipe), range(1)).kept_bytes

    kept = count_kept(None)
    assert count_kept("tensorwise") == kept - (1 + 1 + 4) * 512 * tokens
    assert count_kept("delayed") == kept - (1 + 1 + 4 - 1) * 512 * tokens
    # A float32 for 128 elements, or a byte for 32.
    assert count_kept("blockwise") == count_kept("mxfp8") == kept - (1 + 1 + 4) * 512 * tokens * 31 // 32
    # Of one weight: the scales of blocks along both sizes are a float32 for 128 x 128, or a byte for 32.
    scaled = {"h100 tensorwise": 2.0, "gb200 tensorwise": 1.0, "h100 blockwise": 2 + 2**-11, "gb200 mxfp8": 2 + 2**-4}
    for words, num_bytes in scaled.items():
        gpu, recipe = words.split()
        (rank,) = estimate_ranks(dataclasses.replace(run, gpu=gpu, float8=recipe))
        assert rank.at_rest["float8 weights"] == num_bytes * parameters
    beside, alone = (
        estimate_ranks(dataclasses.replace(run, float8="tensorwise", float8_weights=only))[0].at_rest
        for only in (False, True)
    )
    # In place of two bytes in bf16 and two in float8, one beside its transpose.
    for part in ("weights", "float8 weights"):
        assert beside[part] - alone[part] == parameters
    with pytest.raises(ValueError, match="needs Transformer Engine's modules and Hopper or Blackwell"):
        dataclasses.replace(run, gpu="a100", float8="tensorwise").check()
    with pytest.raises(ValueError, match="mxfp8 needs Blackwell"):
        dataclasses.replace(run, float8="mxfp8").check()


def test_layers_that_float8_leaves_out_are_those_of_bf16() -> None:
    run = make_run({**SMALL, "num_layers": 3}, float8="tensorwise")
    plain, both, mixed = (
        simulate_chunk(change_run(run, float8_layers=(*has, True)), range(2), pre_process=False, post_process=False)
        for has in ((False, False), (True, True), (False, True))
    )
    assert plain.kept_bytes > both.kept_bytes and both.float8_weights > plain.float8_weights == 0
    assert 2 * mixed.kept_bytes == plain.kept_bytes + both.kept_bytes
    assert [each[False, True] for each in mixed.layers] == [0, mixed.float8_weights]
    assert 2 * mixed.float8_weights == both.float8_weights


def test_experts_keep_their_inputs_in_float8() -> None:
    sizes = {**SMALL, "seq_length": 64, "num_layers": 1, "num_experts": 4, "moe_ffn_hidden_size": 64}
    run = make_run(sizes, moe_grouped_gemm=True, moe_imbalance=1.0, gpu="h100", deterministic=False)
    kept = [
        simulate_chunk(dataclasses.replace(run, float8=recipe), range(1)).kept_bytes for recipe in (None, "tensorwise")
    ]
    tokens = 4 * 64
    # The router keeps what it shares with nothing; each token has two experts with inputs of h and 64.
    assert kept[0] - kept[1] == 512 * tokens + 2 * tokens * (512 + 64)


def test_layers_hold_rotary_tables_and_where_tokens_went_between_micro_batches() -> None:
    """As on the last stage of published runs: MiB of a Mixtral of 8 chunks, and of latent attention with experts."""

    def count_lasting(run: Run, stage: int) -> int:
        return sum(list_lasting_tensors(run, stage))

    sizes = {**SMALL, "seq_length": 4096, "num_layers": 16, "position_embedding_type": "rope", "kv_channels": 128}
    plain = make_run(sizes, micro_batch_size=1, pp=2, chunks=(1,) * 16)
    assert count_lasting(plain, 1) == 8 * 4096 * 128 * 4
    assert count_lasting(make_run(SMALL), 0) == 0
    experts = {
        **{"num_experts": 32, "moe_router_topk": 4, "moe_ffn_hidden_size": 64, "moe_layer_freq": "([0]+[1]*15)"},
        **{"moe_router_dtype": "fp32", "dispatcher": "alltoall", "moe_permute_fusion": True},
    }
    run = change_run(plain, **experts, chunks=None, mtp_num_layers=1)
    tokens = 4096
    # Probabilities in float32, a byte for each expert, and the kernel's map; eight layers, and that of a further token.
    routing = 9 * tokens * (32 * (4 + 1) + 4 * (2 * 32 + 1))
    assert count_lasting(run, 1) == routing + tokens * 128 * 4
    by_index = change_run(run, moe_permute_fusion=False, moe_router_dtype=None, mtp_num_layers=0)
    assert count_lasting(by_index, 0) == 7 * tokens * (32 * 3 + 8 * 4) + tokens * 128 * 4
    of_all = change_run(by_index, dispatcher="allgather", ep=4, dp=4)
    assert count_lasting(of_all, 0) == 7 * tokens * (4 * 8 + 4 * (2 + 8)) + tokens * 128 * 4
    latent = change_run(plain, **_LATENT, fuses_latent_rope=True, chunks=None)
    assert count_lasting(latent, 1) == 8 * _LATENT["qk_pos_emb_head_dim"] * (4 + 2 * 2) * 4096


def _draw_imbalance(run: Run, num_layers: int, seed: int) -> float:
    """Of one random router for each layer, and tokens as frequent as Zipf's law says."""
    generator, vocab_size, number = torch.Generator().manual_seed(seed), run.padded_vocab_size, run.model.num_experts
    assert number is not None
    shares = 1 / torch.arange(1, vocab_size + 1, dtype=torch.float64)
    shares /= shares.sum()
    load = torch.zeros(run.layout.ep, dtype=torch.float64)
    groups, k = run.model.moe_router_num_groups or 1, run.model.moe_router_topk
    of_group = number // groups
    for _ in range(num_layers):
        scores = torch.rand(vocab_size, number, generator=generator)
        if groups > 1:
            others = torch.rand(vocab_size, groups, generator=generator).argsort(1)[
                :, run.model.moe_router_group_topk or 1 :
            ]
            scores.view(vocab_size, groups, of_group).scatter_(1, others[..., None].expand(-1, -1, of_group), -1.0)
        chosen = scores.topk(k).indices // run.num_local_experts
        load.index_add_(0, chosen.flatten(), shares.repeat_interleave(k))
    return float(load.max() / load.mean())


@pytest.mark.parametrize(
    ("experts", "num_layers"),
    [
        ({"num_experts": 8, "ep": 4}, 12),
        ({"num_experts": 16, "moe_router_topk": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 2,
          "ep": 8}, 8),
    ],
)  # fmt: skip
def test_the_fullest_rank_gets_what_random_routers_give_it(experts: dict[str, int], num_layers: int) -> None:
    run = change_run(make_run(SMALL), vocab_size=2000, make_vocab_size_divisible_by=1, **experts)
    drawn = [_draw_imbalance(run, num_layers, seed) - 1 for seed in range(40)]
    # The loads of few layers are no normal variables: frequent tokens are few.
    assert expect_imbalance(run, num_layers) - 1 == pytest.approx(sum(drawn) / len(drawn), rel=0.15)


def test_only_ranks_that_divide_experts_by_a_learned_router_can_be_fuller() -> None:
    sizes = {**SMALL, "seq_length": 64, "num_layers": 2, "num_experts": 8, "moe_ffn_hidden_size": 64}
    run = make_run(sizes, ep=4, dp=4)
    for even in ({"ep": 1}, {"moe_router_load_balancing_type": "sinkhorn"}):
        assert expect_imbalance(change_run(run, **even), 2) == 1
    assert expect_imbalance(run, 2) > expect_imbalance(run, 8) > 1
    kept = []
    for factor in (1.0, None, 1.5):
        given = dataclasses.replace(run, moe_imbalance=factor)
        kept.append(simulate_chunk(assume_routing(given, 0), range(2)).kept_bytes)
    assert kept[0] < kept[1] < kept[2]


def test_the_tokens_of_the_fullest_rank_are_a_named_assumption_with_its_price(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each figure is what a run with that share needs, and bytes are linear in rows."""
    command = (
        f"estimate --model {published_peaks.ROOT / 'configs/model/mixtral_8x7b.json'} --seq-length 160 --ep 4 --dp 4"
    )

    def estimate(*words: str) -> tuple[dict[str, Any], int]:
        file = tmp_path / "figures.json"
        assert main([*command.split(), "--json", str(file), *words]) == 0
        found = json.loads(file.read_text())
        return found["assumptions"]["token_imbalance"], found["stock"][0]["peak_bytes"]

    even, peak = estimate("--moe-imbalance", "1")
    assert even["rows_of_an_equal_share"] == 160 * 2 and even["stock"]["over_even_bytes"] == 0
    more, peak_of_more = estimate("--moe-imbalance", "1.5")
    assert "get 1.50 times an equal share of 320 rows a layer (given); at most 4.00 times" in capsys.readouterr().out
    assert peak_of_more - peak == more["stock"]["over_even_bytes"] == 5 * even["stock"]["next_bytes"] > 0
    assert more["stock"]["next_bytes"] == even["stock"]["next_bytes"]
    # Both of a token's experts may be the rank's.
    most, peak_of_most = estimate("--moe-imbalance", "max")
    assert most["largest_factor"] == most["stock"]["factor"] == most["stock"]["next_factor"] == 4
    assert peak_of_most - peak >= 6 * (peak_of_more - peak)
    expected, _ = estimate()
    assert not expected["is_given"] and expected["stock"].keys() == {"factor"} and 1 < expected["stock"]["factor"] < 1.2
    assert "(routers at random; --moe-imbalance 1." in capsys.readouterr().out


def test_a_stage_keeps_the_last_input_of_each_chunk_and_its_gradient() -> None:
    def estimate(**settings: Any) -> tuple[RankEstimate, ...]:
        sizes = {**SMALL, "seq_length": 64, "hidden_size": 64}
        return estimate_ranks(make_run(sizes, pp=2, num_micro_batches=4, **settings))

    hidden = 64 * 4 * 64 * 2
    assert [rank.at_rest["stage inputs"] for rank in estimate()] == [0, 2 * hidden]
    chunks = [rank.at_rest["stage inputs"] for rank in estimate(chunks=(2,) * 6)]
    assert chunks == [2 * 2 * hidden, 3 * 2 * hidden]


def test_overlapped_layers_with_experts_keep_their_latest_input_and_its_gradient() -> None:
    """Of each layer with experts whose input is not a stage's own."""
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 64, "moe_layer_freq": "[0,1,1,1]"}
    sizes = {**SMALL, "seq_length": 64, "hidden_size": 64, "num_layers": 4, "add_bias_linear": False, **experts}
    layout = {"num_micro_batches": 4, "dp": 2, "ep": 2}
    hidden = 64 * 4 * 64 * 2

    def count(*, overlaps: bool = True, dispatcher: str = "alltoall", **settings: Any) -> list[int]:
        ranks = estimate_ranks(make_run(sizes, **layout, overlaps=overlaps, dispatcher=dispatcher, **settings))
        return [rank.at_rest["stage inputs"] // hidden for rank in ranks]

    assert count() == [3 * 2]
    assert count(tp=2, sp=True) == [3]
    # A flexible dispatcher has probabilities without a graph.
    assert count(overlaps=False) == count(dispatcher="flex") == [0]
    assert count(pp=2, chunks=(1,) * 4) == [2, 2 * 2]


def test_fused_accumulation_keeps_a_gradient_of_each_shape_of_weights() -> None:
    sizes = {**SMALL, "seq_length": 64, "num_layers": 2}
    run = make_run(sizes, gpu="h100", pp=2, fuses_gradient_accumulation=True)
    first, last = (rank.at_rest["placeholder gradients"] for rank in estimate_ranks(run))
    of_layer = 2 * 512 * 512 * (3 + 1 + 4 + 4)
    assert (first, last) == (of_layer, of_layer + 2 * 512 * run.padded_vocab_size)
    (rank,) = estimate_ranks(change_run(run, pp=1, fuses_gradient_accumulation=False))
    assert rank.at_rest["placeholder gradients"] == 0


def test_experts_gather_into_the_global_buffer_and_have_placeholder_gradients_of_their_own() -> None:
    """The gathered tokens stay in the buffer, and each shape of an expert's weights has one placeholder."""
    experts = {"num_experts": 8, "moe_ffn_hidden_size": 256}
    sizes = {**SMALL, "seq_length": 64, "num_layers": 2, "add_bias_linear": False, **experts}
    run = make_run(sizes, gpu="h100", dp=4, ep=4, moe_grouped_gemm=True, fuses_gradient_accumulation=True)
    (rank,) = estimate_ranks(run)
    assert rank.at_rest["global memory buffer"] == 4 * 4 * 64 * 512 * 2
    of_attention_and_head = 512 * (3 + 1) * 512 + 512 * run.padded_vocab_size
    assert rank.at_rest["placeholder gradients"] == 2 * (of_attention_and_head + 2 * 256 * 512)
    (rank,) = estimate_ranks(change_run(run, dispatcher="alltoall"))
    assert rank.at_rest["global memory buffer"] == 0


_TOKENS, _LAYERS = 4 * 64, 4
_LATENT: dict[str, Any] = {
    **{"multi_latent_attention": True, "position_embedding_type": "yarn", "q_lora_rank": 96, "kv_lora_rank": 32},
    **{"qk_head_dim": 64, "qk_pos_emb_head_dim": 32, "v_head_dim": 48},
}
_MIXTURE = make_run(
    {
        **{**SMALL, "seq_length": 64, "num_layers": _LAYERS, "add_bias_linear": False, "activation": "swiglu"},
        **{"num_experts": 8, "moe_ffn_hidden_size": 256, "moe_layer_freq": "[0,1,1,1]", **_LATENT},
    },
    ep=4,
    moe_grouped_gemm=True,
    dispatcher="alltoall",
    learns_positions=True,
    fuses_latent_rope=True,
)


@pytest.mark.parametrize(
    ("recompute", "freed"),
    [
        # The activation's result, of each layer with experts.
        (("moe_act",), 3 * _TOKENS * 2 * 256 * 2),
        # Queries, keys and values of 8 heads; the down projection's result, 32 + 32, stays in place of a copy of 32.
        (("mla_up_proj",), _LAYERS * _TOKENS * (8 * (96 + 96 + 48) - 32) * 2),
        # Norms before latent attention, and before experts, with two float32 a token.
        (("layernorm",), (_LAYERS + 3) * _TOKENS * (512 * 2 + 2 * 4)),
    ],
)
def test_modules_that_are_recomputed_keep_no_output(recompute: tuple[str, ...], freed: int) -> None:
    usual, found = (
        simulate_chunk(dataclasses.replace(_MIXTURE, recompute=each), range(_LAYERS)) for each in ((), recompute)
    )
    assert usual.kept_bytes - found.kept_bytes == freed
    # All that the forward kept is gone behind the backward, and each gradient came once.
    for each in (usual, found):
        assert sum(phase.growth - phase.gradient_growth for phase in each.forward + each.backward) <= 0
    assert [phase.num_gradients for phase in usual.backward] == [phase.num_gradients for phase in found.backward]


@pytest.mark.parametrize(
    "run",
    [
        make_run({**SMALL, "seq_length": 64}),
        dataclasses.replace(_MIXTURE, recompute=("layernorm", "mla_up_proj", "moe_act")),
        dataclasses.replace(_MIXTURE, tempo=TempoConfig(), model=_MIXTURE.built_model, mtp_num_layers=1),
        make_run({**SMALL, "seq_length": 64, "family": "t5", "decoder_seq_length": 32}, stock="local"),
    ],
    ids=["gpt", "recomputed", "mixture", "t5"],
)
def test_the_modules_of_a_chunk_make_all_that_it_keeps(run: Run) -> None:
    layers = range(1, 4)
    tree, chunk = list_modules(run, layers), simulate_chunk(run, layers)
    assert (tree.kept_bytes, tree.num_parameters) == (chunk.kept_bytes, chunk.num_parameters)
    stack = next(child for child in tree.children if child.name == "decoder").children[0]
    # Layers count from 0 over the whole model.
    assert stack.name == "layers" and [each.name for each in stack.children] == ["1-3"]
    (alike,) = stack.children
    assert alike.times == 3 and any(child.kept_bytes for child in alike.children)


def test_a_forward_beside_another_micro_batchs_backward_is_ahead_by_its_layers() -> None:
    def find_peak(overlaps: bool, **settings: Any) -> int:
        run = change_run(_MIXTURE, overlaps=overlaps, optimizer=DISTRIBUTED, dp=4, **settings)
        return estimate_ranks(run)[0].peak_bytes

    assert find_peak(True, num_micro_batches=1) == find_peak(False, num_micro_batches=1)
    assert find_peak(True, num_micro_batches=4) > find_peak(False, num_micro_batches=4)
    chunks: dict[str, Any] = {"pp": 2, "chunks": (1,) * _LAYERS, "num_micro_batches": 4}
    kept = simulate_chunk(_MIXTURE, range(2, 3), pre_process=False, post_process=False).kept_bytes
    assert find_peak(True, **chunks) > find_peak(False, **chunks) + kept


def test_a_chunk_names_its_matrices_and_its_experts() -> None:
    sizes = {**SMALL, "seq_length": 64, "num_layers": 2, "untie_embeddings_and_output_weights": True}
    sizes |= {"num_experts": 4, "moe_ffn_hidden_size": 96}
    found = simulate_chunk(make_run(sizes, ep=2), range(2)).parameters
    assert sum(each.size for each in found if each.is_expert) == 2 * 2 * (2 * 96 * 512 + 96 + 512)
    per_layer = 3 * 512 * 512 + 512 * 512 + 4 * 512 + 2 * 2 * 96 * 512
    assert sum(each.size for each in found if each.is_matrix) == 64 * 512 + 2 * per_layer


@pytest.mark.parametrize(("limit", "waiting"), [(None, 0), (2, 2), (0, 3)])
def test_gradients_of_the_output_layer_wait_on_the_last_stage(limit: int | None, waiting: int) -> None:
    sizes = {**SMALL, "seq_length": 64, "num_layers": 2}
    settings: dict[str, Any] = {"pp": 2, "num_micro_batches": 4, "deferred_head_gradients": limit}
    run = make_run(sizes, fuses_gradient_accumulation=True, **settings)
    first, last = (rank.parts["deferred gradients"] for rank in estimate_ranks(run))
    assert (first, last) == (0, waiting * 2 * 4 * 64 * (run.padded_vocab_size + 512))


def test_transformer_engine_chooses_an_attention_by_gpu_and_mode() -> None:
    def choose(gpu: str | None, **settings: Any) -> str:
        return choose_attention(make_run(SMALL, gpu=gpu, **settings))

    assert [choose(gpu) for gpu in ("a100", "h100", "gb200", None)] == ["flash", "fused", "flash", "fused"]
    assert choose("gb200", deterministic=False) == "fused" and choose("a100", stock_attention="unfused") == "unfused"


def test_flash_attention_keeps_its_output_twice_where_samples_are_several() -> None:
    def keep(attention: str, samples: int) -> int:
        run = make_run({**SMALL, "num_layers": 1}, stock_attention=attention, micro_batch_size=samples)
        return simulate_chunk(run, range(1)).kept_bytes

    assert keep("flash", 2) - keep("fused", 2) == 1024 * 2 * 512 * 2
    assert keep("flash", 1) == keep("fused", 1)


@pytest.mark.parametrize(("recompute", "kept"), [((), 0), (("core_attn",), 3)])
def test_masks_of_the_samples_stay_where_megatron_recomputes_with_them(recompute: tuple[str, ...], kept: int) -> None:
    """On the first of three stages, with three micro batches in flight; else a mask goes at its forward's end."""

    def estimate(has_masks: bool) -> RankEstimate:
        run = make_run(SMALL, gpu=None, pp=3, recompute=recompute, data_has_masks=has_masks)
        return estimate_ranks(dataclasses.replace(run, micro_batch_size=2, num_micro_batches=6), only=0)[0]

    of_masks, without = estimate(True), estimate(False)
    assert of_masks.moment == without.moment == "backward of the layers"
    mask = 2 * SMALL["seq_length"] ** 2
    assert of_masks.peak_bytes - without.peak_bytes == kept * mask
    assert of_masks.parts["micro batches"] - without.parts["micro batches"] == kept * mask


@pytest.mark.parametrize(("family", "masks"), [("gpt", [0]), ("bert", [1]), ("t5", [1, 0, 1])])
def test_unfused_attention_keeps_a_mask_of_padding_in_each_layer(family: str, masks: list[int]) -> None:
    """Beside the probabilities; of a T5 the encoder, and the decoder to itself, which is causal, and to the encoder."""

    def list_kept(module: ModuleMemory) -> list[int]:
        if module.name == "scale_mask_softmax":
            return [module.kept_bytes]
        return [kept for child in module.children for kept in list_kept(child)]

    sizes = {**SMALL, "family": family, "num_layers": 1, "seq_length": 64, "vocab_size": 512}
    tree = list_modules(make_run(sizes, stock_attention="unfused", micro_batch_size=2), range(1))
    assert list_kept(tree) == [2 * 64 * 64 * (8 * 2 + mask) for mask in masks]


def test_a_gpus_modules_keep_what_their_kernels_keep() -> None:
    """RMSNorm its input and a float32 a token, the fused SwiGLU its input; their outputs are the next linears'."""
    sizes = {**SMALL, "num_layers": 3, "attention_dropout": 0.0, "hidden_dropout": 0.0, "add_bias_linear": False}
    shape = {**sizes, "normalization": "RMSNorm", "activation": "swiglu", "ffn_hidden_size": 1024}
    memory = simulate_chunk(make_run(shape, micro_batch_size=1), range(3))
    kept = [phase.growth for phase in memory.forward if phase.part == LAYERS][1]
    # A token's: inputs and outputs of two norms, q, k, v, attention's output, and three of the MLP's inner size.
    of_token = 2 * (4 * 512 + 4 * 512 + 3 * 1024) + 4 * (2 + 8)
    assert kept == 1024 * of_token

"""Estimates of runs whose memory NVIDIA has published, and what each part that they showed to be missing is made of."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import published_peaks
import pytest
import torch
from made_chunks import make_chunk

from tempo_megatron import TempoConfig
from tempo_megatron.cli import main
from tempo_megatron.memory.estimate.allocator import CachingAllocator, Library
from tempo_megatron.memory.estimate.estimate import RankEstimate, estimate_ranks
from tempo_megatron.memory.estimate.lasting_tensors import count_lasting_tensors
from tempo_megatron.memory.estimate.megatron_fsdp import ShardedChunk
from tempo_megatron.memory.estimate.model_states import ModelStates
from tempo_megatron.memory.estimate.muon import count_muon_states
from tempo_megatron.memory.estimate.play import Step
from tempo_megatron.memory.estimate.rounding import count_rounding, list_own_pieces
from tempo_megatron.memory.estimate.workspaces import find_torch_bytes, list_workspaces
from tempo_megatron.memory.routing import assume_routing, expect_imbalance
from tempo_megatron.memory.run import Experts, Hybrid, LatentAttention, MegatronFsdp, OptimizerSettings, Run
from tempo_megatron.memory.show.tree import ModuleMemory, list_modules
from tempo_megatron.memory.simulated.chunk import simulate_chunk
from tempo_megatron.memory.simulated.chunk_memory import LAYERS, ChunkMemory, LayerParameters, Parameter
from tempo_megatron.memory.simulated.transformer_engine import choose_attention
from tempo_megatron.memory.tape.tape import ENGINE_PRODUCT
from tempo_megatron.models.shape import make_shape

MIB = 1 << 20
WHOLE, DISTRIBUTED = OptimizerSettings(distributed=False), OptimizerSettings(distributed=True)
# Of most of the functional tests in NVIDIA/Megatron-LM@d98e8a64dd, tests/functional_tests/test_cases/gpt.
SMALL = {"num_layers": 12, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 1024, "vocab_size": 50257}
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

NO_STATES = ModelStates(weights=0)


def make_run(sizes: dict[str, Any], **settings: Any) -> Run:
    usual = {"micro_batch_size": 4, "stock": "transformer_engine", "deterministic": True, "data_has_masks": True}
    return Run(**{"model": make_shape(**sizes), "tempo": TempoConfig.off(), **usual, **settings})


@pytest.mark.parametrize("name", NEAR)
def test_a_published_run_is_estimated_within_half_a_percent(name: str) -> None:
    """From the arguments of its test case to the bytes of its last rank."""
    found = published_peaks.estimate_row(ROWS[name])
    assert found.refusal is None
    assert abs(found.rest_error) < 0.5 and abs(found.peak_error) < 0.5


def test_rows_of_another_run_are_marked_and_counted_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = published_peaks.Result("a:dev_dgx_h100", 1000, 2000, 1001, 1990, seconds=1.0)
    other = dataclasses.replace(known, id="b:dev_dgx_h100", peak=1000, of_another_run="copied from c.")
    page, plots = tmp_path / "page.md", []
    page.write_text(f"before\n{published_peaks._BEGIN}\nold\n{published_peaks._END}\nbehind\n", encoding="utf-8")
    monkeypatch.setattr(published_peaks, "_DOCS", page)
    monkeypatch.setattr(published_peaks, "plot", lambda results, png: plots.append(len(results)))
    published_peaks.write_docs([known, other])
    lines = page.read_text("utf-8").splitlines()
    assert lines[2] == (
        "2 of 2 rows are expressed: at rest within 0.5 % on 2, peak within 3 % on 1, 1 under by more than 3 % (without "
        "the 1 marked, of another run: at rest within 0.5 % on 1, peak within 3 % on 1, 0 under by more than 3 %); the "
        "slowest took 1.0 s of a CPU."
    )
    assert lines[4].startswith("1 rows are within") and lines[8].startswith(r"| b:dev_dgx_h100 \* | ")
    assert lines[10] == r"\* b:dev_dgx_h100: copied from c." and plots == [2]
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
    found = [find_torch_bytes("gb200", version) for version in ("2.11.1+cu130", "2.12.0a0+5bcf4f1e31")]
    assert found == [8.125 * MIB, 32 * MIB]


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_mamba_layer_keeps_what_its_kernels_save(tensor_parallel: int) -> None:
    """Beside its input: the norm's output, its projection in the scan's order, the scan before its gate, the second
    norm's input and output, and float32 statistics of both norms."""
    h, heads, groups, tokens = SMALL["hidden_size"], 16, 8, 4 * SMALL["seq_length"]
    hybrid = Hybrid(pattern="M" * SMALL["num_layers"], num_heads=heads)
    run = make_run(
        SMALL | {"hidden_dropout": 0.0, "normalization": "RMSNorm"}, hybrid=hybrid, tensor_parallel=tensor_parallel
    )
    two, one = (
        simulate_chunk(run, range(number), pre_process=False, post_process=False).kept_bytes for number in (2, 1)
    )
    inner = heads * 64
    split = 2 * (2 * inner + 2 * groups * 128 + heads) + 2 * 3 * inner + 4 * groups
    # A and its exponent, and the biases of steps, in float32.
    small = 3 * 4 * heads // tensor_parallel
    assert two - one - small == tokens * (2 * h + 2 * h + 4 + split // tensor_parallel)


def test_megatron_fsdp_shards_all_gathers_ahead_and_reduces_at_the_end_of_backward() -> None:
    layers, ranks = 4, 4
    run = make_run({**SMALL, "num_layers": layers}, data_parallel=ranks, num_micro_batches=2)

    def shard(**settings: Any) -> tuple[ShardedChunk, RankEstimate]:
        fsdp = MegatronFsdp(main_bytes=4, **settings)
        (rank,) = estimate_ranks(dataclasses.replace(run, optimizer=OptimizerSettings(fsdp=fsdp)))
        memory = simulate_chunk(run, range(layers), has_gradients=True)
        return ShardedChunk(fsdp, memory, torch.bfloat16, has_float8=False, ranks=ranks, expert_ranks=ranks), rank

    chunk, rank = shard()
    h = SMALL["hidden_size"]
    layer = 12 * h * h + 13 * h
    outside = (50257 + 47) * h + SMALL["seq_length"] * h + 2 * h
    assert rank.num_parameters == layers * layer + outside
    own = rank.num_parameters // ranks
    kept = {name: size for name, size in rank.at_rest.items() if size}
    assert kept == {
        "weights": 2 * own,
        # bf16, and the optimizer's copies in float32.
        "gradients": 6 * own,
        "optimizer states": 12 * own,
        "communication buffers": 2 * outside,
    }
    # Where they are freed between steps they are there at the peak still.
    _, releasing = shard(keeps_outer_weights=False)
    assert releasing.at_rest == rank.at_rest | {"communication buffers": 0}
    assert releasing.peak_bytes == rank.peak_bytes

    def list_buckets(chunk: ShardedChunk, *, in_backward: bool) -> list[int]:
        segments = chunk.memory.backward if in_backward else chunk.memory.forward
        return [sum(chunk.list_held(each).values()) for each in segments if each.part == LAYERS]

    assert list_buckets(chunk, in_backward=False) == [2 * layer * number for number in (4, 3, 2, 1)]
    # Weights of the layers that are left, and gradients of those that are done, the same layer among both, beside the
    # final norm's.
    assert list_buckets(chunk, in_backward=True) == [2 * layer * (layers + 1) + 4 * h] * layers
    # Two layers' gradients may wait beside those of a third, and one layer is gathered ahead.
    narrow, _ = shard(unit_elements=2 * layer, gradient_bytes=4)
    assert list_buckets(narrow, in_backward=False) == [2 * layer * number for number in (2, 2, 2, 1)]
    gradients = [4 * layer * number + 8 * h for number in (1, 2, 3, 3)]
    gathered = [2 * layer * number for number in (2, 2, 2, 1)]
    assert list_buckets(narrow, in_backward=True) == [a + b for a, b in zip(gathered, gradients, strict=True)]


def test_a_unit_of_megatron_fsdp_takes_the_hole_of_the_gathered_one_before_it() -> None:
    """2 MiB, 4 gathered and 4 MiB in float32, of which the gathered ones leave a hole for the next unit's 3.25."""
    memory = simulate_chunk(make_run({**SMALL, "num_layers": 1}), range(1))
    unit = LayerParameters(others=13 * MIB // 4, experts=0, float8_others=0, float8_experts=0)
    memory = dataclasses.replace(memory, num_parameters=2 * MIB + unit.total, layer_parameters=(unit,))

    def count(ranks: int, *, is_expandable: bool = False) -> int:
        chunk = ShardedChunk(MegatronFsdp(main_bytes=4), memory, torch.bfloat16, False, ranks, ranks)
        return chunk.place(CachingAllocator(is_expandable=is_expandable))

    assert count(2) == 3 * MIB // 4
    # One rank gathers nothing: 4, 8, 6.5 and, in a segment of their own, 13 MiB in 14; gradients of 10.5 in 12.
    assert count(1) == MIB
    assert count(2, is_expandable=True) == 0


def test_blocks_that_are_not_split_count_whole() -> None:
    """Less than 1 MiB that is left of a segment counts with the tensor in it."""
    large = [Parameter((19 * MIB // 4,), is_matrix=False)]

    def count(optimizer: OptimizerSettings, *chunks: ChunkMemory, is_expandable: bool = False) -> int:
        allocator = CachingAllocator(is_expandable=is_expandable)
        step = Step(allocator, chunks, [(True, 0, 0), (False, 0, 0)], {}, buckets=NO_STATES) if chunks else None
        ranks = 2 if optimizer.distributed else 1
        return count_rounding(allocator, [large], torch.bfloat16, [], optimizer, parts=(ranks, ranks), step=step)

    # In bf16 9.5 MiB, in a segment of 20 MiB that is split; gradients, copy and two moments of 19 MiB in 20 MiB each.
    assert count(WHOLE) == 4 * MIB
    # The copy of 9.5 MiB and its clone lie where the weights were. Of two moments of 9.5 MiB in a segment the second
    # has 1 MiB too much, and so have the gradients.
    assert count(DISTRIBUTED) == 2 * MIB
    # 40 MiB that the first step freed have room for both moments.
    assert count(WHOLE, make_chunk([(1, 40 * MIB)], [(1, -1)])) == 2 * MIB
    # Expandable segments are split however little is left.
    assert count(WHOLE, is_expandable=True) == count(DISTRIBUTED, is_expandable=True) == 0


def test_tensors_of_a_step_take_holes_that_are_too_large() -> None:
    """What is not split counts once for each micro batch in flight, and not at all where the peak is before it."""
    sizes = [(1, 4 * MIB), (2, 4 * MIB), (1, -1), (3, 3 * MIB), (4, 4 * MIB), (2, -1), (3, -1), (4, -1)]

    def count(*events: tuple[bool, int, int], before: tuple[tuple[int, int], ...] = ()) -> int:
        chunk = make_chunk([*before, *sizes[:5]], sizes[5:])
        return Step(CachingAllocator(), [chunk], events, {}, buckets=NO_STATES).count_rounding()

    # The third tensor takes the first one's place, 1 MiB of which is left: 12 MiB for 11.
    assert count((True, 0, 0), (False, 0, 0)) == MIB
    assert count((True, 0, 0), (True, 1, 0), (False, 0, 0), (False, 1, 0)) == 2 * MIB
    assert count((True, 0, 0), (False, 0, 0), (True, 1, 0), (False, 1, 0)) == MIB
    assert count((True, 0, 0), (False, 0, 0), before=((0, 40 * MIB), (0, -1))) == 0
    # What is in flight at the end has its backward then.
    assert count((True, 0, 0)) == MIB


def test_a_step_leaves_the_latest_input_of_each_chunk_its_gradient_and_workspaces() -> None:
    """An input of 5 MiB, its gradient, and 3 MiB in between; the first product of the layers comes behind the input."""
    forward = [(1, 5 * MIB), (-1, ENGINE_PRODUCT), (2, 3 * MIB)]
    chunk = make_chunk(forward, [(2, -1), (3, 5 * MIB)], input_bytes=5 * MIB, mask_bytes=2 * MIB)

    def play(step: Step) -> int:
        step.play()
        return step.highest

    both = [(True, 0, 0), (True, 1, 0), (False, 0, 0), (False, 1, 0)]
    allocator = CachingAllocator()
    step = Step(allocator, [chunk], both, {Library.ENGINE: [32 * MIB], Library.TORCH: [8 * MIB]}, buckets=NO_STATES)
    # Two inputs with 3 MiB each, the second one's mask, and the workspace; torch's is made behind the step.
    assert play(step) == (2 * (5 + 3) + 2 + 32) * MIB
    assert step.count_left() == (2 * 5 + 32 + 8) * MIB
    # The first new input takes the place of the last one and its gradient.
    assert play(step) == (2 * (5 + 3) + 2 + 32 + 8) * MIB
    assert step.count_left() == allocator.allocated == (2 * 5 + 32 + 8) * MIB
    # With one more in flight each backward but the last leaves them to the schedule until the next backward.
    ahead = [(True, 0, 0), (True, 1, 0), (False, 0, 0), (True, 2, 0), (False, 1, 0), (False, 2, 0)]
    more = Step(CachingAllocator(), [chunk], ahead, {}, buckets=NO_STATES)
    assert [play(more), more.count_left()] == [(4 * 5 + 2 * 3 + 2) * MIB, 2 * 5 * MIB]
    # Of one micro batch the highest moment is where it comes: beside what the last one left.
    alone = Step(CachingAllocator(), [chunk], both[::2], {}, buckets=NO_STATES)
    assert [play(alone), play(alone)] == [2 * 5 * MIB, (3 * 5 + 2) * MIB]


def test_deterministic_experts_keep_what_they_hand_back_and_local_routers_have_a_workspace() -> None:
    """Tokens are added up by index, which keeps them, unless a kernel does it; the router's product is Transformer
    Engine's also beside Megatron's own modules."""
    experts = Experts(num_experts=4, per_token=2, ffn_hidden_size=64, layers=(True, True), dispatcher="alltoall")
    sizes = {**SMALL, "seq_length": 64, "num_layers": 2}

    def count_kept(**settings: Any) -> int:
        of_experts = dataclasses.replace(experts, fuses_permutation=settings.pop("fuses_permutation", False))
        run = make_run(sizes, experts=of_experts, **settings)
        return simulate_chunk(run, range(2)).kept_bytes

    kept = count_kept(deterministic=False)
    assert count_kept() - kept == 2 * (2 * 4 * 64) * 512 * 2
    # The kernel keeps no probabilities to choose from, [tokens, experts] of each layer.
    assert count_kept(fuses_permutation=True) == kept - 2 * (4 * 64) * 4 * 2
    local = make_run(sizes, gpu="h100", stock="local")
    of_torch = list_workspaces(local, has_head=True)
    assert of_torch == {Library.TORCH: [32 * MIB], Library.TORCH_BACKWARD: [32 * MIB]}
    of_router = list_workspaces(dataclasses.replace(local, experts=experts), has_head=True)
    assert of_router == of_torch | {Library.ENGINE: [32 * MIB + 1024]}


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

    def simulate(*layers: bool) -> ChunkMemory:
        of_run = dataclasses.replace(run, float8_layers=(*layers, True))
        return simulate_chunk(of_run, range(2), pre_process=False, post_process=False)

    plain, both, mixed = simulate(False, False), simulate(True, True), simulate(False, True)
    assert plain.kept_bytes > both.kept_bytes and both.float8_weights > plain.float8_weights == 0
    assert (2 * mixed.kept_bytes, 2 * mixed.float8_weights) == (
        plain.kept_bytes + both.kept_bytes,
        both.float8_weights,
    )
    assert [each.float8_others for each in mixed.layer_parameters] == [0, mixed.float8_weights]


def test_experts_keep_their_inputs_in_float8() -> None:
    experts = Experts(num_experts=4, per_token=2, ffn_hidden_size=64, layers=(True,), grouped=True, imbalance=1.0)
    run = make_run({**SMALL, "seq_length": 64, "num_layers": 1}, experts=experts, gpu="h100", deterministic=False)
    kept = [
        simulate_chunk(dataclasses.replace(run, float8=recipe), range(1)).kept_bytes for recipe in (None, "tensorwise")
    ]
    tokens = 4 * 64
    # The router keeps what it shares with nothing; each token has two experts with inputs of h and 64.
    assert kept[0] - kept[1] == 512 * tokens + 2 * tokens * (512 + 64)


def test_layers_hold_rotary_tables_and_where_tokens_went_between_micro_batches() -> None:
    """As on the last stage of published runs: MiB of a Mixtral of 8 chunks, and of latent attention with experts."""
    sizes = {**SMALL, "seq_length": 4096, "num_layers": 16, "position_embedding_type": "rope", "kv_channels": 128}
    plain = make_run(sizes, micro_batch_size=1, pipeline_parallel=2, layers_per_virtual_stage=1)
    assert count_lasting_tensors(plain, 1) == 8 * 4096 * 128 * 4
    assert count_lasting_tensors(make_run(SMALL), 0) == 0
    experts = Experts(
        num_experts=32,
        per_token=4,
        ffn_hidden_size=64,
        layers=(False,) + (True,) * 15,
        dispatcher="alltoall",
        fuses_permutation=True,
        router_dtype=torch.float32,
    )
    run = dataclasses.replace(plain, experts=experts, layers_per_virtual_stage=None, mtp_num_layers=1)
    tokens = 4096
    # Probabilities in float32, a byte for each expert, and the kernel's map; eight layers, and that of a further token.
    routing = 9 * tokens * (32 * (4 + 1) + 4 * (2 * 32 + 1))
    assert count_lasting_tensors(run, 1) == routing + tokens * 128 * 4
    sorted_by_index = dataclasses.replace(experts, fuses_permutation=False, router_dtype=None)
    by_index = dataclasses.replace(run, experts=sorted_by_index, mtp_num_layers=0)
    assert count_lasting_tensors(by_index, 0) == 7 * tokens * (32 * 3 + 8 * 4) + tokens * 128 * 4
    gathered = dataclasses.replace(sorted_by_index, dispatcher="allgather", expert_parallel=4)
    of_all = dataclasses.replace(by_index, experts=gathered, data_parallel=4)
    assert count_lasting_tensors(of_all, 0) == 7 * tokens * (4 * 8 + 4 * (2 + 8)) + tokens * 128 * 4
    latent = dataclasses.replace(plain, latent_attention=_LATENT, layers_per_virtual_stage=None)
    assert count_lasting_tensors(latent, 1) == 8 * _LATENT.qk_pos_emb_head_dim * (4 + 2 * 2) * 4096


def _draw_imbalance(experts: Experts, vocab_size: int, num_layers: int, seed: int) -> float:
    """Of one random router for each layer, and tokens as frequent as Zipf's law says."""
    generator = torch.Generator().manual_seed(seed)
    shares = 1 / torch.arange(1, vocab_size + 1, dtype=torch.float64)
    shares /= shares.sum()
    load = torch.zeros(experts.expert_parallel, dtype=torch.float64)
    groups, of_group = experts.num_groups or 1, experts.num_experts // (experts.num_groups or 1)
    for _ in range(num_layers):
        scores = torch.rand(vocab_size, experts.num_experts, generator=generator)
        if experts.num_groups is not None:
            others = torch.rand(vocab_size, groups, generator=generator).argsort(1)[:, experts.group_topk or 1 :]
            scores.view(vocab_size, groups, of_group).scatter_(1, others[..., None].expand(-1, -1, of_group), -1.0)
        chosen = scores.topk(experts.per_token).indices // (experts.num_experts // experts.expert_parallel)
        load.index_add_(0, chosen.flatten(), shares.repeat_interleave(experts.per_token))
    return float(load.max() / load.mean())


@pytest.mark.parametrize(
    ("experts", "num_layers"),
    [
        (Experts(num_experts=8, per_token=2, ffn_hidden_size=1, layers=(True,), expert_parallel=4), 12),
        (Experts(num_experts=16, per_token=4, ffn_hidden_size=1, layers=(True,), expert_parallel=8, num_groups=4,
                 group_topk=2), 8),
    ],
)  # fmt: skip
def test_the_fullest_rank_gets_what_random_routers_give_it(experts: Experts, num_layers: int) -> None:
    drawn = [_draw_imbalance(experts, 2000, num_layers, seed) - 1 for seed in range(40)]
    # The loads of few layers are no normal variables: frequent tokens are few.
    assert expect_imbalance(experts, 2000, num_layers) - 1 == pytest.approx(sum(drawn) / len(drawn), rel=0.15)


def test_only_ranks_that_divide_experts_by_a_learned_router_can_be_fuller() -> None:
    experts = Experts(num_experts=8, per_token=2, ffn_hidden_size=64, layers=(True, True), expert_parallel=4)
    for even in ({"expert_parallel": 1}, {"routing": "sinkhorn"}):
        assert expect_imbalance(dataclasses.replace(experts, **even), 2000, 2) == 1
    assert expect_imbalance(experts, 2000, 2) > expect_imbalance(experts, 2000, 8) > 1
    run = make_run({**SMALL, "seq_length": 64, "num_layers": 2}, experts=experts, data_parallel=4)
    kept = []
    for factor in (1.0, None, 1.5):
        given = dataclasses.replace(run, experts=dataclasses.replace(experts, imbalance=factor))
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


def test_copies_and_moments_of_experts_lie_behind_those_of_all_else() -> None:
    """Whatever the order of the modules is, 1.5 MiB and then 2 MiB fill segments of 20 MiB, not both in turn."""
    others = [Parameter((3 * MIB // 8,), is_matrix=False)] * 13
    experts = [Parameter((MIB // 2,), is_matrix=False, is_expert=True)] * 10
    in_turn = [each for pair in zip(others, experts, strict=False) for each in pair] + others[10:]

    def count(parameters: list[Parameter]) -> int:
        return count_rounding(CachingAllocator(), [parameters], torch.bfloat16, [], WHOLE, parts=(1, 1))

    assert count(in_turn) == count([*others, *experts])
    assert count([dataclasses.replace(each, is_expert=False) for each in in_turn]) > count(in_turn)


def test_the_buffer_of_gradients_takes_no_block_of_another_stream() -> None:
    """Of two blocks of 10.5 MiB each a tensor of 9.5 MiB has 1 MiB too much; the buffer would have taken the first."""
    weight = [Parameter((19 * MIB // 8,), is_matrix=False)]
    assert count_rounding(CachingAllocator(), [weight], torch.bfloat16, [], WHOLE, parts=(1, 1)) == 2 * MIB


def test_a_rank_of_the_distributed_optimizer_has_its_part_of_each_bucket() -> None:
    """The buffer has the word embedding first; its end is rounded up to 128 elements, each beginning to 64."""
    vector, matrix, words = Parameter((100,), False), Parameter((64, 8), True), Parameter((96, 8), False)
    parameters = [vector, matrix, words]
    # 768, 512 and 100 elements, of which the last 704 are from the word embedding's end on.
    assert [*list_own_pieces(parameters, 2, DISTRIBUTED, False)] == [64, 512, 100]
    # 768, and 512 and 100 in 640.
    assert [*list_own_pieces(parameters, 2, DISTRIBUTED, True)] == [384, 192, 100]
    assert [*list_own_pieces(parameters, 1, DISTRIBUTED, True)] == [768, 512, 100]
    assert [*list_own_pieces(parameters, 1, WHOLE, True)] == [100, 512, 768]
    # A bucket ends with the parameter that fills it: 768 and 512 in 1,280, and 100 in 128; or each alone.
    assert [*list_own_pieces(parameters, 2, DISTRIBUTED, False, 1280)] == [128, 512, 36]
    assert [*list_own_pieces(parameters, 2, DISTRIBUTED, False, 512)] == [384, 256, 36]


def test_a_stage_keeps_the_last_input_of_each_chunk_and_its_gradient() -> None:
    def estimate(**settings: Any) -> tuple[RankEstimate, ...]:
        sizes = {**SMALL, "seq_length": 64, "hidden_size": 64}
        return estimate_ranks(make_run(sizes, pipeline_parallel=2, num_micro_batches=4, **settings))

    hidden = 64 * 4 * 64 * 2
    assert [rank.at_rest["stage inputs"] for rank in estimate()] == [0, 2 * hidden]
    chunks = [rank.at_rest["stage inputs"] for rank in estimate(layers_per_virtual_stage=2)]
    assert chunks == [2 * 2 * hidden, 3 * 2 * hidden]


def test_overlapped_layers_with_experts_keep_their_latest_input_and_its_gradient() -> None:
    """Of each layer with experts whose input is not a stage's own."""
    experts = Experts(
        num_experts=4, per_token=2, ffn_hidden_size=64, layers=(False, True, True, True), expert_parallel=2
    )
    sizes = {**SMALL, "seq_length": 64, "hidden_size": 64, "num_layers": 4, "add_bias_linear": False}
    hidden = 64 * 4 * 64 * 2

    def count(*, overlaps: bool = True, dispatcher: str = "alltoall", **settings: Any) -> list[int]:
        given = dataclasses.replace(experts, overlaps=overlaps, dispatcher=dispatcher)
        ranks = estimate_ranks(make_run(sizes, num_micro_batches=4, data_parallel=2, experts=given, **settings))
        return [rank.at_rest["stage inputs"] // hidden for rank in ranks]

    assert count() == [3 * 2]
    assert count(tensor_parallel=2, sequence_parallel=True) == [3]
    # A flexible dispatcher has probabilities without a graph.
    assert count(overlaps=False) == count(dispatcher="flex") == [0]
    assert count(pipeline_parallel=2, layers_per_virtual_stage=1) == [2, 2 * 2]


def test_fused_accumulation_keeps_a_gradient_of_each_shape_of_weights() -> None:
    sizes = {**SMALL, "seq_length": 64, "num_layers": 2}
    run = make_run(sizes, gpu="h100", pipeline_parallel=2, fuses_gradient_accumulation=True)
    first, last = (rank.at_rest["placeholder gradients"] for rank in estimate_ranks(run))
    of_layer = 2 * 512 * 512 * (3 + 1 + 4 + 4)
    assert (first, last) == (of_layer, of_layer + 2 * 512 * run.padded_vocab_size)
    (rank,) = estimate_ranks(dataclasses.replace(run, pipeline_parallel=1, fuses_gradient_accumulation=False))
    assert rank.at_rest["placeholder gradients"] == 0


def test_experts_gather_into_the_global_buffer_and_have_placeholder_gradients_of_their_own() -> None:
    """The gathered tokens stay in the buffer, and each shape of an expert's weights has one placeholder."""
    experts = Experts(
        num_experts=8, per_token=2, ffn_hidden_size=256, layers=(True, True), expert_parallel=4, grouped=True
    )
    sizes = {**SMALL, "seq_length": 64, "num_layers": 2, "add_bias_linear": False}
    run = make_run(sizes, gpu="h100", data_parallel=4, fuses_gradient_accumulation=True, experts=experts)
    (rank,) = estimate_ranks(run)
    assert rank.at_rest["global memory buffer"] == 4 * 4 * 64 * 512 * 2
    of_attention_and_head = 512 * (3 + 1) * 512 + 512 * run.padded_vocab_size
    assert rank.at_rest["placeholder gradients"] == 2 * (of_attention_and_head + 2 * 256 * 512)
    (rank,) = estimate_ranks(dataclasses.replace(run, experts=dataclasses.replace(experts, dispatcher="alltoall")))
    assert rank.at_rest["global memory buffer"] == 0


_TOKENS, _LAYERS = 4 * 64, 4
_EXPERTS = Experts(
    num_experts=8,
    per_token=2,
    ffn_hidden_size=256,
    layers=(False, True, True, True),
    expert_parallel=4,
    grouped=True,
    dispatcher="alltoall",
)
_LATENT = LatentAttention(
    q_lora_rank=96, kv_lora_rank=32, qk_head_dim=64, qk_pos_emb_head_dim=32, v_head_dim=48, fuses_rope=True
)
_MIXTURE = make_run(
    {**SMALL, "seq_length": 64, "num_layers": _LAYERS, "add_bias_linear": False, "activation": "swiglu"},
    experts=_EXPERTS,
    latent_attention=_LATENT,
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
        dataclasses.replace(_MIXTURE, tempo=TempoConfig(), latent_attention=None, mtp_num_layers=1),
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
        experts = dataclasses.replace(_EXPERTS, overlaps=overlaps)
        run = dataclasses.replace(_MIXTURE, experts=experts, optimizer=DISTRIBUTED, data_parallel=4, **settings)
        return estimate_ranks(run)[0].peak_bytes

    assert find_peak(True, num_micro_batches=1) == find_peak(False, num_micro_batches=1)
    assert find_peak(True, num_micro_batches=4) > find_peak(False, num_micro_batches=4)
    chunks: dict[str, Any] = {"pipeline_parallel": 2, "layers_per_virtual_stage": 1, "num_micro_batches": 4}
    kept = simulate_chunk(_MIXTURE, range(2, 3), pre_process=False, post_process=False).kept_bytes
    assert find_peak(True, **chunks) > find_peak(False, **chunks) + kept


MATRIX, SMALL_MATRIX, VECTOR = Parameter((64, 32), True), Parameter((32, 32), True), Parameter((64,), False)
EXPERT = Parameter((128, 32), True, True)


@pytest.mark.parametrize(
    ("muon", "ranks", "padding", "own"),
    [
        ("whole", 2, 0, [MATRIX, SMALL_MATRIX, VECTOR, EXPERT]),
        ("dealt", 1, 0, [MATRIX, SMALL_MATRIX, VECTOR, EXPERT]),
        # From the smallest on: the first rank's, the last's, the last's.
        ("dealt", 2, 0, [SMALL_MATRIX, MATRIX, EXPERT]),
        # The larger matrix is in the first shard, and the smaller one's is padded to it.
        ("laid out", 2, MATRIX.size - SMALL_MATRIX.size, [SMALL_MATRIX, Parameter((32,), False), EXPERT]),
    ],
)
def test_muon_has_one_moment_of_matrices_and_whole_parameters(
    muon: str, ranks: int, padding: int, own: list[Parameter]
) -> None:
    parameters = [VECTOR, MATRIX, SMALL_MATRIX, EXPERT]
    states, pieces = count_muon_states(parameters, torch.bfloat16, muon, ranks=ranks, expert_ranks=1)
    assert sorted(pieces) == sorted((each.size, 1 if each.is_matrix else 2) for each in own)
    assert states.optimizer_states == sum(4 * each.size * (2 if each.is_matrix else 3) for each in own)
    total = sum(each.size for each in parameters) + padding
    assert (states.weights, states.gradients_at_rest) == (2 * total, 4 * total)
    # The first of two ways to divide gathers flattened weights beside the model's.
    dense = [MATRIX, SMALL_MATRIX, VECTOR, SMALL_MATRIX, MATRIX]
    assert states.step_transient == (2 * sum(e.size for e in dense) if (muon, ranks) == ("dealt", 2) else 0)


def test_a_chunk_names_its_matrices_and_its_experts() -> None:
    experts = Experts(num_experts=4, per_token=2, ffn_hidden_size=96, layers=(True, True), expert_parallel=2)
    sizes = {**SMALL, "seq_length": 64, "num_layers": 2, "untie_embeddings_and_output_weights": True}
    found = simulate_chunk(make_run(sizes, experts=experts), range(2)).parameters
    assert sum(each.size for each in found if each.is_expert) == 2 * 2 * (2 * 96 * 512 + 96 + 512)
    per_layer = 3 * 512 * 512 + 512 * 512 + 4 * 512 + 2 * 2 * 96 * 512
    assert sum(each.size for each in found if each.is_matrix) == 64 * 512 + 2 * per_layer


@pytest.mark.parametrize(
    ("settings", "gradients", "states"),
    [
        ({}, 4, 12),
        # Converted to float32 for the step, of the rank's own part.
        ({"gradient_bytes": 2}, 2 + 4 / 4, 12),
        ({"gradient_bytes": 2, "state_bytes": (2, 1, 2)}, 2, 5),
    ],
)
def test_gradients_and_states_have_dtypes(settings: dict[str, Any], gradients: float, states: int) -> None:
    optimizer = OptimizerSettings(**settings)
    (rank,) = estimate_ranks(make_run({**SMALL, "seq_length": 64}, data_parallel=4, optimizer=optimizer, gpu="h100"))
    assert rank.at_rest["gradients"] == gradients * rank.num_parameters
    assert rank.at_rest["optimizer states"] == states * rank.num_parameters / 4


@pytest.mark.parametrize(("limit", "waiting"), [(None, 0), (2, 2), (0, 3)])
def test_gradients_of_the_output_layer_wait_on_the_last_stage(limit: int | None, waiting: int) -> None:
    sizes = {**SMALL, "seq_length": 64, "num_layers": 2}
    settings: dict[str, Any] = {"pipeline_parallel": 2, "num_micro_batches": 4, "deferred_head_gradients": limit}
    run = make_run(sizes, fuses_gradient_accumulation=True, **settings)
    first, last = (rank.parts["deferred gradients"] for rank in estimate_ranks(run))
    assert (first, last) == (0, waiting * 2 * 4 * 64 * (run.padded_vocab_size + 512))


def test_float16_gradients_are_there_a_second_time_until_the_next_step() -> None:
    for optimizer, parts in ((WHOLE, 1), (DISTRIBUTED, 4)):
        run = make_run({**SMALL, "seq_length": 64}, dtype=torch.float16, data_parallel=4, optimizer=optimizer)
        (rank,) = estimate_ranks(run)
        assert rank.at_rest["gradients"] == 2 * rank.num_parameters + -(-4 * rank.num_parameters // parts)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"gpu": "a100"}, "flash"),
        ({"gpu": "h100"}, "fused"),
        ({"gpu": "gb200"}, "flash"),
        ({"gpu": "gb200", "deterministic": False}, "fused"),
        ({"gpu": None}, "fused"),
        ({"gpu": "a100", "stock_attention": "unfused"}, "unfused"),
    ],
)
def test_transformer_engine_chooses_an_attention_by_gpu(settings: dict[str, Any], expected: str) -> None:
    assert choose_attention(make_run(SMALL, **settings)) == expected


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
        run = make_run(SMALL, gpu=None, pipeline_parallel=3, recompute=recompute, data_has_masks=has_masks)
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

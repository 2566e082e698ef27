"""What stands on a rank from step to step, how torch's allocator rounds it, and a step's place in that."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from made_chunks import make_chunk
from runs import DISTRIBUTED, SMALL, WHOLE, make_run

from tempo_megatron import TempoConfig
from tempo_megatron.memory.rank.allocator import CachingAllocator
from tempo_megatron.memory.rank.estimate import RankEstimate, estimate_ranks
from tempo_megatron.memory.rank.libraries import ENGINE, TORCH
from tempo_megatron.memory.rank.megatron_fsdp import ShardedChunk
from tempo_megatron.memory.rank.play import Counters, Step, play_rank
from tempo_megatron.memory.rank.standing import Born, Standing, list_megatrons, list_muons, list_own_pieces
from tempo_megatron.memory.rank.zero import ZeroBuckets, list_zeros
from tempo_megatron.memory.run import MegatronFsdp, OptimizerSettings, Run
from tempo_megatron.memory.simulated.chunk import simulate_chunk
from tempo_megatron.memory.simulated.chunk_memory import LAYERS, Parameter
from tempo_megatron.memory.tape.tape import ENGINE_PRODUCT, Event
from tempo_megatron.models.shape import make_shape

MIB = 1 << 20
EVENTS = [(True, 0, 0), (False, 0, 0)]


def stand(parameters: list[Parameter], dtype: torch.dtype, optimizer: OptimizerSettings, ranks: int) -> Standing:
    model = make_shape(num_layers=1, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=99)
    run = Run(model=model, tempo=TempoConfig.off(), dtype=dtype, optimizer=optimizer)
    return list_megatrons(run, [make_chunk([], parameters=tuple(parameters))], (ranks, ranks))


def stand_under_zero(stage: int, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Standing:
    optimizer = OptimizerSettings(kind="deepspeed", zero_stage=stage, **settings)
    return list_zeros([3000, 5000], dtype, optimizer, ranks=8, accumulates=True)


def test_states_are_divided_as_their_owner_does() -> None:
    def count(dtype: torch.dtype = torch.bfloat16, *, distributed: bool = True) -> int:
        # Of eight equal parts of 8,192 elements, so that nothing is padded.
        standing = stand([Parameter((8192,), False)], dtype, OptimizerSettings(distributed=distributed), 8)
        return sum(standing.sum_parts(Born.SETUP, Born.FIRST_STEP).values())

    assert count() == 8192 * (2 + 4) + 1024 * 12
    assert count(distributed=False) == 8192 * 18
    assert count(torch.float32) == 8192 * 8 + 1024 * 8

    def count_zero_bytes(stage: int, dtype: torch.dtype) -> int:
        return sum(tensor.num_bytes for tensor in stand_under_zero(stage, dtype, reduce_bucket_elements=0).tensors)

    found = [count_zero_bytes(stage, torch.bfloat16) for stage in range(4)]
    assert found == [8000 * 16, 8000 * 4 + 1000 * 12, 8000 * 2 + 1000 * 14, 1000 * 16]
    # ZeRO clones float32 weights as well; ZeRO 1 accumulates in the JSON's dtype.
    found = [count_zero_bytes(stage, torch.float32) for stage in range(4)]
    assert found == [8000 * 16, 8000 * 8 + 1000 * 12, 8000 * 4 + 1000 * 16, 1000 * 20]
    settings = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 50}, "data_types": {"grad_accum_dtype": "fp32"}}
    accumulates = OptimizerSettings.from_deepspeed(settings)
    states = list_zeros([8000], torch.float16, accumulates, accumulates=True)
    assert (states.step_gradients, get_buckets(states).bucket) == (8000 * 4, 50 * 4) and get_buckets(states).stays
    # In bf16 that is its BF16_Optimizer, without a bucket.
    states = list_zeros([8000], torch.bfloat16, accumulates, accumulates=True)
    assert states.step_gradients == 8000 * 6 and not isinstance(states.buckets, ZeroBuckets)


def get_buckets(standing: Standing) -> ZeroBuckets:
    assert isinstance(standing.buckets, ZeroBuckets)
    return standing.buckets


def test_zero_3_has_gradients_where_it_has_states_and_weights_as_far_as_they_are_needed() -> None:
    on_device, offloaded = (stand_under_zero(3, offloads=offloads) for offloads in (False, True))
    parts = on_device.sum_parts(*Born)
    assert (parts["gradients"], on_device.step_gradients) == (2000, 2000)
    assert offloaded.sum_parts(*Born) == parts | {"gradients": 0, "optimizer states": 0}
    assert (offloaded.step_gradients, on_device.reduction - offloaded.reduction) == (0, 2000)
    zero = {"stage": 3, "stage3_max_live_parameters": 3000, "offload_param": {"device": "cpu"}}
    optimizer = OptimizerSettings.from_deepspeed({"zero_optimization": zero})
    for largest, live in ((1000, 3000), (5000, 5000)):
        states = list_zeros([8000], torch.bfloat16, optimizer, largest=largest, accumulates=True)
        assert (states.sum_parts(*Born)["weights"], get_buckets(states).bucket) == (0, 2 * live)


def test_a_full_bucket_of_zero_2_is_copied_beside_the_gradient_for_which_it_has_no_room() -> None:
    optimizer = OptimizerSettings(kind="deepspeed", zero_stage=2, reduce_bucket_elements=6000)
    buckets = get_buckets(list_zeros([3000, 5000], torch.bfloat16, optimizer, largest=5000, accumulates=True))
    assert (buckets.num_elements, buckets.flush) == (6000, 2 * (6000 + 5000))


def test_megatron_fsdp_shards_all_gathers_ahead_and_reduces_at_the_end_of_backward() -> None:
    layers, ranks = 4, 4
    run = make_run({**SMALL, "num_layers": layers}, dp=ranks, num_micro_batches=2)

    def shard(**settings: Any) -> tuple[ShardedChunk, RankEstimate]:
        fsdp = MegatronFsdp(main_bytes=4, **settings)
        (rank,) = estimate_ranks(dataclasses.replace(run, optimizer=OptimizerSettings(fsdp=fsdp)))
        memory = simulate_chunk(run, range(layers), has_gradients=True)
        return ShardedChunk(fsdp, memory, torch.bfloat16, has_float8=False, ranks=ranks, expert_ranks=ranks), rank

    chunk, rank = shard()
    h = SMALL["hidden_size"]
    layer, outside = 12 * h * h + 13 * h, (50257 + 47) * h + SMALL["seq_length"] * h + 2 * h
    assert rank.num_parameters == layers * layer + outside
    own = rank.num_parameters // ranks
    # Gradients in bf16, and the optimizer's copies in float32.
    states = {"weights": 2 * own, "gradients": 6 * own, "optimizer states": 12 * own}
    assert {name: size for name, size in rank.at_rest.items() if size} == states | {
        "communication buffers": 2 * outside
    }
    # Where they are freed between steps they are there at the peak still.
    _, releasing = shard(keeps_outer_weights=False)
    assert releasing.at_rest == rank.at_rest | {"communication buffers": 0}
    assert releasing.peak_bytes == rank.peak_bytes

    def list_buckets(chunk: ShardedChunk, *, in_backward: bool) -> list[int]:
        segments = chunk.memory.backward if in_backward else chunk.memory.forward
        return [sum(chunk.list_held(each).values()) for each in segments if each.part == LAYERS]

    assert list_buckets(chunk, in_backward=False) == [2 * layer * number for number in (4, 3, 2, 1)]
    # Weights of the layers that are left, and gradients of those that are done, the same layer among both, and the
    # final norm's.
    assert list_buckets(chunk, in_backward=True) == [2 * layer * (layers + 1) + 4 * h] * layers
    # Two layers' gradients may wait while a third's are made, and one layer is gathered ahead.
    narrow, _ = shard(unit_elements=2 * layer, gradient_bytes=4)
    assert list_buckets(narrow, in_backward=False) == [2 * layer * number for number in (2, 2, 2, 1)]
    gradients = [4 * layer * number + 8 * h for number in (1, 2, 3, 3)]
    gathered = [2 * layer * number for number in (2, 2, 2, 1)]
    assert list_buckets(narrow, in_backward=True) == [a + b for a, b in zip(gathered, gradients, strict=True)]


def test_a_unit_of_megatron_fsdp_takes_the_hole_of_the_gathered_one_before_it() -> None:
    """2 MiB, 4 gathered and 4 MiB in float32, of which the gathered ones leave a hole for the next unit's 3.25."""
    memory = make_chunk([], parameters=(Parameter((2 * MIB,), False), Parameter((13 * MIB // 4,), False, owner=0)))

    def count(ranks: int, *, is_expandable: bool = False) -> int:
        standing = ShardedChunk(MegatronFsdp(main_bytes=4), memory, torch.bfloat16, False, ranks, ranks).stand()
        tensors = tuple(each for each in standing.tensors if each.is_in_buffers)
        step = Step(CachingAllocator(is_expandable=is_expandable), [memory], [], {})
        return play_rank(step, Standing(tensors=tensors), num_steps=1).rounding_at_rest

    assert count(2) == 3 * MIB // 4
    # One rank gathers nothing: 4, 8, 6.5 and, in a segment of their own, 13 MiB in 14; gradients of 10.5 in 12.
    assert count(1) == MIB
    assert count(2, is_expandable=True) == 0


def play(
    parameters: list[Parameter],
    optimizer: OptimizerSettings = WHOLE,
    *events: list[Event],
    schedule: list[tuple[bool, int, int]] = EVENTS,
    is_expandable: bool = False,
    num_steps: int = 1,
) -> Counters:
    chunk = make_chunk(*(events or [[]]), parameters=tuple(parameters))
    standing = stand(parameters, torch.bfloat16, optimizer, 2 if optimizer.distributed else 1)
    step = Step(CachingAllocator(is_expandable=is_expandable), [chunk], schedule, {})
    return play_rank(step, standing, num_steps=num_steps)


def test_blocks_that_are_not_split_count_whole() -> None:
    """Less than 1 MiB that is left of a segment counts with the tensor in it."""
    large = [Parameter((19 * MIB // 4,), is_matrix=False)]
    # In bf16 9.5 MiB, in a segment of 20 MiB that is split; gradients, copy and two moments of 19 MiB in 20 MiB each.
    assert play(large).rounding_at_rest == 4 * MIB
    # The copy of 9.5 MiB and its clone lie where the weights were. Of two moments of 9.5 MiB in a segment the second
    # has 1 MiB too much, and so have the gradients.
    assert play(large, DISTRIBUTED).rounding_at_rest == 2 * MIB
    # 40 MiB that the first step freed have room for both moments.
    assert play(large, WHOLE, [(1, 40 * MIB)], [(1, -1)]).rounding_at_rest == 2 * MIB
    # Expandable segments are split however little is left.
    assert all(play(large, each, is_expandable=True).rounding_at_rest == 0 for each in (WHOLE, DISTRIBUTED))
    # The buffer of gradients takes no block of another stream: of two blocks of 10.5 MiB each a tensor of 9.5 MiB has
    # 1 MiB too much; the buffer would have taken the first.
    assert play([Parameter((19 * MIB // 8,), is_matrix=False)]).rounding_at_rest == 2 * MIB


def test_copies_and_moments_of_experts_lie_behind_those_of_all_else() -> None:
    """Whatever the order of the modules is, 1.5 MiB and then 2 MiB fill segments of 20 MiB, not both in turn."""
    others = [Parameter((3 * MIB // 8,), is_matrix=False)] * 13
    experts = [Parameter((MIB // 2,), is_matrix=False, is_expert=True)] * 10
    in_turn = [each for pair in zip(others, experts, strict=False) for each in pair] + others[10:]
    found = play(in_turn).rounding_at_rest
    assert found == play([*others, *experts]).rounding_at_rest
    assert play([dataclasses.replace(each, is_expert=False) for each in in_turn]).rounding_at_rest > found


def test_tensors_of_a_step_take_holes_that_are_too_large() -> None:
    """What is not split counts once for each micro batch in flight, and not at all where the peak is before it."""
    sizes = [(1, 4 * MIB), (2, 4 * MIB), (1, -1), (3, 3 * MIB), (4, 4 * MIB), (2, -1), (3, -1), (4, -1)]

    def count(*schedule: tuple[bool, int, int], before: tuple[tuple[int, int], ...] = ()) -> int:
        return play([], WHOLE, [*before, *sizes[:5]], sizes[5:], schedule=[*schedule]).rounding

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

    def play_step(step: Step) -> int:
        step.play()
        return step.highest

    both = [(True, 0, 0), (True, 1, 0), (False, 0, 0), (False, 1, 0)]
    step = Step(CachingAllocator(), [chunk], both, {ENGINE: [32 * MIB], TORCH: [8 * MIB]})
    # Two inputs with 3 MiB each, the second one's mask, and the workspace; torch's is made behind the step.
    assert play_step(step) == (2 * (5 + 3) + 2 + 32) * MIB
    assert step.allocator.requested == (2 * 5 + 32 + 8) * MIB
    # The first new input takes the place of the last one and its gradient.
    assert play_step(step) == (2 * (5 + 3) + 2 + 32 + 8) * MIB
    assert step.allocator.requested == step.allocator.allocated == (2 * 5 + 32 + 8) * MIB
    # With one more in flight each backward but the last leaves them to the schedule until the next backward.
    ahead = [(True, 0, 0), (True, 1, 0), (False, 0, 0), (True, 2, 0), (False, 1, 0), (False, 2, 0)]
    more = Step(CachingAllocator(), [chunk], ahead, {})
    assert [play_step(more), more.allocator.requested] == [(4 * 5 + 2 * 3 + 2) * MIB, 2 * 5 * MIB]
    # Of one micro batch the highest moment is where it comes: what the last one left is there still.
    alone = Step(CachingAllocator(), [chunk], both[::2], {})
    assert [play_step(alone), play_step(alone)] == [2 * 5 * MIB, (3 * 5 + 2) * MIB]


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
    pieces, padded, transient = list_muons([VECTOR, MATRIX, SMALL_MATRIX, EXPERT], muon, (ranks, 1), 2)
    assert sorted(pieces) == sorted((each.size, 1 if each.is_matrix else 2) for each in own)
    # The first of two ways to divide gathers flattened weights while the model's are there.
    dense = [MATRIX, SMALL_MATRIX, VECTOR, SMALL_MATRIX, MATRIX]
    assert transient == (2 * sum(e.size for e in dense) if (muon, ranks) == ("dealt", 2) else 0)
    assert padded == padding


@pytest.mark.parametrize(
    ("settings", "dtype", "gradients", "states"),
    [
        ({}, torch.bfloat16, 4, 12),
        # Converted to float32 for the step, of the rank's own part, and there until the next step.
        ({"gradient_bytes": 2}, torch.bfloat16, 2 + 4 / 4, 12),
        ({"gradient_bytes": 2, "state_bytes": (2, 1, 2)}, torch.bfloat16, 2, 5),
        ({"distributed": False}, torch.float16, 2 + 4, 12 * 4),
    ],
)
def test_gradients_and_states_have_dtypes(
    settings: dict[str, Any], dtype: torch.dtype, gradients: float, states: int
) -> None:
    optimizer = OptimizerSettings(**settings)
    (rank,) = estimate_ranks(make_run({**SMALL, "seq_length": 64}, dtype=dtype, dp=4, optimizer=optimizer))
    assert rank.at_rest["gradients"] == pytest.approx(gradients * rank.num_parameters, rel=1e-4)
    assert rank.at_rest["optimizer states"] == pytest.approx(states * rank.num_parameters / 4, rel=1e-4)

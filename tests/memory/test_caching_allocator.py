"""The rules of torch's caching allocator, as its source and its documentation of memory management state them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from made_chunks import make_chunk
from runs import build_run

from tempo_megatron import TempoConfig
from tempo_megatron.memory.rank import allocator as caching_allocator
from tempo_megatron.memory.rank.allocator import Block, CachingAllocator
from tempo_megatron.memory.rank.estimate import estimate_ranks
from tempo_megatron.memory.rank.play import Step, play_rank
from tempo_megatron.memory.rank.standing import Born, Standing, Tensor
from tempo_megatron.memory.run import MegatronFsdp, OptimizerSettings
from tempo_megatron.models.shape import make_shape

MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "freed", "size", "allocated", "reserved"),
    [
        ([], "", 0, 0, 0),
        ([], "", 1, 512, 2 * MIB),
        ([], "", 512, 512, 2 * MIB),
        ([], "", 513, 1024, 2 * MIB),
        ([], "", MIB, MIB, 2 * MIB),
        ([], "", MIB + 1, MIB + 512, 20 * MIB),
        ([], "", 10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        ([], "", 10 * MIB, 10 * MIB, 10 * MIB),
        ([], "", 11 * MIB, 12 * MIB, 12 * MIB),  # of a large segment 1 MiB is not split off
        ([12 * MIB], "0", MIB, MIB, 14 * MIB),  # small and large blocks share no segment
        ([5 * MIB] * 4, "021", 15 * MIB, 20 * MIB, 20 * MIB),  # a freed block joins its neighbours
        ([5 * MIB] * 4, "02", 9 * MIB, 19 * MIB, 40 * MIB),  # one between others is a hole that nothing larger fits
        ([40 * MIB, 30 * MIB], "01", 29 * MIB, 30 * MIB, 70 * MIB),  # the smallest that is large enough is taken, whole
    ],
)
def test_an_allocation_takes_a_free_block_or_a_segment(
    sizes: list[int], freed: str, size: int, allocated: int, reserved: int
) -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(each) for each in sizes]
    for place in freed:
        allocator.free(blocks[int(place)])
    allocator.allocate(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_what_is_freed_comes_back_whole() -> None:
    """Whatever the order: in the end each pool is whole segments again, and the bytes in use are never overlapping.

    Where small blocks lie nowhere, as much is in use.
    """
    whole, light, generator = CachingAllocator(), CachingAllocator(counts_reserved=False), random.Random(5)
    blocks: list[tuple[Block, Block]] = []
    for _ in range(3000):
        if blocks and generator.random() < 0.5:
            of_whole, of_light = blocks.pop(generator.randrange(len(blocks)))
            whole.free(of_whole)
            light.free(of_light)
        else:
            size = int(2 ** generator.uniform(0, 26))
            blocks.append((whole.allocate(size), light.allocate(size)))
        used = sorted((b.address, b.address + b.size) for b, _ in blocks if b.address is not None)
        assert all(end <= start for (_, end), (start, _) in zip(used, used[1:], strict=False))
        assert whole.allocated == sum(end - start for start, end in used) <= whole.reserved
        assert (light.allocated, light.peak_allocated) == (whole.allocated, whole.peak_allocated)
    assert whole.reserved > light.reserved > 0
    for block, _ in blocks:
        whole.free(block)
    free = [size for pool in whole._free for size, *_ in pool]
    assert whole.allocated == 0 and sum(free) == whole.reserved
    assert all(size % (2 * MIB) == 0 for size in free)


def test_expandable_segments_are_split_however_little_is_left() -> None:
    allocator = CachingAllocator(is_expandable=True)
    allocator.allocate(11 * MIB)
    assert allocator.allocated == 11 * MIB


OFF, AUTO, OFFLOAD = TempoConfig.off(), TempoConfig(), TempoConfig(offload="all")


@pytest.mark.parametrize(
    ("tempo_config", "optimizer", "stages"),
    [
        (OFF, {"kind": "none"}, 1),
        (AUTO, {"kind": "megatron"}, 1),
        (OFFLOAD, {"kind": "megatron"}, 3),
        (OFF, {"fsdp": MegatronFsdp(main_bytes=4)}, 1),
        (AUTO, {"fsdp": MegatronFsdp(main_bytes=4, unit_elements=1 << 20, keeps_outer_weights=False)}, 1),
        *((tempo, {"kind": "deepspeed", "zero_stage": n}, 1) for n, tempo in enumerate((OFF, AUTO, OFFLOAD, OFF))),
        (AUTO, {"kind": "deepspeed"}, 2),
    ],
)
def test_without_rounding_the_allocator_has_the_estimates_peak(
    tempo_config: TempoConfig, optimizer: dict[str, Any], stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer's allocations in their order, beside the phases of the layers that stand for all."""
    # Every block is split, however little is left.
    monkeypatch.setattr(caching_allocator, "ROUNDING_BYTES", 1)
    monkeypatch.setattr(caching_allocator, "SMALL_BYTES", 0)
    shape = make_shape(num_layers=6, hidden_size=256, num_attention_heads=4, seq_length=512, vocab_size=4000)
    run = build_run(
        model=shape,
        tempo=tempo_config,
        optimizer=OptimizerSettings(**optimizer, reduce_bucket_elements=1 << 20),
        micro_batch_size=2,
        num_micro_batches=1 if optimizer.get("kind") == "none" else 2 * stages,
        dp=2,
        pp=stages,
    )
    ranks = estimate_ranks(run, simulates_allocator=True)
    assert len(ranks) == stages
    for rank in ranks:
        assert rank.rounded_bytes is not None and rank.reserved_bytes is not None
        assert abs(rank.rounded_bytes - rank.peak_bytes) <= 16
        # Megatron's buffers have a segment of their own.
        assert rank.rounded_bytes <= rank.reserved_bytes < 1.5 * rank.peak_bytes + 20 * MIB


def test_reserved_bytes_are_those_of_both_streams_and_of_the_second_step() -> None:
    """A hole on one stream is no room for the other's; what the first step leaves, the second one finds."""
    chunk = make_chunk([(1, 30 * MIB)], [(1, -1)])
    step = Step(CachingAllocator(), [chunk], [(True, 0, 0), (False, 0, 0)], {})
    tensors = Tensor("weights", 50 * MIB, Born.PASSING), Tensor("weights", 16 * MIB, is_in_buffers=True)
    standing = Standing(tensors=tensors, step_gradients=36 * MIB, step_transient=10 * MIB)
    counters = play_rank(step, standing, num_steps=2)
    # A segment of 50 MiB has the micro batch, and then the step's 36 and 10; at its peak that is 46.
    assert (counters.rounded, counters.reserved) == ((46 + 16) * MIB, (50 + 16) * MIB)

"""What stands on a rank from step to step: weights, gradients and states as their owner divides them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from made_chunks import make_chunk
from runs import SMALL, make_run

from tempo_megatron import TempoConfig
from tempo_megatron.memory.rank.estimate import estimate_ranks
from tempo_megatron.memory.rank.standing import Born, Standing, list_megatrons
from tempo_megatron.memory.rank.zero import ZeroBuckets, list_zeros
from tempo_megatron.memory.run import OptimizerSettings, Run
from tempo_megatron.memory.simulated.chunk_memory import Parameter
from tempo_megatron.models.shape import make_shape


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

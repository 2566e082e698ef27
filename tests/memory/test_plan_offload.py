"""Plans that send rows to the host: they are not slower than those that do not, and the estimate agrees with them."""

from __future__ import annotations

import argparse
import dataclasses

import pytest
from covering import exhaustive

from tempo_megatron.memory.commands.arguments import add_plan_arguments
from tempo_megatron.memory.commands.plan import read_request
from tempo_megatron.memory.plan.choices import LayerOptions, choose_rows_to_move, count_window_bytes
from tempo_megatron.memory.plan.gpu import read_gpu
from tempo_megatron.memory.plan.planner import Planner, PlanRequest
from tempo_megatron.memory.rank.estimate import estimate_ranks
from tempo_megatron.memory.rank.offload import list_moved_of_layers
from tempo_megatron.settings.config import TempoConfig

MODEL = "configs/model/llama3.2_1b.json"


def read(*words: str) -> PlanRequest:
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    args = parser.parse_args([f"--model={MODEL}", "--gpu-memory=80GB", *words])
    return read_request(args, read_gpu("h100"))[0]


@pytest.mark.parametrize(
    "layout", [["--pp=4", "--num-micro-batches=3", "--seq-length=32768"], *exhaustive([["--seq-length=8192"]])]
)
def test_with_the_host_a_plan_is_never_slower_and_mostly_faster_and_copies_fit_their_windows(layout: list[str]) -> None:
    words = [*layout, "--fixed-memory=10GB"]
    without = Planner(read(*words), tolerance=0.0)
    request = read(*words, "--host-memory=1TiB", "--gpus-per-node=8")
    planner = Planner(request, tolerance=0.0)
    options = LayerOptions(request.run, request.gpu)
    window = count_window_bytes(request.gpu, options.seconds(options.flops.total))
    least, most = without.make_smallest().peak_bytes, without.plan(10**14).peak_bytes
    num_faster = 0
    for part in range(2):
        budget = least + (most - least) * part // 2
        plan, other = planner.plan(budget), without.plan(budget)
        assert plan.seconds <= other.seconds and plan.peak_bytes <= budget
        num_faster += plan.seconds < 0.999 * other.seconds
        assert plan.tempo.layers == TempoConfig.from_dict(plan.block).layers
        assert 0 < plan.host_bytes <= request.host_bytes or plan.seconds == other.seconds
        for stage in plan.stages:
            assert stage.choices[-1].offload == "off"
            assert stage.moved_bytes <= window * (len(stage.choices) - 1)
    assert num_faster


def test_the_estimate_of_a_plan_is_what_the_plan_says_and_that_of_its_block() -> None:
    words = "--seq-length=32768 --host-memory=1TiB --tp=2 --sequence-parallel --recompute-allowed"
    request, budget = read(*words.split()), 15 * 2**30
    plan = Planner(request).plan(budget)
    run = dataclasses.replace(request.run, tempo=plan.tempo)
    (rank,) = estimate_ranks(run)
    stage = plan.stages[0]
    assert stage.moved_bytes > 0 and rank.peak_bytes == stage.peak_bytes <= budget
    assert rank.host_bytes == stage.host_bytes == sum(map(sum, list_moved_of_layers(run, range(16))))


def test_rows_are_the_largest_sets_that_fit_the_window() -> None:
    rows = {"mlp": 8, "input_layernorm": 2, "self_attention": 3, "input": 0}
    found = choose_rows_to_move(rows, 12)
    assert found == {"self_attention": 3, "input_layernorm+self_attention": 5, "self_attention+mlp": 11}
    assert choose_rows_to_move(rows, 13)["all"] == 13 and choose_rows_to_move(rows, 1) == {}
    gpu = read_gpu("gb200")
    assert count_window_bytes(gpu, 1.0) == 225 * 10**9


def test_without_a_link_to_the_host_nothing_is_sent() -> None:
    gpu = dataclasses.replace(read_gpu("h100"), host_link=None)
    with pytest.raises(ValueError, match="has no host_link, the rates to the host's memory"):
        count_window_bytes(gpu, 1.0)

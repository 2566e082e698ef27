"""Plans that send rows to the host: they dominate those that do not, the estimate agrees with them, and so does a
simulation that follows every copy."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch

from tempo_megatron.cli import main
from tempo_megatron.memory.commands.arguments import add_plan_arguments
from tempo_megatron.memory.commands.plan import read_request
from tempo_megatron.memory.estimate.estimate import estimate_ranks
from tempo_megatron.memory.estimate.offload import list_moved_of_layers
from tempo_megatron.memory.plan.cost import choose_rows_to_move, count_window_bytes
from tempo_megatron.memory.plan.gpu import HostLink, read_gpu
from tempo_megatron.memory.plan.planner import Planner, PlanProblem
from tempo_megatron.memory.plan.solver import BareStage, LayerOption, count_peak
from tempo_megatron.memory.plan.step_simulation import SimulatedLayer, simulate_stage, simulate_step
from tempo_megatron.memory.plan.verify import make_problem, plan_memory
from tempo_megatron.settings.config import TempoConfig

MODEL = "configs/model/llama3.2_1b.json"
LINK = HostLink(title="", to_host_bytes_per_second=8.0, to_gpu_bytes_per_second=4.0, gpus_per_uplink=2, source="")


def read_problem(*words: str) -> PlanProblem:
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    args = parser.parse_args([f"--model={MODEL}", "--gpu-memory=80GB", "--fixed-memory=10GB", *words])
    return make_problem(read_request(args, read_gpu("h100"))[0])[0]


@pytest.mark.parametrize("layout", [["--seq-length=8192"], ["--pp=4", "--num-micro-batches=3", "--seq-length=32768"]])
def test_with_the_host_a_plan_is_never_slower_and_mostly_faster_and_the_simulation_never_waits(
    layout: list[str],
) -> None:
    alone, problem = read_problem(*layout), read_problem(*layout, "--host-memory=1TiB", "--gpus-per-node=8")
    without, planner = Planner(alone), Planner(problem)
    least, most = without.find_smallest().peak_bytes, without.find(10**14)
    assert most is not None and planner.find_smallest().peak_bytes < least
    num_faster = 0
    for part in range(3):
        budget = least + (most.peak_bytes - least) * part // 3
        plan, other = planner.find(budget), without.find(budget)
        assert plan is not None and other is not None and plan.seconds <= other.seconds
        num_faster += plan.seconds < 0.999 * other.seconds
        assert plan.tempo.layers == TempoConfig.from_dict(plan.block).layers and plan.host_bytes <= problem.host_bytes
        for number, stage in enumerate(plan.stages):
            assert stage.choices[-1].offload == "off"
            step = simulate_stage(problem, number, stage)
            num_micro_batches = problem.run.num_micro_batches or 1
            assert step.waiting_seconds == 0 and step.host_bytes == stage.host_bytes
            # Products of the loss head and the weights' bytes are not those of a layer.
            assert stage.added_seconds < step.seconds / num_micro_batches < stage.seconds
            assert step.device_bytes <= stage.peak_bytes - 10**10
    assert num_faster
    slow = dataclasses.replace(problem.gpu.host_link or LINK, gpus_per_uplink=4)
    slower = dataclasses.replace(problem, gpu=dataclasses.replace(problem.gpu, host_link=slow))
    plan = planner.find(least)
    assert plan is not None and simulate_stage(slower, 0, plan.stages[0]).waiting_seconds > 0


def test_the_estimate_of_a_plan_is_what_the_plan_says_and_that_of_its_block() -> None:
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    args = parser.parse_args(
        f"--model={MODEL} --gpu-memory=15GiB --seq-length=32768 --host-memory=1TiB --tp=2 --sequence-parallel "
        "--recompute-allowed".split()
    )
    request, _ = read_request(args, read_gpu("h100"))
    plan, _ = plan_memory(request, args.gpu_memory)
    run = dataclasses.replace(request.run, tempo=plan.tempo)
    (rank,) = estimate_ranks(run)
    stage = plan.stages[0]
    assert stage.moved_bytes > 0 and rank.peak_bytes == stage.peak_bytes <= args.gpu_memory
    assert rank.host_bytes == stage.host_bytes == sum(map(sum, list_moved_of_layers(run, range(16))))


def test_copies_within_their_windows_never_let_anyone_wait_and_a_step_holds_what_the_solver_says() -> None:
    num_waiting = 0
    for seed in range(60):
        draw = random.Random(seed)
        num_layers, num_gpus, m = draw.randint(2, 6), draw.randint(1, 4), draw.randint(1, 3)
        # Of each copy to the host half of the link is its own: 4 bytes a second, and 2 back.
        most = draw.choice((4, 8))
        layers = [
            SimulatedLayer(1.0, 2.0 + draw.random(), draw.randint(0, 9), draw.randint(0, most), draw.randint(0, 5))
            for _ in range(num_layers - 1)
        ]
        layers.append(SimulatedLayer(1.0, 2.0, 3))
        events = [(True, n) for n in range(m)] + [(False, n) for n in range(m)]
        step = simulate_step(layers, LINK, events, num_gpus=num_gpus)
        seconds = m * sum(layer.forward_seconds + layer.backward_seconds for layer in layers)
        assert step.seconds == pytest.approx(seconds + step.waiting_seconds)
        moved = [layer.moved_bytes for layer in layers]
        assert step.host_bytes == m * sum(moved)
        if most == 4:
            assert step.waiting_seconds == 0
        num_waiting += step.waiting_seconds > 0
        options = [LayerOption("", each.kept_bytes, 0, each.replay_bytes, each.moved_bytes) for each in layers]
        assert step.device_bytes <= count_peak(BareStage(num_layers, m, 0), options, 0)
        if num_gpus <= 2:
            # At the end of the last forward all is there but what has left.
            assert step.device_bytes >= m * sum(layer.kept_bytes for layer in layers)
    assert num_waiting > 5


def test_rows_are_the_largest_sets_that_fit_the_window() -> None:
    rows = {"mlp": 8, "input_layernorm": 2, "self_attention": 3, "input": 0}
    found = choose_rows_to_move(rows, 12)
    assert found == {"self_attention": 3, "input_layernorm+self_attention": 5, "self_attention+mlp": 11}
    assert choose_rows_to_move(rows, 13)["all"] == 13 and choose_rows_to_move(rows, 1) == {}
    gpu = read_gpu("gb200")
    assert count_window_bytes(gpu, torch.bfloat16, 25 * 10**14) == 225 * 10**9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus-per-node", "4"], "--gpus-per-node 4 is given without --host-memory"),
        (["--host-memory", "0"], "argument --host-memory"),
        (["--host-memory", "1TiB", "--gpu", "{mine}"], "has no host_link, the rates to the host's memory"),
    ],
)
def test_what_cannot_offload_is_one_sentence(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(Path("configs/gpu/h100.json").read_text())
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps({name: value for name, value in content.items() if name != "host_link"}))
    command = ["plan", "--model", MODEL, "--gpu-memory", "80GB", "--fixed-memory", "10GB"]
    try:
        assert main([*command, *(word.format(mine=mine) for word in words)]) != 0
    except SystemExit as end:
        assert end.code
    assert message in capsys.readouterr().err

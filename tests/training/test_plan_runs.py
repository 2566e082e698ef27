"""A plan with the host, run: what the engine has on the device and the host are what the plan says, and its copies are
in the order of the schedule."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
from covering import exhaustive
from slow_links import SlowLink
from training_job import Data, fork_beside, run, successful

from tempo_megatron.memory.commands.arguments import add_plan_arguments
from tempo_megatron.memory.commands.plan import read_request
from tempo_megatron.memory.plan.choices import measure_rows
from tempo_megatron.memory.plan.gpu import read_gpu
from tempo_megatron.memory.plan.planner import MemoryPlan, Planner, PlanRequest
from tempo_megatron.memory.rank.play import list_events
from tempo_megatron.settings.operations import is_moved

SIZES = {"num_layers": 6, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 64}
WORDS = [
    *(word for name, size in SIZES.items() for word in ("--" + name.replace("_", "-"), str(size))),
    *("--micro-batch-size", "4", "--global-batch-size", "8", "--train-iters", "2"),
]
ZERO = {"zero_optimization": {"stage": 1}}
# In a time in which the products of a layer of this model are done, a link as fast as this takes a part of its rows.
RATES = {"matmul_flops_per_second": {"bf16": 2e11, "fp16": 2e11, "fp32": 2e11}, "bytes_per_second": 1e11}
LINK = {"title": "a link", "to_host_bytes_per_second": 1e9, "to_gpu_bytes_per_second": 1e9, "gpus_per_uplink": 1}


def note_copies() -> None:
    """Let a rank note the copies of its last step, and write at the end what its engine counted."""
    fork_beside()
    from tempo_kernels.offload import engine as offload_engine
    from tempo_megatron.training import loop

    copies: list[tuple[bool, int]] = []

    class Noting(SlowLink):
        def copy(self, direction: Any, source: Any, target: Any, after: Any) -> Any:
            copies.append((direction == "out", source.numel()))
            return super().copy(direction, source, target, after)

    offload_engine.ThreadDevice = Noting  # type: ignore[misc]
    train = loop.run_job

    def train_and_tell(job: Any) -> None:
        engine = job.offloading.engine
        train(job)
        counted = {
            "device": engine.peak_device_bytes,
            "host": engine.pool.peak_bytes_in_use,
            "pool": engine.pool.num_bytes,
            "copies": copies[len(copies) // job.run.train_iters :],
        }
        Path(f"{job.run.metrics_file}.{os.environ['RANK']}").write_text(json.dumps(counted))

    loop.run_job = train_and_tell


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / "small.json"
    path.write_text(
        json.dumps({"title": "small", "calibrated": False, "source": "", **RATES, "host_link": {**LINK, "source": ""}})
    )
    return path


def find_plan(folder: Path, gpu: Path, stages: int, budget: str) -> tuple[PlanRequest, MemoryPlan]:
    model, zero = folder / "model.json", folder / "zero.json"
    model.write_text(json.dumps({**SIZES, "vocab_size": 512, "make_vocab_size_divisible_by": 64}))
    zero.write_text(json.dumps(ZERO))
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    words = ["--model", str(model), "--gpu", str(gpu), "--micro-batch-size", "4", "--num-micro-batches", "2"]
    words += ["--dtype", "fp32", "--deepspeed_config", str(zero), "--pp", str(stages)]
    words += ["--gpu-memory", budget, "--fixed-memory", "1MB", "--recompute-allowed"]
    words += ["--host-memory", "1GiB", "--gpus-per-node", "1"]
    args = parser.parse_args(words)
    request, _ = read_request(args, read_gpu(str(gpu)))
    return request, Planner(request).plan(args.gpu_memory)


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "budget"), [(1, "4.6MB"), *exhaustive((1, "2.5MB"), (1, "6.9MB"), (2, "3.5MB"))])
def test_the_engine_does_what_the_plan_says(data: Data, tmp_path: Path, gpu: Path, stages: int, budget: str) -> None:
    request, plan = find_plan(tmp_path, gpu, stages, budget)
    assert plan.host_bytes
    layout = ["--pipeline-model-parallel-size", str(stages)]
    config = {**ZERO, "tempo": plan.block}
    layers = {key: {**values, "offload": "off"} for key, values in plan.block.get("layers", {}).items()}
    block = {**plan.block, "offload": "off", "layers": layers}
    plain = successful(
        run(data, tmp_path / "plain", *WORDS, *layout, world_size=stages, config={**ZERO, "tempo": block})
    )
    words = [*WORDS, *layout, *plan.megatron_arguments]
    planned = successful(run(data, tmp_path / "run", *words, world_size=stages, config=config, before=note_copies))
    assert planned.losses_hex == plain.losses_hex
    for rank, stage in enumerate(plan.stages):
        counted = json.loads((tmp_path / "run" / f"metrics.jsonl.{rank}").read_text())
        assert counted["host"] == counted["pool"] == stage.host_bytes
        rows = measure_rows(request.run)
        moved = [
            sum(size for name, size in rows.list_movable(choice).items() if is_moved(name, choice.offload))
            for choice in stage.choices
        ]
        assert sum(moved) == stage.moved_bytes and counted["device"] <= 2 * max(moved)
        copies = iter(counted["copies"])
        for event in list_events(rank, stages, 1, 2):
            # What a layer sends leaves behind its forward; it comes back while the next layer's backward runs.
            for num_bytes in filter(None, moved if event.is_forward else moved[::-1]):
                left = num_bytes
                while left > 0:
                    is_out, copied = next(copies)
                    assert is_out == event.is_forward
                    left -= copied
                assert left == 0
        assert next(copies, None) is None

"""A run with a memory budget: planned at its start, under it by a count of its storages, with the losses of stock."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from training_job import Data, Run, fork_beside, run, successful, zero

from tempo_megatron import TempoConfig
from tempo_megatron.memory import run as memory_run
from tempo_megatron.memory.rank.estimate import estimate_ranks
from tempo_megatron.memory.rank.offload import list_moved_of_layers
from tempo_megatron.models.shape import make_shape
from tempo_megatron.words.argument_types import format_bytes

SIZES = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "seq_length": 256}
# The quickstart's shape in one process, without dropout, so that stock has the same losses.
QUICKSTART = [
    *(word for name, size in SIZES.items() for word in ("--" + name.replace("_", "-"), str(size))),
    *("--micro-batch-size", "8", "--global-batch-size", "8", "--train-iters", "2"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
]


def count_bytes() -> None:
    """Let a rank count its storages while it trains, and say at the end how many bytes they were at most."""
    fork_beside()
    from tempo_kernels import compiled
    from tempo_kernels.gelu import make_tables
    from tempo_megatron.memory.tape.follower import Follower
    from tempo_megatron.training import loop
    from tempo_megatron.training.job import Job

    # What Inductor's own code makes, no dispatcher sees.
    os.environ["CXX"] = "no-compiler"
    importlib.reload(compiled)  # the server has compiled
    torch.compiler.set_stance("force_eager")
    make_tables()  # of a process, and in no estimate
    seen, build, train = Follower(), Job.__init__, loop.run_job

    def build_in_sight(self: Job, *args: Any) -> None:
        with seen:
            build(self, *args)

    def train_in_sight(job: Job) -> None:
        seen.begin_phase()
        with seen:
            train(job)
        engine = job.offloading.engine
        # The host's pool, a CPU's memory too here, is whole before the first backward and stays until the end.
        print(f"counted {seen.peak - engine.pool.num_bytes} bytes, {engine.peak_device_bytes} of them to move")
        print(f"host has {engine.pool.peak_bytes_in_use} in use, a pool of {engine.pool.num_bytes}")

    Job.__init__, loop.run_job = build_in_sight, train_in_sight  # type: ignore[method-assign]


def read_count(result: Run, before: str = "counted") -> int:
    found = re.search(rf"{before} (\d+)", result.output)
    assert found, result.output
    return int(found[1])


CONFIG = zero(1, reduce_bucket_size=1_000_000)


def describe(tempo: TempoConfig) -> memory_run.Run:
    shape = make_shape(**SIZES, vocab_size=512, attention_dropout=0.0, hidden_dropout=0.0)
    optimizer = memory_run.OptimizerSettings.from_deepspeed(CONFIG)
    how: dict[str, Any] = {"micro_batch_size": 8, "num_micro_batches": 1, "dtype": torch.float32, "stock": "cpu"}
    return memory_run.Run(model=shape, tempo=tempo, optimizer=optimizer, **how)


def estimate(tempo: TempoConfig) -> int:
    """The peak that the run's plan goes by."""
    (rank,) = estimate_ranks(describe(tempo))
    return rank.peak_bytes


def run_counted(data: Data, folder: Path, **tempo: Any) -> Run:
    return successful(run(data, folder, *QUICKSTART, config={**CONFIG, **tempo}, before=count_bytes))


@pytest.fixture(scope="module")
def unplanned(data: Data, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_counted(data, tmp_path_factory.mktemp("stock"))


@pytest.mark.slow
def test_a_budget_of_what_tempo_needs_is_kept_and_changes_no_loss(data: Data, tmp_path: Path, unplanned: Run) -> None:
    assert read_count(unplanned) > 0.97 * estimate(TempoConfig.off())
    budget = estimate(TempoConfig())
    block = {"memory_budget": f"{budget}B", "norm": "inplace"}
    planned = run_counted(data, tmp_path, tempo=block)
    (record,) = planned.of_kind("run")
    plan = record["plan"]
    assert read_count(planned) <= plan["peak_bytes"] <= budget < read_count(unplanned)
    assert plan["budget"] == budget and plan["block"]["norm"] == "inplace"
    assert record["tempo"] == dataclasses.asdict(TempoConfig.from_dict(plan["block"]))
    assert (
        f"plan       budget {format_bytes(budget)}, estimated peak {format_bytes(plan['peak_bytes'])}, "
        in planned.output
    )
    assert f"           {TempoConfig.from_dict(plan['block']).describe()}" in planned.output
    assert planned.losses == pytest.approx(unplanned.losses, rel=1e-4)


@pytest.mark.slow
def test_a_budget_below_what_tempo_keeps_sends_rows_to_the_host_and_changes_no_loss(
    data: Data, tmp_path: Path, unplanned: Run
) -> None:
    budget = int(0.8 * estimate(TempoConfig()))
    # Without recomputed linears, which would do, too.
    written = {"linear_fc1": "off", "linear_qkv": "off"}
    planned = run_counted(data, tmp_path, tempo={"memory_budget": f"{budget}B", "host_memory": "1GiB", **written})
    (record,) = planned.of_kind("run")
    plan = record["plan"]
    assert 0.99 * plan["peak_bytes"] <= read_count(planned) <= plan["peak_bytes"] <= budget
    described = describe(TempoConfig.from_dict(plan["block"]))
    moved = [sum(sizes) for sizes in list_moved_of_layers(described, range(4))]
    assert min(moved[:-1]) == max(moved) and moved[-1] == 0
    assert read_count(planned, "bytes,") == 2 * moved[0]
    assert read_count(planned, "host has") == read_count(planned, "a pool of") == plan["host_bytes"] == sum(moved)
    assert planned.losses == pytest.approx(unplanned.losses, rel=1e-4)


@pytest.mark.slow
def test_ranks_share_one_plan_and_resume_with_another(data: Data, tmp_path: Path) -> None:
    """With dropout and what the user wrote of recomputation; the losses after --load are those of the whole run."""
    common = "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 4 --train-iters 4".split()
    save = tmp_path / "save"

    def go(name: str, budget: str, *more: str, before: Any = fork_beside) -> Run:
        words = [*common, "--use-tempo", "--tempo-memory-budget", budget, *more]
        return successful(run(data, tmp_path / name, *words, world_size=2, config=zero(1), before=before))

    written = ["--recompute-granularity", "selective", "--recompute-modules", "mlp"]
    whole = go("whole", "2.5GB", *written, "--save", str(save), "--save-interval", "2")
    assert "recompute  selective, mlp\n" in whole.output
    assert "recomputed by Megatron: mlp of every layer" in whole.output
    assert whole.of_kind("run")[0]["plan"]["recompute"] == ["mlp"]
    (save / "latest").write_text("iter_0000002")
    second = go("second", "2.03GB", "--load", str(save), before=None)
    assert second.losses == pytest.approx(whole.losses[2:], rel=1e-4)


NOTHING_FITS = (
    r"error: memory budget: 50.00 MiB a GPU may be filled, and the least that fits is \S+ GiB, \S+ GiB more: "
    r"activation=.*; raise the budget, --tensor-model-parallel-size or --pipeline-model-parallel-size, or lower "
    r"--micro-batch-size"
)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"memory_budget": "50MiB"}, NOTHING_FITS),
        (
            {"memory_budget": "1GiB", "host_memory": "900TiB"},
            "error: memory budget: tempo.host_memory is .* of this host are.*",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(
    data: Data, tmp_path: Path, block: dict[str, str], message: str
) -> None:
    failed = run(data, tmp_path, config={**zero(1), "tempo": block}, before=fork_beside)
    (line,) = [line for line in failed.output.splitlines() if line.startswith("error")]
    assert failed.exit_codes == [1] and re.fullmatch(message, line)

"""The planner's micro batch, and the Tempo paper's cases: BERT-large on GPUs of 11, 16 and 24 GB."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import build_run

from tempo_megatron import TempoConfig
from tempo_megatron.cli import main
from tempo_megatron.memory.plan.gpu import read_gpu
from tempo_megatron.memory.plan.planner import (
    NothingFitsError,
    Planner,
    PlanRequest,
    list_micro_batches,
    try_micro_batches,
)
from tempo_megatron.memory.rank.estimate import estimate_ranks
from tempo_megatron.memory.run import OptimizerSettings, Run
from tempo_megatron.models.shape import make_shape
from tempo_megatron.models.shape_file import read_shape_file

ROOT = Path(__file__).parents[2]
# fp32, Adam's states whole on each GPU, Megatron's modules with unfused attention.
BERT = make_shape(**{"vocab_size": 30522, **read_shape_file(ROOT / "configs" / "model" / "bert_large.json")})
ADAM = OptimizerSettings(kind="deepspeed", zero_stage=0)
PAPER = TempoConfig(activation="inplace", norm="inplace", dropout="off", attention="softmax", loss="off")
# What computes no product twice: none of Megatron's recomputation either.
ONCE = TempoConfig(attention="flash", linear_fc1="off", linear_qkv="off")
GIB = 2**30


def make_bert(size: int, tempo: TempoConfig) -> Run:
    return Run(model=BERT, tempo=tempo, optimizer=ADAM, micro_batch_size=size, dtype=torch.float32, stock="local")


@functools.cache
def make_planner(size: int) -> Planner:
    return Planner(PlanRequest(run=make_bert(size, ONCE), gpu=read_gpu("rtx4090"), recompute=frozenset()))


def estimate_bert(size: int, tempo: TempoConfig) -> int:
    (rank,) = estimate_ranks(make_bert(size, tempo))
    return rank.peak_bytes


def estimate_smallest(size: int) -> int:
    """What the plan that needs least needs."""
    with pytest.raises(NothingFitsError) as error:
        make_planner(size).plan(0)
    return error.value.least_bytes


def is_largest(size: int, needs: Callable[[int], int], budget: int) -> bool:
    """Whether it is the largest micro batch within the budget; what a batch needs grows with it."""
    return needs(size) <= budget < needs(size + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "memory", [11, pytest.param(16, marks=pytest.mark.exhaustive), pytest.param(24, marks=pytest.mark.exhaustive)]
)
def test_the_papers_cases_are_as_the_page_says(memory: int) -> None:
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    row = re.search(rf"\| {memory} GiB \| (\d+) \| (\d+) \((.*)x\) \| (\d+) \((.*)x\) \| `(.*)` \|", page)
    assert row is not None
    stock, paper, once = (int(row[column]) for column in (1, 2, 4))
    budget = memory * GIB
    assert is_largest(stock, lambda size: estimate_bert(size, TempoConfig.off()), budget)
    assert is_largest(paper, lambda size: estimate_bert(size, PAPER), budget)
    assert is_largest(once, estimate_smallest, budget)
    assert stock < paper <= once and (row[3], row[5]) == (f"{paper / stock:.2f}", f"{once / stock:.2f}")
    plan = make_planner(once).plan(budget)
    assert TempoConfig.from_dict(plan.block).describe() == row[6] and plan.peak_bytes <= budget


def test_micro_batches_are_divisors_or_grow() -> None:
    assert list(list_micro_batches(12)) == [1, 2, 3, 4, 6, 12]
    assert list(itertools.islice(list_micro_batches(None), 9)) == [1, 2, 3, 4, 6, 8, 12, 16, 24]


def make_small_request() -> PlanRequest:
    shape = make_shape(num_layers=2, hidden_size=256, num_attention_heads=4, seq_length=256, vocab_size=1000)
    run = build_run(model=shape, tempo=TempoConfig(), pp=2, stock="transformer_engine")
    return PlanRequest(run=run, gpu=read_gpu("h100"), recompute=frozenset())


@pytest.mark.slow
def test_each_micro_batch_that_fits_is_tried_and_has_its_time_a_sample() -> None:
    request = make_small_request()
    budget = 29 * 2**20
    trials = try_micro_batches(request, budget, 9, lambda: None)
    runs = [trial.request.run for trial, _ in trials]
    assert [run.micro_batch_size for run in runs] == [1, 3]  # 9 does not fit
    for run, (trial, plan) in zip(runs, trials, strict=True):
        assert plan.peak_bytes <= budget and run.num_micro_batches == 9 // run.micro_batch_size
        # Two stages: with few micro batches they wait for one another; with many small ones weights are read often.
        step = plan.seconds * (9 // run.micro_batch_size + 1)
        assert trial.compute_sample_seconds(plan) == pytest.approx(step / 9)


@pytest.mark.slow
def test_the_command_chooses_the_micro_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "small.json"
    sizes = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 256, "vocab_size": 1000}
    model.write_text(json.dumps({"family": "gpt", **sizes}))
    file = tmp_path / "plan.json"
    arguments = ["plan", f"--model={model}", "--gpu=h100", "--gpu-memory=120MiB", "--dp=2", "--recompute-allowed"]
    assert main([*arguments, "--micro-batch-size=auto", "--global-batch-size=8", f"--json={file}"]) == 0
    out = capsys.readouterr().out
    chosen = json.loads(file.read_text())["micro_batch_size"]
    rates = {int(size): float(rate) for size, rate in re.findall(r"^b (\d+): ([\d.]+) samples/s", out, re.MULTILINE)}
    assert len(rates) > 1 and rates[chosen] == max(rates.values())
    assert f"small, bf16, s 256, b {chosen}, " in out and "\nb 1: " in out and " samples/s, peak " in out
    assert f"a step of {4 // chosen} " in out

"""The planner's micro batch, and the Tempo paper's cases: BERT-large on GPUs of 11, 16 and 24 GB."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tempo_megatron import TempoConfig
from tempo_megatron.cli import main
from tempo_megatron.memory.plan.gpu import read_gpu
from tempo_megatron.memory.plan.planner import (
    MemoryPlan,
    NothingFitsError,
    Planner,
    PlanRequest,
    list_micro_batches,
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


def plan_bert(size: int, budget: int) -> MemoryPlan:
    return Planner(PlanRequest(run=make_bert(size, ONCE), gpu=read_gpu("rtx4090"), recompute=frozenset())).plan(budget)


def estimate_bert(size: int, tempo: TempoConfig) -> int:
    (rank,) = estimate_ranks(make_bert(size, tempo))
    return rank.peak_bytes


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
    with pytest.raises(NothingFitsError):
        plan_bert(once + 1, budget)
    assert stock < paper <= once and (row[3], row[5]) == (f"{paper / stock:.2f}", f"{once / stock:.2f}")
    plan = plan_bert(once, budget)
    assert TempoConfig.from_dict(plan.block).describe() == row[6] and plan.peak_bytes <= budget


def test_micro_batches_are_divisors_or_grow() -> None:
    assert list(list_micro_batches(12)) == [1, 2, 3, 4, 6, 12]
    assert list(itertools.islice(list_micro_batches(None), 9)) == [1, 2, 3, 4, 6, 8, 12, 16, 24]


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
    # The largest, which reads weights least often.
    assert len(rates) > 1 and chosen == max(rates) and rates[chosen] == max(rates.values())
    assert f"small, bf16, s 256, b {chosen}, " in out and "\nb 1: " in out and " samples/s, peak " in out
    # Eight samples a step, on two data-parallel ranks.
    (milliseconds,) = re.findall(rf"a step of {4 // chosen} ([\d.]+)$", out, re.MULTILINE)
    assert rates[chosen] == pytest.approx(8 / (float(milliseconds) / 1e3), rel=1e-2)

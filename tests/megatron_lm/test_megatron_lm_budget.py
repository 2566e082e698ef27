"""A memory budget in a run of the unmodified pretrain_gpt.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from megatron_runs import Run, run_all

ADAM = "--train-iters 2 --optimizer adam --lr 1e-3 --seq-length 64 --micro-batch-size 4 --global-batch-size 4"


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, megatron_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Short runs of one process, by name."""
    folder = tmp_path_factory.mktemp("runs")
    budget = f"{ADAM} --use-tempo --tempo-memory-budget"
    runs = [
        Run("stock", ADAM),
        Run("wide", f"{budget} 1GiB"),
        Run("narrow", f"{budget} 12.3MB --tempo-report {folder / 'report.json'}"),
        Run("sgd", "--train-iters 1 --use-tempo --tempo-memory-budget 1GiB"),
    ]
    if request.config.getoption("--exhaustive"):
        full = "--recompute-granularity full --recompute-method block --recompute-num-layers 2"
        runs += [Run("recomputed", f"{budget} 1GiB {full}"), Run("impossible", f"{budget} 1MiB")]
    (rank,) = run_all(megatron_root, 1, runs, folder)
    return rank


def read_plan(printed: str) -> list[str]:
    return [line.removeprefix("tempo: plan: ") for line in printed.splitlines() if line.startswith("tempo: plan: ")]


@pytest.mark.slow
def test_two_budgets_are_two_plans_that_change_no_loss(results: dict[str, dict[str, Any]]) -> None:
    plans = {name: read_plan(results[name]["printed"]) for name in ("wide", "narrow")}
    for first, values, recomputed in plans.values():
        assert re.match(r"budget \S+ [GM]iB, estimated peak \S+ MiB, shortest by the rates of ", first)
        assert values.startswith("activation=")
        assert recomputed == "recomputed by Megatron: none, as written: it is not planned here"
    assert plans["wide"][1] != plans["narrow"][1]
    for name in plans:
        assert results[name]["losses"] == pytest.approx(results["stock"]["losses"], rel=1e-4)
        assert f"tempo: GPTModel, {plans[name][1]}" in results[name]["printed"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_recomputation_stays_as_written(results: dict[str, dict[str, Any]]) -> None:
    lines = read_plan(results["recomputed"]["printed"])
    assert lines[-1].startswith("recomputed by Megatron: the first 2 layers of every stage as a whole, as written")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param(
            "impossible",
            "memory budget: 1.00 MiB a GPU are given, and the least that fits is",
            marks=pytest.mark.exhaustive,
        ),
        ("sgd", "the run has the optimizer sgd, and what is known is adam; leave the memory budget out"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(results: dict[str, dict[str, Any]], name: str, message: str) -> None:
    assert results[name]["status"] == 2 and message in results[name]["complaints"]

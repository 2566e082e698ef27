"""The committed figures of benchmarks/roam_models.py: what is said of the order holds for each case measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def read_lines(name: str) -> dict[str, dict[str, Any]]:
    """The last line of each case."""
    text = (RESULTS / name).read_text(encoding="utf-8")
    return {line["model"]: line for line in map(json.loads, text.splitlines())}


PLANNED = read_lines("estimate/roam.jsonl")


def test_the_models_of_the_paper_are_there_in_both_batches_and_dtypes() -> None:
    names = "alexnet vgg11 resnet50 mnasnet0_5 mobilenet_v2 efficientnet_b0 vit_b_16 bert".split()
    wanted = {f"{name} {batch} {dtype}" for name in names for batch in (1, 32) for dtype in ("fp32", "bf16")}
    assert wanted <= PLANNED.keys()


def test_no_plan_needs_more_than_any_other_order_nor_an_arena_more_than_is_alive_at_once() -> None:
    for case, line in PLANNED.items():
        others = [line[f"{name}_bytes"] for name in ("eager", "inductor", "lescea")]
        assert line["lower_bound"] <= line["plan_bytes"] <= min(others), case
        assert line["plan_arena_bytes"] == line["arena_lower_bound"], case


def test_the_largest_model_is_planned_in_half_a_minute_of_a_core() -> None:
    lines = [line for case, line in PLANNED.items() if case.startswith("gpt2-xl")]
    assert len(lines) == 6
    assert max(line["capture_s"] + line["order_s"] + line["layout_s"] for line in lines) < 30


def test_what_ran_has_the_bits_of_eager_mode_and_the_planned_peak() -> None:
    for case, line in read_lines("cpu/roam_runs.jsonl").items():
        assert line["is_bit_identical"], case
        # Convolutions of bf16 on a CPU hold copies of their operands, which no plan knows.
        tolerance = 0.03 if case.endswith("fp32") else 0.1
        assert line["measured_bytes"] == pytest.approx(line["planned_bytes"], rel=tolerance), case
        assert line["measured_bytes"] < line["measured_eager_bytes"], case

"""What the planner takes from the estimate: what stands around the layers, and the peak of a whole plan."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from kept_formula import count_layer_bytes, make_layer

from tempo_megatron import TempoConfig
from tempo_megatron.memory.commands.arguments import add_plan_arguments
from tempo_megatron.memory.commands.plan import read_request
from tempo_megatron.memory.estimate.estimate import RankEstimate
from tempo_megatron.memory.plan import verify as plan_verify
from tempo_megatron.memory.plan.gpu import read_gpu
from tempo_megatron.memory.plan.planner import PlanProblem, make_smallest_plan
from tempo_megatron.memory.plan.verify import PlanEstimates, make_problem
from tempo_megatron.memory.run import Run

MODEL = Path(__file__).parents[2] / "configs" / "model" / "gpt2_345m.json"
IN_PLACE = dataclasses.replace(
    TempoConfig.off(), activation="inplace", norm="inplace", dropout="recompute", attention="flash"
)
HEADS = {"off": 7 * 10**9, "fused": 6 * 10**9}


def read_problem(monkeypatch: pytest.MonkeyPatch, full_rise: int) -> tuple[PlanProblem, PlanEstimates, list[Any]]:
    """Two stages whose estimates are what layers keep, and around them the head's bytes, or so much more in the
    backward of a layer that is recomputed as a whole."""
    asked = []

    def estimate(run: Run) -> tuple[RankEstimate, ...]:
        asked.append(run.recompute)
        kept = 12 * count_layer_bytes(make_layer(run), IN_PLACE, stock="transformer_engine")
        around = HEADS[run.tempo.loss] + (full_rise if run.recompute else 0)
        return tuple(RankEstimate(f"stage {n}", 1, "", {"layers": (2 - n) * kept + around}) for n in (0, 1))

    monkeypatch.setattr(plan_verify, "estimate_ranks", estimate)
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    args = parser.parse_args([f"--model={MODEL}", "--gpu=a100", "--gpu-memory=80GB", "--pp=2", "--micro-batch-size=8"])
    problem, estimates = make_problem(read_request(args, read_gpu("a100"))[0])
    assert estimates is not None
    return problem, estimates, asked


@pytest.mark.parametrize("full_rise", [0, 10**9])
def test_what_the_layers_keep_and_recompute_is_taken_away_from_two_estimates(
    monkeypatch: pytest.MonkeyPatch, full_rise: int
) -> None:
    problem, _, asked = read_problem(monkeypatch, full_rise)
    again = count_layer_bytes(make_layer(problem.run), IN_PLACE, stock="transformer_engine")
    for stage in (0, 1):
        fixed = problem.fixed_bytes["fused"][stage]
        assert fixed.at_head == HEADS["fused"]
        # Of the layer's backward is known what full recomputation shows, and that it is not more than the head.
        assert fixed.in_layers == min(HEADS["fused"], HEADS["fused"] + full_rise - again)
    assert problem.values["loss"] == ("fused",)
    # Both forms of the head, then the layers' backward: each estimate once.
    assert asked == [(), (), ("full",)]


def test_a_plan_that_recomputes_a_part_of_a_stage_is_bounded_by_two_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, estimates, _ = read_problem(monkeypatch, 10**9)
    plan = make_smallest_plan(dataclasses.replace(problem, recompute=frozenset(("full",))))
    assert plan.num_full == 12
    assert estimates.estimate_plan(plan) == [
        (2 - n) * 12 * make_layer(problem.run).hidden_bytes + HEADS["fused"] + 10**9 for n in (0, 1)
    ]

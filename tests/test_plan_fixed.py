"""The planner's peaks stand beside those of the estimate, which follows a step of the real modules."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from tempo_megatron import TempoConfig
from tempo_megatron.memory import plan_fixed
from tempo_megatron.memory.estimate import RankEstimate
from tempo_megatron.memory.formula import count_layer_bytes
from tempo_megatron.memory.gpu import read_gpu
from tempo_megatron.memory.plan_command import add_plan_arguments, make_request, read_model

MODEL = Path(__file__).parent.parent / "configs" / "model" / "gpt2_345m.json"
IN_PLACE = {"activation": "inplace", "norm": "inplace", "dropout": "recompute", "attention": "flash"}


@pytest.mark.parametrize(("recompute", "has_full"), [((), False), (("mlp",), False), (("full",), True)])
def test_what_the_layers_keep_is_taken_away_from_the_estimate(
    monkeypatch: pytest.MonkeyPatch, recompute: tuple[str, ...], has_full: bool
) -> None:
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    args = parser.parse_args([f"--model={MODEL}", "--gpu=a100", "--gpu-memory=80GB", "--pp=2", "--micro-batch-size=8"])
    asked = []

    def estimate(shape: object, layout: object, config: TempoConfig, **_: object) -> tuple[RankEstimate, ...]:
        asked.append((layout.recompute, config))
        return tuple(RankEstimate(f"stage {n}", 1, "backward of the layers", {"layers": 10**11 + n}) for n in (0, 1))

    monkeypatch.setattr(plan_fixed, "estimate_ranks", estimate)
    request = make_request(read_model(args), read_gpu("a100"), args)
    config = TempoConfig(**IN_PLACE, loss="off")
    kept, without = (
        count_layer_bytes(dataclasses.replace(request.shape, recompute=frozenset(each)), config)
        for each in (recompute, ())
    )
    replay = without if has_full else without - kept
    for stage in (0, 1):
        fixed = request.count_fixed_bytes(stage, "off", frozenset(recompute))
        # 12 layers a stage; the first has two micro batches in flight.
        assert fixed == 10**11 + stage - (2 - stage) * 12 * kept - replay
    assert asked == [(recompute, config)]

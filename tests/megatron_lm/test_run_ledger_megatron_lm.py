"""`--tempo-ledger` in Megatron-LM's own script: the first step's ledger of each stage, and losses as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from megatron_runs import Run, run_all

DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"


WAYS = {"tempo": "--use-tempo", "selective": "--recompute-activations", "stock": ""}


@pytest.mark.slow
@pytest.mark.parametrize("names", [["tempo", "stock"], pytest.param([*WAYS], marks=pytest.mark.exhaustive)])
def test_runs_with_tempo_and_without_keep_their_losses(megatron_root: Path, tmp_path: Path, names: list[str]) -> None:
    ways = {name: WAYS[name] for name in names}
    runs = [
        Run(f"{name}{' seen' * seen}", f"{DROPOUT} {way} {f'--tempo-ledger {tmp_path}/{name}' if seen else ''}")
        for name, way in ways.items()
        for seen in (False, True)
    ]
    (rank,) = run_all(megatron_root, 1, runs, tmp_path)
    kept = {}
    for name in ways:
        assert rank[f"{name} seen"]["error"] is None and rank[f"{name} seen"]["status"] == 0
        assert rank[f"{name} seen"]["losses"] == rank[name]["losses"]
        found = json.loads((tmp_path / f"{name}.stage0.json").read_text())
        kept[name] = found["layers"][0]["num_bytes"]
        assert "ledger of this run's first micro batch, stage 0" in rank[f"{name} seen"]["printed"]
        assert found["stock"] and found["standing"]["gradients"] == found["standing"]["weights"]
    assert list(kept.values()) == sorted({*kept.values()})


@pytest.mark.slow
@pytest.mark.exhaustive
def test_each_pipeline_stage_has_a_ledger(megatron_root: Path, tmp_path: Path) -> None:
    way = f"{DROPOUT} --use-tempo --pipeline-model-parallel-size 2 --tempo-ledger {tmp_path}/led"
    ranks = run_all(megatron_root, 2, [Run("pipeline", way)], tmp_path)
    found: list[dict[str, Any]] = [json.loads((tmp_path / f"led.stage{n}.json").read_text()) for n in range(2)]
    assert [rank["pipeline"]["error"] for rank in ranks] == [None, None]
    assert [[kind["layers"] for kind in each["layers"]] for each in found] == [["0-1"], ["2-3"]]
    assert not {"output_layer", "final_layernorm"} & {*found[0]["outside"]}
    assert {"output_layer", "final_layernorm"} <= {*found[1]["outside"]}
    assert (tmp_path / "led.stage1.timeline.png").exists()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_run_that_runs_out_of_memory_says_what_would_have_fitted(
    megatron_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    adam = f"{DROPOUT} --optimizer adam --lr 1e-3"
    runs = [Run("out", adam, changes=("run_out_of_memory",)), Run("sgd", DROPOUT, changes=("run_out_of_memory",))]
    (rank,) = run_all(megatron_root, 1, runs, tmp_path)
    out = rank["out"]
    unknown = "what stood at the peak is not known: the run has the optimizer sgd, and what is known is adam"
    assert unknown in rank["sgd"]["complaints"]
    assert out["error"] is None and out["status"] == 1 and list(out["losses"]) == [1]
    assert out["complaints"].count("out of memory: CUDA out of memory. Tried to allocate 64.00 KiB") == 1
    assert "kept by core_attention (s*s), 4 layers" in out["complaints"]
    assert "the smallest change that would have fitted" in out["complaints"] and "Traceback" not in out["complaints"]
    assert "Traceback" in (tmp_path / "out_of_memory.rank0.txt").read_text()

"""What a run of the unmodified pretrain_gpt.py says and does, with --use-tempo and without, and the launcher itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from megatron_runs import Run, run_all
from megatron_wheels import SITE

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(megatron_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Short runs of one process, by name."""
    folder = tmp_path_factory.mktemp("runs")
    report, deepspeed = folder / "report.json", folder / "ds.json"
    deepspeed.write_text('{"train_batch_size": 8, "tempo": {"norm": "recompute"}}')
    runs = [
        Run("help", "--help", changes=("mend_help",)),
        Run("stock", "--train-iters 1", changes=("keep_what_was_replaced",)),
        Run(
            "tempo",
            f"--train-iters 1 --use-tempo --tempo-report {report}",
            changes=("keep_what_was_replaced",),
            measures_kept_bytes=True,
        ),
        Run("mask given", "--train-iters 1 --use-tempo --reset-attention-mask"),
        Run("attention off", "--train-iters 1 --use-tempo --tempo-attention off"),
        Run("deepspeed", f"--train-iters 1 --deepspeed_config {deepspeed} --local_rank=0"),
        Run("swiglu", "--train-iters 1 --use-tempo --swiglu"),
        Run(
            "a second choice",
            "--train-iters 1 --hidden-dropout 0.1 --attention-dropout 0.1 --use-tempo --tempo-norm off "
            "--spec tempo_megatron.slots.named_specs tempo_layer",
        ),
        Run("swiglu in place", "--train-iters 1 --use-tempo --swiglu --tempo-activation inplace"),
    ]
    (rank,) = run_all(megatron_root, 1, runs, folder)
    rank["report"] = json.loads(report.read_text("utf-8"))
    return rank


@pytest.mark.slow
def test_help_lists_the_tempo_group_beside_megatrons(results: dict[str, dict[str, Any]]) -> None:
    printed = results["help"]["printed"]
    assert results["help"]["status"] == 0
    for option in ("--num-layers", "--use-tempo", "--tempo-config", "--tempo-report", "--tempo-norm"):
        assert option in printed


@pytest.mark.slow
def test_without_use_tempo_nothing_but_the_argument_parser_is_replaced(results: dict[str, dict[str, Any]]) -> None:
    assert results["stock"]["replaced"] == ["add_megatron_arguments"]
    assert "GPTModel.__init__" in results["tempo"]["replaced"]
    assert "tempo:" not in results["stock"]["printed"]


@pytest.mark.slow
def test_the_banner_and_the_report_say_what_was_replaced(results: dict[str, dict[str, Any]]) -> None:
    printed, report = results["tempo"]["printed"], results["report"]
    assert f"tempo: Megatron-core {report['megatron_core']} at " in printed
    assert "slots replaced: activation 4 of 4, norm 9 of 9, dropout 9 of 9, attention 4 of 4, loss 1 of 1" in printed
    (model,) = report["models"]
    assert model["model"] == "GPTModel"
    assert model["slots"]["norm"] == {"tempo": 9, "all": 9}
    assert "auto" not in model["tempo"].values()
    assert model["attention_mask_left_out"]
    kept = report["kept_bytes_per_layer"]
    assert 0 < kept["tempo"] < kept["stock"]
    assert f"stock {kept['stock']:,}, Tempo {kept['tempo']:,}" in printed


@pytest.mark.slow
def test_the_block_of_a_deepspeed_json_counts_and_the_deepspeed_launchers_argument_is_taken(
    results: dict[str, dict[str, Any]],
) -> None:
    assert results["deepspeed"]["status"] == 0
    assert "norm=recompute" in results["deepspeed"]["printed"]


@pytest.mark.slow
def test_no_mask_is_made_where_attention_is_tempos_and_causal(results: dict[str, dict[str, Any]]) -> None:
    sentence = "is given no mask"
    assert sentence in results["tempo"]["printed"]
    # A mask that hides more than the future, and stock's attention, stay as they are.
    assert sentence not in results["mask given"]["printed"]
    assert sentence not in results["attention off"]["printed"]


@pytest.mark.slow
def test_what_cannot_be_had_adapts_unless_it_was_written(results: dict[str, dict[str, Any]]) -> None:
    assert results["swiglu"]["status"] == 0
    assert "activation=recompute" in results["swiglu"]["printed"]
    assert "activation=recompute: activation is swiglu" in results["swiglu"]["printed"]
    assert results["swiglu in place"]["status"] == 2
    (line,) = results["swiglu in place"]["complaints"].splitlines()
    assert line.startswith("run_megatron.py: --use-tempo: activation is swiglu")


@pytest.mark.slow
def test_values_beside_a_spec_whose_layers_choose_are_refused(results: dict[str, dict[str, Any]]) -> None:
    assert results["a second choice"]["status"] == 2
    (line,) = results["a second choice"]["complaints"].splitlines()
    assert line.startswith(
        "run_megatron.py: --use-tempo: the spec is one of TempoTransformerLayer, whose layers choose"
    )


_SCRIPT = """
import argparse, sys
import megatron.core
from megatron.training import arguments

parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
args = parser.parse_args()
print(__name__, megatron.core.__file__, args.use_tempo, args.num_layers, args.local_rank)
"""


@pytest.mark.slow
def test_the_launcher_runs_a_script_as_main_with_the_checkouts_megatron(megatron_root: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT, encoding="utf-8")
    command = [sys.executable, str(ROOT / "launch" / "run_megatron.py"), "--local_rank=1"]
    command += ["--megatron-root", str(megatron_root), str(script), "--num-layers", "7", "--use-tempo"]
    (tmp_path / "sitecustomize.py").write_text(SITE, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    expected = ["__main__", str(megatron_root / "megatron/core/__init__.py"), "True", "7", "1"]
    assert found.stdout.split() == expected

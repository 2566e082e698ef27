"""What a run of the unmodified pretrain_gpt.py says and does: its banner and report, a memory budget, the ledger."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from megatron_runs import Run, run_all

pytestmark = pytest.mark.slow

Results = dict[str, dict[str, Any]]
ADAM = "--train-iters 2 --optimizer adam --lr 1e-3 --seq-length 64 --micro-batch-size 4 --global-batch-size 4"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
# What a ledger watches, from what keeps least on.
WAYS = {"tempo": "--use-tempo", "selective": "--recompute-activations", "stock": ""}


@pytest.fixture(scope="module")
def folder(megatron_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In which the runs leave files."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, megatron_root: Path, folder: Path) -> Results:
    """Short runs of one process, by name."""
    is_exhaustive = request.config.getoption("--exhaustive")
    deepspeed = folder / "ds.json"
    deepspeed.write_text('{"train_batch_size": 8, "tempo": {"norm": "recompute"}}')
    watched, tempo = ("keep_what_was_replaced",), "--train-iters 1 --use-tempo"
    budget = f"{ADAM} --use-tempo --tempo-memory-budget"
    a_spec = "--spec tempo_megatron.slots.named_specs tempo_layer"
    runs = [
        Run("help", "--help", changes=("mend_help",)),
        Run("stock", "--train-iters 1", changes=watched),
        Run("tempo", f"{tempo} --tempo-report {folder}/report.json", changes=watched, measures_kept_bytes=True),
        Run("faulty", tempo, changes=("turn_heads",)),
        Run("mask given", f"{tempo} --reset-attention-mask --tempo-check off"),
        Run(
            "deepspeed", f"--train-iters 1 --deepspeed_config {deepspeed} --local_rank=0 --tempo-attention off --swiglu"
        ),
        Run("a second choice", f"{tempo} {DROPOUT} --tempo-norm off {a_spec}"),
        Run("swiglu in place", f"{tempo} --swiglu --tempo-activation inplace"),
        Run("unplanned", ADAM),
        Run("offloaded, seen", f"{ADAM} {DROPOUT} --use-tempo --tempo-offload all --tempo-ledger {folder}/offloaded"),
        Run("narrow", f"{budget} 12.3MB --tempo-host-memory 1MiB --tempo-report {folder}/planned.json"),
        Run("sgd", f"{tempo} --tempo-memory-budget 1GiB"),
    ]
    # A ledger takes seconds; of Tempo that of the layers that offload does.
    seen, not_seen = (WAYS, WAYS) if is_exhaustive else (("stock",), ("tempo", "stock"))
    runs += [Run(f"{name}, not seen", f"{ADAM} {DROPOUT} {WAYS[name]}") for name in not_seen]
    runs += [Run(f"{name}, seen", f"{ADAM} {DROPOUT} {WAYS[name]} --tempo-ledger {folder}/{name}") for name in seen]
    if is_exhaustive:
        full = "--recompute-granularity full --recompute-method block --recompute-num-layers 2"
        runs += [Run("recomputed", f"{budget} 1GiB {full}"), Run("impossible", f"{budget} 1MiB")]
        runs += [Run("wide", f"{budget} 1GiB")]
    (rank,) = run_all(megatron_root, 1, runs, folder)
    return rank


def test_help_lists_the_tempo_group_beside_megatrons(results: Results) -> None:
    printed = results["help"]["printed"]
    assert results["help"]["status"] == 0
    for option in ("--num-layers", "--use-tempo", "--tempo-config", "--tempo-report", "--tempo-norm"):
        assert option in printed


def test_without_use_tempo_nothing_but_the_argument_parser_is_replaced(results: Results) -> None:
    assert results["stock"]["replaced"] == ["add_megatron_arguments"]
    assert "GPTModel.__init__" in results["tempo"]["replaced"]
    assert "tempo:" not in results["stock"]["printed"]


def test_the_banner_and_the_report_say_what_was_replaced(results: Results, folder: Path) -> None:
    printed, report = results["tempo"]["printed"], json.loads((folder / "report.json").read_text())
    assert f"tempo: Megatron-core {report['megatron_core']} at " in printed
    assert "slots replaced: activation 4 of 4, norm 9 of 9, dropout 9 of 9, attention 4 of 4, loss 1 of 1" in printed
    (model,) = report["models"]
    assert model["model"] == "GPTModel"
    assert model["slots"]["norm"] == {"tempo": 9, "all": 9}
    assert [name for name, value in model["tempo"].items() if value == "auto"] == ["check"]
    assert model["attention_mask_left_out"]
    kept = report["kept_bytes_per_layer"]
    assert 0 < kept["tempo"] < kept["stock"]
    assert f"stock {kept['stock']:,}, Tempo {kept['tempo']:,}" in printed
    (line,) = report["checks"]
    assert line.startswith("checked: output and 13 gradients of decoder.layers.0 equal stock's within ")
    assert f"tempo: {line}\n" in printed and "checked: " not in results["mask given"]["printed"]


def test_a_layer_that_differs_from_stock_ends_the_run_in_one_sentence(results: Results) -> None:
    (line,) = results["faulty"]["complaints"].splitlines()
    assert results["faulty"]["status"] == 2 and line.startswith("run_megatron.py: --use-tempo: at dropout 0 the ")
    assert line.endswith("; train with --tempo-attention off")


def test_the_block_of_a_deepspeed_json_counts_and_what_cannot_be_had_adapts_unless_it_was_written(
    results: Results,
) -> None:
    """The deepspeed launcher's own argument is taken, too."""
    assert results["deepspeed"]["status"] == 0
    assert "norm=recompute" in results["deepspeed"]["printed"]
    assert "activation=recompute: activation is swiglu" in results["deepspeed"]["printed"]


def test_no_mask_is_made_where_attention_is_tempos_and_causal(results: Results) -> None:
    # A mask that hides more than the future, and one for stock's attention, stay.
    given = [name for name in ("tempo", "mask given", "deepspeed") if "is given no mask" in results[name]["printed"]]
    assert given == ["tempo"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("swiglu in place", "activation is swiglu"),
        ("a second choice", "the spec is one of TempoTransformerLayer, whose layers choose"),
        ("sgd", "memory budget: the run has the optimizer sgd, and what is known is adam; leave the memory budget out"),
        pytest.param(
            "impossible",
            "memory budget: 1.00 MiB a GPU may be filled, and the least that fits is",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(results: Results, name: str, sentence: str) -> None:
    assert results[name]["status"] == 2
    (line,) = results[name]["complaints"].splitlines()
    assert line.startswith(f"run_megatron.py: --use-tempo: {sentence}")


def read_plan(printed: str) -> list[str]:
    return [line.removeprefix("tempo: plan: ") for line in printed.splitlines() if line.startswith("tempo: plan: ")]


def check_plan(results: Results, name: str) -> str:
    """The values of a plan, which changes no loss."""
    first, values, recomputed = read_plan(results[name]["printed"])
    assert re.match(r"budget \S+ [GM]iB, estimated peak \S+ MiB, shortest by the rates of ", first)
    assert values.startswith("activation=")
    assert recomputed == "recomputed by Megatron: none, as written: it is not planned here"
    assert results[name]["losses"] == pytest.approx(results["unplanned"]["losses"], rel=1e-4)
    assert f"tempo: GPTModel, {values}" in results[name]["printed"]
    return values


def test_a_budget_is_a_plan_that_changes_no_loss(results: Results) -> None:
    check_plan(results, "narrow")


@pytest.mark.exhaustive
def test_another_budget_is_another_plan(results: Results) -> None:
    assert check_plan(results, "wide") != check_plan(results, "narrow")


@pytest.mark.exhaustive
def test_recomputation_stays_as_written(results: Results) -> None:
    lines = read_plan(results["recomputed"]["printed"])
    assert lines[-1].startswith("recomputed by Megatron: the first 2 layers of every stage as a whole, as written")


def test_layers_that_offload_have_the_losses_of_those_that_keep(results: Results, folder: Path) -> None:
    offloaded = results["offloaded, seen"]
    assert offloaded["losses"] == results["tempo, not seen"]["losses"] and len(offloaded["losses"]) == 2
    assert "tempo: offload: 4 layers of this rank move what they keep to host memory, which the" in offloaded["printed"]
    assert re.search(r"to [\d.]+ [KM]iB of host memory, and no more than [\d.]+ [KM]iB of it", offloaded["printed"])
    ledger = json.loads((folder / "offloaded.stage0.json").read_text())
    on_host = sum(kind["host_bytes"] * kind["num_layers"] for kind in ledger["layers"])
    # In the pool each tensor begins at a block of 256 bytes.
    assert 0.99 * ledger["host_pool_bytes"] <= on_host <= ledger["host_pool_bytes"]
    assert max(json.loads((folder / "offloaded.stage0.timeline.json").read_text())["on_host"]) > 0


def test_runs_whose_first_steps_are_seen_keep_their_losses(results: Results, folder: Path) -> None:
    kept = []
    for name in ("offloaded", *WAYS):
        if (seen := results.get(f"{name}, seen")) is None:
            continue
        assert seen["error"] is None and seen["status"] == 0
        assert seen["losses"] == results[f"{name.replace('offloaded', 'tempo')}, not seen"]["losses"]
        found = json.loads((folder / f"{name}.stage0.json").read_text())
        kept.append(found["layers"][0]["num_bytes"])
        assert "ledger of this run's first micro batch, stage 0" in seen["printed"]
        assert found["stock"] and found["standing"]["gradients"] == found["standing"]["weights"]
    assert len({*kept}) >= 2 and kept == sorted(kept)


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

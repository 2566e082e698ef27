"""Rows of the ledger that the planner predicts from a few measured layers: the witness counts the same, row by row."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import exhaustive
from kept_formula import list_layer_rows, make_layer
from peak_cases import LLAMA as LLAMA_FORM

from tempo_megatron import TempoConfig
from tempo_megatron.cli import main
from tempo_megatron.memory.plan import kept_rows
from tempo_megatron.memory.plan.kept_rows import Rows, Values, complete, measure_rows, measure_stock_layer
from tempo_megatron.memory.run import Run
from tempo_megatron.models.shape import make_shape
from tempo_megatron.settings.layer_values import LAYER_OPERATIONS

QWEN = Path(__file__).parents[2] / "configs" / "model" / "qwen3_0.6b.json"
SIZES: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}
LLAMA = {**SIZES, **LLAMA_FORM}
MODELS: dict[str, dict[str, Any]] = {
    "GPT": SIZES,
    "BERT": {**SIZES, "family": "bert"},
    "Llama": LLAMA,
    "Llama of one group, a window": {**LLAMA, "num_query_groups": 1, "window_size": (8, 0)},
    "squared ReLU": {**SIZES, "activation": "squared_relu", "hidden_dropout": 0.0},
}
LAYOUTS: dict[str, dict[str, Any]] = {"": {}, "TP 2 + SP": {"tensor_parallel": 2, "sequence_parallel": True}}


def make_run(model: str, **settings: Any) -> Run:
    return Run(model=make_shape(**MODELS[model]), tempo=TempoConfig(), micro_batch_size=2, stock="cpu", **settings)


def make_config(choice: Values) -> TempoConfig:
    return dataclasses.replace(TempoConfig.off(), **dict(zip(LAYER_OPERATIONS, choice, strict=True)))


@pytest.mark.parametrize(
    ("model", "layout", "recompute"),
    [
        ("GPT", "TP 2 + SP", ()),
        ("BERT", "", ("core_attn",)),
        ("Llama", "TP 2 + SP", ("core_attn",)),
        ("Llama", "", ("full",)),
        ("squared ReLU", "", ("mlp",)),
        ("Llama of one group, a window", "", ()),
        *exhaustive(("Llama", "", ()), ("BERT", "", ("core_attn", "mlp")), ("GPT", "", ("full",))),
    ],
)
def test_rows_are_those_of_the_formula(model: str, layout: str, recompute: tuple[str, ...]) -> None:
    run = make_run(model, **LAYOUTS[layout], recompute=recompute)
    found, layer = measure_rows(run, recompute), make_layer(run)
    assert len(found.measured) < len(found.rows) / 4
    for choice, rows in found.rows.items():
        counted: dict[str, int] = {}
        for row in list_layer_rows(layer, make_config(choice)):
            counted[row.operation] = counted.get(row.operation, 0) + row.num_bytes
        found_of_row: dict[str, int] = {}
        for title, num_bytes in rows.items():
            title = title.removesuffix(", small")
            found_of_row[title] = found_of_row.get(title, 0) + num_bytes
        assert found_of_row == counted, choice


def test_a_projection_that_would_save_nothing_is_no_choice_and_counts_as_stock() -> None:
    rows, off = measure_rows(make_run("Llama"), ()), ("off",) * 7
    again = (*off[:5], "recompute", "off")
    assert off in rows.rows and again not in rows.rows
    assert rows.count(make_config(again)) == rows.count(make_config(off))


def test_flash_attention_keeps_its_output_twice() -> None:
    run = dataclasses.replace(make_run("Llama"), stock="transformer_engine")
    flash, fused = (
        sum(measure_stock_layer(dataclasses.replace(run, stock_attention=attention)).values())
        for attention in ("flash", "fused")
    )
    assert flash - fused == 2 * 32 * 64 * 2


OPERATIONS = [("off", "on")] * 3 + [("off", "a", "b")]
CHOICES: list[Values] = list(itertools.product(*OPERATIONS))


def count(choices: Sequence[Values], asked: list[Values], *, is_chaos: bool) -> list[Rows]:
    asked += choices
    together = [CHOICES.index(choice) if is_chaos else choice[:3].count("on") ** 2 for choice in choices]
    return [{"three": number, "one": len(choice[3])} for number, choice in zip(together, choices, strict=True)]


@pytest.mark.parametrize("is_chaos", [False, True])
def test_what_cannot_be_predicted_is_measured(is_chaos: bool) -> None:
    asked: list[Values] = []
    rows, measured = complete(CHOICES, lambda choices: count(choices, asked, is_chaos=is_chaos))
    assert [rows[choice] for choice in CHOICES] == count(CHOICES, [], is_chaos=is_chaos)
    assert len(asked) == len(set(asked)) and measured == set(asked)
    assert (len(asked) == len(CHOICES)) is is_chaos


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [(), *exhaustive([("core_attn",)])])
def test_norms_of_queries_and_keys_are_predicted_to_the_byte(recompute: tuple[str, ...]) -> None:
    model = make_shape(**LLAMA, qk_layernorm=True, kv_channels=32, vocab_size=1)
    run = Run(model=model, tempo=TempoConfig.off(), stock="cpu", dtype=torch.float32, recompute=recompute)
    found = measure_rows(run, recompute)
    measured, _ = kept_rows._measure_layers(run, list(found.rows))
    assert list(found.rows.values()) == measured


@pytest.mark.slow
def test_a_qwen_is_planned_estimated_and_measured_from_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a fraction of its length, of two layers, which say what all of them keep."""
    model = tmp_path / "qwen.json"
    model.write_text(json.dumps({**json.loads(QWEN.read_text()), "num_layers": 2, "seq_length": 512}))
    files = {command: tmp_path / f"{command}.json" for command in ("plan", "estimate", "ledger")}
    gpu = ["--gpu=h100", "--gpu-memory=4650MiB", "--recompute-allowed", "--micro-batch-size=8"]
    assert main(["plan", f"--model={model}", f"--json={files['plan']}", *gpu]) == 0
    assert "linear_qkv" in capsys.readouterr().out
    plan = json.loads(files["plan"].read_text())
    tempo = [f"--deepspeed_config={files['plan']}", "--micro-batch-size=8"]
    assert main(["ledger", f"--model={model}", f"--json={files['ledger']}", *tempo]) == 0
    rows = json.loads(files["ledger"].read_text())["stock"]["rows"]
    assert rows["q_layernorm"] > 0 and rows["k_layernorm"] > 0
    layers = json.dumps(plan["tempo"].pop("layers", {}))
    values = [f"--tempo-{name.replace('_', '-')}={value}" for name, value in plan["tempo"].items()]
    estimate = ["estimate", f"--model={model}", "--micro-batch-size=8", f"--json={files['estimate']}"]
    assert main([*estimate, "--use-tempo", *values, f"--tempo-layers={layers}"]) == 0
    (stage,), (rank,) = plan["stages"], json.loads(files["estimate"].read_text())["tempo"]
    assert stage["peak_bytes"] == rank["peak_bytes"] <= 4650 * 2**20


def test_an_mlp_in_tiles_is_planned_where_it_is_written_and_keeps_what_a_recomputed_one_does() -> None:
    found = [
        measure_rows(dataclasses.replace(make_run("GPT"), tempo=tempo), ()).rows
        for tempo in (TempoConfig(linear_fc1="tile"), TempoConfig())
    ]
    tiles = {values: rows for values, rows in found[0].items() if "tile" in values}
    assert tiles and not any("tile" in values for values in found[1])
    for values, rows in tiles.items():
        again = found[1][tuple("recompute" if value == "tile" else value for value in values)]
        assert sum(rows.values()) == sum(again.values())

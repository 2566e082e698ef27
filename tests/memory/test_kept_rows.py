"""Rows of the ledger that the planner measures: the witness counts the same, row by row, and the ladder holds."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
from typing import Any

import pytest
from covering import exhaustive
from kept_formula import list_layer_rows, make_layer
from peak_cases import LLAMA as LLAMA_FORM
from runs import build_run

from tempo_megatron import TempoConfig
from tempo_megatron.memory.plan.choices import (
    LADDER,
    Values,
    list_values,
    measure_rows,
    replace_value,
)
from tempo_megatron.memory.plan.gpu import read_gpu
from tempo_megatron.memory.plan.planner import Planner, PlanRequest
from tempo_megatron.memory.run import Run
from tempo_megatron.models.shape import make_shape
from tempo_megatron.settings.layer_values import LAYER_OPERATIONS

SIZES: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}
LLAMA = {**SIZES, **LLAMA_FORM}
MODELS: dict[str, dict[str, Any]] = {
    "GPT": SIZES,
    "BERT": {**SIZES, "family": "bert"},
    "Llama": LLAMA,
    "Llama of one group, a window": {**LLAMA, "num_query_groups": 1, "window_size": (8, 0)},
    "squared ReLU": {**SIZES, "activation": "squared_relu", "hidden_dropout": 0.0},
}
LAYOUTS: dict[str, dict[str, Any]] = {"": {}, "TP 2 + SP": {"tp": 2, "sp": True}}


def make_run(model: str, **settings: Any) -> Run:
    return build_run(
        model=make_shape(**MODELS[model]), tempo=TempoConfig(), micro_batch_size=2, stock="cpu", **settings
    )


def make_config(choice: Values) -> TempoConfig:
    return dataclasses.replace(TempoConfig.off(), **dict(zip(LAYER_OPERATIONS, choice, strict=True)))


@pytest.mark.parametrize(
    ("model", "layout", "recompute"),
    [
        ("GPT", "TP 2 + SP", ()),
        ("BERT", "", ("core_attn",)),
        ("Llama", "", ("full",)),
        ("squared ReLU", "", ("mlp",)),
        ("Llama of one group, a window", "", ()),
        *exhaustive(("Llama", "TP 2 + SP", ("core_attn",)), ("BERT", "", ("core_attn", "mlp")), ("GPT", "", ("full",))),
    ],
)
def test_rows_are_those_of_the_formula_and_the_ladder_holds(
    model: str, layout: str, recompute: tuple[str, ...]
) -> None:
    run = make_run(model, **LAYOUTS[layout], recompute=recompute)
    found, layer, modules = measure_rows(run), make_layer(run), frozenset(recompute)
    values = list_values(run)
    every = itertools.product(*(values[name] for name in LAYER_OPERATIONS))
    possible = [choice for choice in every if found.is_possible(modules, choice)]
    taken = random.Random(0).sample(possible, 16)
    lower = {
        replace_value(choice, name, value): choice
        for choice, (name, ladder) in itertools.product(taken[:6], LADDER.items())
        for value in ladder[ladder.index(choice[LAYER_OPERATIONS.index(name)]) + 1 :]
        if value in values[name]
    }
    lower = {choice: before for choice, before in lower.items() if found.is_possible(modules, choice)}
    measured = dict(zip([*taken, *lower], found.measure(modules, [*taken, *lower]), strict=True))
    for choice in taken:
        counted = collections.Counter[str]()
        for row in list_layer_rows(layer, make_config(choice)):
            counted[row.operation] += row.num_bytes
        assert {row.operation: row.num_bytes for row in measured[choice]} == counted, choice
    for choice, before in lower.items():
        now, then = (sum(row.num_bytes for row in measured[each]) for each in (choice, before))
        assert now <= then, (choice, before)


def test_a_projection_that_would_save_nothing_is_no_choice_and_counts_as_stock() -> None:
    rows, off, plain = measure_rows(make_run("Llama")), ("off",) * 7, frozenset[str]()
    again = replace_value(off, "linear_qkv", "recompute")
    assert rows.is_possible(plain, off) and not rows.is_possible(plain, again)
    assert rows.count(plain, [again]) == rows.count(plain, [off])


def test_an_mlp_in_tiles_is_planned_where_it_is_written_and_keeps_what_a_recomputed_one_does() -> None:
    tiled = dataclasses.replace(make_run("GPT"), tempo=TempoConfig(linear_fc1="tile"))
    again = replace_value(("off",) * 7, "linear_fc1", "recompute")
    tiles = replace_value(again, "linear_fc1", "tile")
    assert "tile" not in list_values(make_run("GPT"))["linear_fc1"]
    rows = measure_rows(tiled)
    assert rows.count(frozenset(), [tiles]) == rows.count(frozenset(), [again])
    tiled = dataclasses.replace(tiled, model=dataclasses.replace(tiled.model, vocab_size=128))
    plan = Planner(PlanRequest(run=tiled, gpu=read_gpu("h100"), fixed_sizes=(1,))).plan(10**12)
    assert plan.block["linear_fc1"] == "tile"

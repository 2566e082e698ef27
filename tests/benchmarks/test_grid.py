"""A case of few layouts of the grid, with --exhaustive one of every pair of values, and what the grid is made of."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from compatibility import Results, describe_versions, read_results, run
from covering import exhaustive
from grid.cases import (
    CHOICES,
    LAYOUTS,
    RULES,
    SEQUENCE_LAYOUTS,
    SEQUENCE_RULES,
    Case,
    Layout,
    choose_pairwise,
    choose_sample,
    choose_sequences,
    find_rule,
    list_cases,
    list_pairs,
    list_product,
    list_sequence_cases,
    list_sequence_product,
)
from grid.docs import format_docs
from grid.models import FAMILIES, RECOMPUTE, SEQUENCE_FAMILIES

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "compatibility.py"


FEW_LAYOUTS = (Layout(), Layout(4, True), Layout(2, False, 2), Layout(2, True, 2, 2))


def choose_one_of_few_layouts() -> list[Case]:
    """Among them they have every size that a layout has."""
    return list({case.layout: case for case in choose_sample() if case.layout in FEW_LAYOUTS}.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "choose", [choose_one_of_few_layouts, *exhaustive([choose_sample], [choose_pairwise], [choose_sequences])]
)
def test_what_is_chosen_holds(choose: Callable[[], list[Case]], tmp_path: Path) -> None:
    # In a process of its own: the server that the pool is forked from answers as a GPU, which no other test's may.
    cases, path = choose(), tmp_path / "grid.jsonl"
    process = multiprocessing.get_context("spawn").Process(target=run, args=(cases, path, 1))
    process.start()
    process.join()
    assert process.exitcode == 0
    # Once more, and nothing is left to run.
    before = path.read_text()
    found = run(cases, path, 1)
    assert path.read_text() == before
    assert {key: result for key, result in found.items() if result["status"] == "failed"} == {}
    assert {result["status"] for result in found.values()} <= {"passed", "refused"}
    assert max(result.get("bytes_off", 0.0) for result in found.values()) <= 0.01


def test_the_subset_covers_every_pair_that_can_meet() -> None:
    chosen = choose_pairwise()
    assert len(chosen) < 80
    assert list_pairs(chosen) == list_pairs(list_cases())


def test_the_sample_has_every_layout_and_every_pair_of_the_other_axes_values() -> None:
    sample, cases = choose_sample(), list_cases()
    assert len(sample) <= 24
    assert {case.layout for case in sample} == {case.layout for case in cases}
    met, can_meet = (
        list_pairs(dataclasses.replace(case, layout=Layout()) for case in some) for some in (sample, cases)
    )
    assert met == can_meet


def test_every_combination_is_a_case_or_has_a_rule() -> None:
    product = list_product()
    assert len(product) == len(set(product)) == len(FAMILIES) * len(LAYOUTS) * len(RECOMPUTE) * len(CHOICES) * 4
    rules = [find_rule(case) for case in product]
    assert {rule.name for rule in rules if rule} == {rule.name for rule in RULES}
    assert sum(rule is None for rule in rules) == len(list_cases()) > len(product) / 2


def test_every_way_of_context_parallelism_meets_every_model_with_packed_rows_and_without() -> None:
    product, cases = list_sequence_product(), list_sequence_cases()
    left_out = [case for case in product if case not in cases]
    assert {find_rule(case, SEQUENCE_RULES) for case in left_out} == set(SEQUENCE_RULES)
    assert all(case.layout.pp > 1 for case in left_out)
    assert {layout.cp for layout in SEQUENCE_LAYOUTS} == {1, 2, 4, 8}
    for layout in SEQUENCE_LAYOUTS:
        assert layout.pp > 1 or sum(case.layout == layout for case in cases) == len(SEQUENCE_FAMILIES) * 2 * 2
    chosen = choose_sequences()
    assert len(chosen) <= 60
    met, can_meet = (
        {pair for case in some for pair in itertools.combinations(case.sequence_values, 2)} for some in (chosen, cases)
    )
    assert met == can_meet


def test_no_rule_leaves_out_what_tempo_does() -> None:
    """A rule is about a layout of a family, which stock cannot have either, or about stock alone."""
    for rule in RULES:
        ruled = [case for case in list_product() if find_rule(case) is rule]
        if {case.choice for case in ruled} == {"off"}:
            continue
        places = {(case.family, case.layout) for case in ruled}
        assert all(find_rule(case) for case in list_product() if (case.family, case.layout) in places)


CASE = Case("GPT", Layout(2, True), "full", "auto", 0.1, "bf16")


def test_results_outlast_a_killed_run(tmp_path: Path) -> None:
    path = tmp_path / "grid.jsonl"
    Results(path).add(CASE, {"status": "passed", "ratio": 0.123456, "worst": "the losses"})
    with path.open("a") as file:
        file.write('{"case": "GPT | TP 2 |')
    expected = {"status": "passed", "ratio": 0.123, "worst": "the losses"}
    assert read_results(path) == {CASE.key: expected}
    other = Case("T5", Layout(), "none", "off", 0.0, "fp32")
    Results(path).add(other, {"status": "failed", "message": "words"})
    assert read_results(path)[other.key] == {"status": "failed", "message": "words"}
    assert read_results(path)[CASE.key] == expected


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_killed_run_leaves_no_process_behind(tmp_path: Path) -> None:
    output = tmp_path / "grid.jsonl"
    # Stock with dropout is held against no run on one process: its first result comes at once.
    command = [sys.executable, str(SCRIPT), "--full", "--output", str(output), "--only", "| off | p 0.1 |"]
    grid = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    children: set[psutil.Process] = set()
    # The first result: every process of the pool runs.
    while time.monotonic() < deadline and not (output.exists() and len(read_results(output)) > 0):
        assert grid.poll() is None
        children.update(psutil.Process(grid.pid).children(recursive=True))
        time.sleep(0.5)
    grid.kill()
    grid.wait()
    assert len(children) >= 4
    while time.monotonic() < deadline and any(map(is_alive, children)):
        time.sleep(0.1)
    assert not any(map(is_alive, children))


def test_results_of_other_versions_are_not_added_to(tmp_path: Path) -> None:
    path = tmp_path / "grid.jsonl"
    path.write_text(json.dumps({"versions": {"torch": "1.0"}}) + "\n")
    with pytest.raises(ValueError, match="holds results of .*1.0.*; expected .*; give another --output or delete it"):
        read_results(path)


@pytest.mark.slow
def test_the_table_says_what_holds_fails_is_refused_and_was_not_run() -> None:
    refused = Case("Llama", Layout(), "none", "inplace", 0.0, "fp32")
    failed = Case("BERT", Layout(), "none", "auto", 0.0, "fp32")
    packed = Case("MLA", Layout(2, True, cp=4, comm_type="a2a+p2p"), "none", "auto", 0.0, "bf16", "packed")
    results = {
        packed.key: {"status": "passed", "ratio": 0.2, "worst": "the losses", "bytes_off": 0.0},
        CASE.key: {"status": "passed", "ratio": 0.25, "worst": "the losses", "bytes_off": 0.0},
        refused.key: {"status": "refused", "message": "no"},
        failed.key: {"status": "failed", "message": "Traceback\nValueError: why"},
    }
    text = format_docs(results, describe_versions())
    models, _, sequences = text.partition("## Context parallelism")
    assert "| TP 2 + SP | 1, 59 ?, e | d | 60 ?, e | 64 ? |" in models
    assert "| TP 1 | 60 ?, e | 1 F, 59 ?, e | 60 ?, e | 1 R, 63 ? |" in models
    assert "| TP 2 + SP, CP 4 a2a+p2p | 4 ? | 4 ? | 1, 3 ? | 4 ? |" in sequences
    assert f"- {failed.key}: ValueError: why" in text
    assert "1 failed, " in text and "2 passed, 1 refused" in text and "not run" in text


@pytest.mark.slow
def test_the_document_in_the_tree_is_that_of_the_results_in_the_tree() -> None:
    path = ROOT / "benchmarks" / "results" / "cpu" / "grid.jsonl"
    header, *lines = path.read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    results = {record.pop("case"): record for record in records}
    text = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert text == format_docs(results, json.loads(header)["versions"])
    assert {result["status"] for result in results.values()} == {"passed", "refused"}

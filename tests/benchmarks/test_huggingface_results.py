"""What docs/huggingface.md shows is what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed; pip install tempo-megatron[test]")

import huggingface_models
import huggingface_versions
import transformers_cases

from tempo_torch.versions import OLDEST_VERSIONS


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_table_of_the_document_is_that_of_the_results():
    assert huggingface_models.make_table(read(huggingface_models.RESULTS)) in huggingface_models.DOCUMENT.read_text(
        "utf-8"
    )


def test_the_results_are_of_the_architectures_that_the_benchmark_builds():
    records = read(huggingface_models.RESULTS)
    assert [record["architecture"] for record in records] == list(huggingface_models.MODELS)
    assert list(transformers_cases.CASES) == list(huggingface_models.MODELS)[: len(transformers_cases.CASES)]


def test_a_model_is_repeatable_unless_its_report_says_what_draws():
    for row in read(huggingface_models.RESULTS):
        draws = any("draws from torch's generator" in why for why in row["left"])
        assert row["repeatable"] != draws and row["p0"] < 2e-5, row["architecture"]


@pytest.mark.parametrize("name", ["Falcon", "Cohere", "Mixtral"])
def test_a_model_is_what_its_row_says(name):
    (row,) = (row for row in read(huggingface_models.RESULTS) if row["architecture"] == name)
    found = huggingface_models.examine(huggingface_models.MODELS[name])
    assert {key: found[key] for key in ("repeatable", "left", "stock_sbh", "tempo_sbh")} == {
        key: row[key] for key in ("repeatable", "left", "stock_sbh", "tempo_sbh")
    }
    assert found["p0"] < 2e-5 > row["p0"]


def test_the_table_of_versions_is_that_of_the_results_and_they_are_of_every_set():
    records = read(huggingface_versions.RESULTS)
    assert f"{huggingface_versions.BEGIN}{huggingface_versions.make_table(records)}\n{huggingface_versions.END}" in (
        huggingface_versions.DOCUMENT.read_text("utf-8")
    )
    for record, versions in zip(records, huggingface_versions.SETS, strict=True):
        assert huggingface_versions.is_of(record, versions) and record["passed"] > 0
    folder = Path(__file__).parents[1] / "tempoize"
    for file, _, test in (name.partition("::") for name in huggingface_versions.TESTS):
        assert f"def {test or 'test_'}" in (folder / file).read_text("utf-8")


def test_the_oldest_set_is_that_of_the_oldest_supported_versions_and_passes():
    oldest = read(huggingface_versions.RESULTS)[0]
    found = {package: ".".join(oldest["versions"][package].split(".")[:2]) for package in OLDEST_VERSIONS}
    assert found == OLDEST_VERSIONS and not oldest["failed"] and not oldest["skipped"]


def test_what_fails_with_a_set_of_versions_or_is_skipped_is_in_its_row():
    junit = """<testsuites><testsuite><testcase name="test_a"/>
        <testcase name="test_b[1]"><failure message="no"/></testcase>
        <testcase name="test_c"><skipped message="trl is not installed"/></testcase>
        <testcase name="test_d"><error message="no fixture"/></testcase></testsuite></testsuites>"""
    outcome = huggingface_versions.read_outcome(junit)
    assert outcome == {
        "passed": 1, "failed": ["test_b[1]", "test_d"], "skipped": ["test_c: trl is not installed"],
    }  # fmt: skip
    row = huggingface_versions.make_table([{"versions": {**huggingface_versions.SETS[0], "torch": "2"}, **outcome}])
    assert row.endswith("| 2 | 1 | test_b[1]<br>test_d | test_c: trl is not installed |")

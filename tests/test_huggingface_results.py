"""What docs/huggingface.md shows is what was measured, and the committed curves are as close as they are said to be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed; pip install tempo-megatron[test]")

import huggingface_finetune
import huggingface_kept


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_table_of_the_document_is_that_of_the_results():
    assert huggingface_kept.make_table(read(huggingface_kept.RESULTS)) in huggingface_kept.DOCUMENT.read_text("utf-8")


def test_the_results_are_of_the_architectures_that_are_tested():
    assert [record["architecture"] for record in read(huggingface_kept.RESULTS)] == list(huggingface_kept.CASES)


def test_the_curves_of_stock_and_tempo_differ_by_less_than_the_seeds_do():
    records = read(huggingface_finetune.RESULTS)
    assert len(records) == 2 * len(huggingface_finetune.SEEDS)
    assert {len(record["losses"]) for record in records} == {huggingface_finetune.STEPS}
    assert huggingface_finetune.find_distance(records) <= 1

"""Training a BERT and a RoBERTa: beside stock, in every layout, and going on from a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from training_job import MaskedData, Run, run, successful

NO_DROPOUT = ["--attention-dropout", "0", "--hidden-dropout", "0"]
BATCH = ["--global-batch-size", "4", "--train-iters", "6"]
TP2 = ["--tensor-model-parallel-size", "2"]
SP = [*TP2, "--sequence-parallel"]
ROBERTA = ["--bert-no-binary-head", "--masking", "tokens", "--short-seq-prob", "0"]
RELATIVE = 5e-6


@pytest.fixture(scope="module")
def stock(bert_data: MaskedData, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return successful(run(bert_data, tmp_path_factory.mktemp("stock"), *NO_DROPOUT, *BATCH, "--eval-iters", "1"))


@pytest.fixture(scope="module")
def tempo(bert_data: MaskedData, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return successful(run(bert_data, tmp_path_factory.mktemp("tempo"), *BATCH, "--use-tempo"))


def stage(number: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": number}}


def test_both_losses_are_reported_and_begin_where_a_fresh_model_does(stock: Run) -> None:
    steps = stock.of_kind("train")
    assert len(steps) == 6
    assert abs(steps[0]["lm_loss"] - math.log(512)) < 0.3 and abs(steps[0]["sop_loss"] - math.log(2)) < 0.2
    for record in (*steps, *stock.of_kind("validation")):
        assert record["loss"] == pytest.approx(record["lm_loss"] + record["sop_loss"], rel=1e-6)
    (validation,) = stock.of_kind("validation")
    assert validation["perplexity"] == pytest.approx(math.exp(validation["lm_loss"]))
    assert " | lm loss " in stock.output and " | sop loss " in stock.output


def test_tempo_has_stocks_losses_without_dropout(bert_data: MaskedData, stock: Run, tmp_path: Path) -> None:
    found = successful(run(bert_data, tmp_path, *NO_DROPOUT, *BATCH, "--use-tempo"))
    assert "loss=fused" in found.output and "loss=fused" not in stock.output
    for name in ("loss", "lm_loss", "sop_loss"):
        ours, theirs = ([record[name] for record in result.of_kind("train")] for result in (found, stock))
        assert ours == pytest.approx(theirs, rel=2e-5), name


LAYOUTS = {
    "TP 2": (2, TP2, stage(0)),
    "TP 2 + SP, ZeRO 1": (2, SP, stage(1)),
    "DP 2, ZeRO 1": (2, [], stage(1)),
    "DP 2, ZeRO 3": (2, [], stage(3)),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS])
def test_every_layout_has_the_losses_and_masks_of_one_process(
    name: str, bert_data: MaskedData, tempo: Run, tmp_path: Path
) -> None:
    world_size, extra, config = LAYOUTS[name]
    found = successful(run(bert_data, tmp_path, *BATCH, *extra, "--use-tempo", world_size=world_size, config=config))
    assert found.losses == pytest.approx(tempo.losses, rel=RELATIVE)


@pytest.mark.slow
def test_stock_trains_under_sequence_parallelism_too(bert_data: MaskedData, stock: Run, tmp_path: Path) -> None:
    found = successful(run(bert_data, tmp_path, *NO_DROPOUT, *BATCH, *SP, world_size=2))
    assert found.losses == pytest.approx(stock.losses, rel=RELATIVE)


@pytest.mark.parametrize("kind", ["bert", pytest.param("roberta", marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_one_that_was_not_stopped(kind: str, request: Any, tmp_path: Path) -> None:
    data = request.getfixturevalue(f"{kind}_data")
    options = [*BATCH, "--use-tempo", *(ROBERTA if kind == "roberta" else [])]
    whole = successful(run(data, tmp_path / "whole", *options))
    folder = str(tmp_path / "save")
    first = successful(run(data, tmp_path / "cut", *options, "--save", folder, "--exit-interval", "3"))
    second = successful(run(data, tmp_path / "rest", *options, "--load", folder))
    assert first.losses_hex + second.losses_hex == whole.losses_hex
    assert ("sop_loss" in whole.of_kind("train")[0]) == (kind == "bert")
    refused = run(data, tmp_path / "other", *options, "--load", folder, "--mask-prob", "0.2")
    assert refused.exit_codes == [1]
    assert "its masking is {'mask_prob': 0.15" in refused.output and "--mask-prob" in refused.output


def test_a_model_of_another_family_or_data_of_another_tokenizer_is_refused(
    bert_data: MaskedData, tmp_path: Path
) -> None:
    (tmp_path / "gpt.json").write_text('{"family": "gpt"}')
    found = run(bert_data, tmp_path, "--model", str(tmp_path / "gpt.json"))
    assert found.exit_codes == [1] and "is of the family gpt; expected bert" in found.output
    found = run(MaskedData(bert_data.prefix, family="gpt"), tmp_path / "gpt")
    assert found.exit_codes == [1]
    assert "was made with a BertWordPieceLowerCase; expected GPT2BPETokenizer" in found.output

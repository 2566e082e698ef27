"""What tempo-pretrain-bert takes besides: segments and masking, as Megatron-LM's arguments say them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tempo_megatron.training.run.arguments import parse_arguments
from tempo_megatron.training.run.checks import check_run
from tempo_megatron.training.run.deepspeed_config import read_deepspeed_config
from tempo_megatron.training.run.masking import Masking
from tempo_megatron.training.run.run_config import RunConfig, complete_run

SIZES = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"]
REST = ["--micro-batch-size", "2", "--train-iters", "10", "--lr", "1e-3", "--data-path", "text"]


def prepared(folder: Path, *extra: str, family: str = "bert") -> RunConfig:
    path = folder / "deepspeed.json"
    path.write_text("{}", encoding="utf-8")
    args = parse_arguments(["--deepspeed_config", str(path), *SIZES, *REST, *extra], family)
    run = complete_run(args, read_deepspeed_config(str(path)), None, world_size=1, on_gpu=False)
    check_run(run)
    return run


def test_the_defaults_are_megatrons(tmp_path: Path) -> None:
    run = prepared(tmp_path)
    assert run.masking == Masking(mask_prob=0.15, short_seq_prob=0.1, masking="words")
    assert (run.model.family, run.model.add_binary_head, run.model.num_tokentypes) == ("bert", True, 2)
    assert prepared(tmp_path, family="gpt").masking is None


def test_a_model_without_segments_is_said_by_argument_or_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps({"family": "bert", "add_binary_head": False}))
    for extra in (["--bert-no-binary-head"], ["--model", str(tmp_path / "model.json")]):
        run = prepared(tmp_path, *extra)
        assert (run.model.add_binary_head, run.model.num_tokentypes) == (False, 0)


WRONG = {
    "nothing to predict": (["--mask-prob", "0"], "--mask-prob 0 leaves nothing to predict"),
    "nothing to predict from": (["--mask-prob", "1"], "--mask-prob 1 leaves nothing to predict from"),
    "all and more": (["--mask-prob", "1.5"], "1.5 is not in [0, 1]"),
    "another masking": (["--masking", "spans"], "invalid choice: 'spans'"),
    "no room": (["--seq-length", "4"], "--seq-length 4 has no room for two segments"),
    "too short": (["--seq-length", "8"], "expected --mask-prob of at least 0.2, or --seq-length of at least 10"),
    "too few": (["--mask-prob", "1e-9"], "--mask-prob 1e-09 of the 61 tokens that --seq-length 64 has besides"),
    "merges alone": (["--merge-file", "m"], "--merge-file is given without --vocab-file"),
    "an argument of GPT": (["--eod-mask-loss"], "unrecognized arguments: --eod-mask-loss"),
}


@pytest.mark.parametrize(("extra", "words"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_is_one_sentence(tmp_path: Path, extra: list[str], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        prepared(tmp_path, *extra)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_word_piece_has_a_vocabulary_alone(tmp_path: Path) -> None:
    assert prepared(tmp_path, "--vocab-file", "vocab.txt").vocab_file == "vocab.txt"
    with pytest.raises(ValueError, match="--vocab-file is given without --merge-file"):
        prepared(tmp_path, "--vocab-file", "vocab.json", family="gpt")
    with pytest.raises(ValueError, match="unrecognized arguments: --mask-prob"):
        prepared(tmp_path, "--mask-prob", "0.2", family="gpt")

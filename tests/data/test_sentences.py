# ruff: noqa: RUF001 (full stops of other scripts)
"""Where a sentence ends, and that Megatron's masked dataset finds the sentences of a data set."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from prepared_data import prepare

from tempo_megatron.data.dataset_files import Sidecar, load_dataset_tokenizer
from tempo_megatron.data.sentences import LONGEST_SENTENCE, split_sentences

MASKED_TYPES = ["BertWordPieceLowerCase", "BertWordPieceCase", "RobertaBPETokenizer"]


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? Four… Five", ["One.", "Two!", "Three?", "Four…", "Five"]),
        ('He said "no." Then he left.', ['He said "no."', "Then he left."]),
        ("Dr. Who met J. Smith, e.g. in No. 5. Then", ["Dr. Who met J. Smith, e.g. in No. 5.", "Then"]),
        ("version 3.11 of www.python.org. it goes on", ["version 3.11 of www.python.org. it goes on"]),
        ("Wait... what? Yes!", ["Wait... what?", "Yes!"]),
        ("a title\n\nand text\n \nmore", ["a title", "and text", "more"]),
        ("Mr.\n\nblank line", ["Mr.", "blank line"]),
        ("一つ。二つ！三つ", ["一つ。", "二つ！", "三つ"]),
        ("line one\nline one too. (Next.) 7 is a number", ["line one\nline one too.", "(Next.)", "7 is a number"]),
        (" \n\n ", []),
    ],
)
def test_a_sentence_ends_where_the_rule_says(text: str, sentences: list[str]) -> None:
    assert split_sentences(text, "rule") == sentences


def test_the_lines_of_a_text_can_be_its_sentences() -> None:
    assert split_sentences("One. Two\n\n three \r\n", "lines") == ["One. Two", "three"]


def test_the_rule_takes_linear_time() -> None:
    for text in ("." * 400_000, '."' * 200_000, "\n" * 400_000, ". " * 200_000, "a." * 200_000, "!)" * 200_000):
        split_sentences(text, "rule")


def write(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    return path


def read_sentences(prefix: Path) -> list[list[str]]:
    """Every document's sentences as text, read by Megatron's own class."""
    data, tokenizer = IndexedDataset(str(prefix)), load_dataset_tokenizer(str(prefix))
    return [
        [tokenizer.detokenize(sentence) for sentence in data[int(first) : int(end)]]
        for first, end in pairwise(data.document_indices)
    ]


@pytest.mark.parametrize("kind", MASKED_TYPES)
def test_each_sentence_is_a_sequence_of_its_document(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", ["First one. Second two! Third", "\u200b", "other document"] * 20)
    prepare(tmp_path / "out", "--input", path, "--tokenizer-type", kind, "--split-sentences")
    found = read_sentences(tmp_path / "out")
    if kind == "RobertaBPETokenizer":
        assert found == [["First one.", "Second two!", "Third"], ["\u200b"], ["other document"]] * 20
    else:
        small = kind.endswith("LowerCase")
        expected = [["First one.", "Second two!", "Third"], ["other document"]] * 20
        assert found == ([[s.lower() for s in document] for document in expected] if small else expected)
    sidecar = Sidecar.read(str(tmp_path / "out"))
    assert sidecar is not None
    assert (sidecar.tokenizer_type, sidecar.split_sentences) == (kind, "rule")
    assert sidecar.documents == len(found) and sidecar.sequences == sum(map(len, found))
    assert sidecar.left_out == ({} if kind == "RobertaBPETokenizer" else {"empty": 20})


def test_gpts_data_may_hold_sentences_too_and_end_with_the_end_of_document(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", ["One. Two.", "Three."])
    prepare(tmp_path / "out", "--input", path, "--split-sentences", "lines")
    data, tokenizer = IndexedDataset(str(tmp_path / "out")), load_dataset_tokenizer(str(tmp_path / "out"))
    assert [tokenizer.detokenize(ids[:-1]) for ids in data[0:2]] == ["One. Two.", "Three."]
    assert [int(ids[-1]) for ids in data[0:2]] == [tokenizer.eod] * 2


def test_a_sentence_that_megatron_would_pass_over_is_cut(tmp_path: Path) -> None:
    words = "word " * (2 * LONGEST_SENTENCE + 10)
    path = write(tmp_path / "in.jsonl", [f"A short one. {words}", "b"])
    prepare(tmp_path / "out", "--input", path, "--tokenizer-type", "BertWordPieceCase", "--split-sentences")
    data = IndexedDataset(str(tmp_path / "out"))  # it unmaps its lengths when it goes
    lengths = data.sequence_lengths
    assert max(lengths) == LONGEST_SENTENCE and lengths.sum() >= 2 * LONGEST_SENTENCE + 10


def test_a_document_that_lies_in_several_pieces_stays_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A sentence here.\n" * 50 + " \n" * 300)
    (tmp_path / "b.txt").write_text("Another one. And two.")
    files = (tmp_path / "a.txt", tmp_path / "b.txt")
    kind = ("--tokenizer-type", "BertWordPieceCase")
    prepare(tmp_path / "out", "--input", *files, *kind, "--split-sentences", piece_bytes=100)
    first, second = read_sentences(tmp_path / "out")
    assert [text for text in first if text] == ["A sentence here."] * 50
    assert second == ["Another one.", "And two."]


def test_another_rule_or_tokenizer_is_another_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "in.jsonl", ["One. Two.\nThree."] * 10)

    def make(*arguments: str) -> bool:
        prepare(tmp_path / "out", "--input", path, "--skip-existing", *arguments)
        return "is already there" in capsys.readouterr().out

    assert not make()
    assert make()
    assert not make("--split-sentences")
    assert not make("--split-sentences", "lines")
    assert make("--split-sentences", "lines")
    for kind in MASKED_TYPES:
        assert not make("--split-sentences", "lines", "--tokenizer-type", kind)
        assert make("--split-sentences", "lines", "--tokenizer-type", kind)


def test_data_of_another_tokenizer_than_the_reader_takes_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", ["One. Two."] * 10)
    prepare(tmp_path / "out", "--input", path, "--split-sentences", "--tokenizer-type", "BertWordPieceCase")
    with pytest.raises(ValueError, match="was made with a BertWordPieceCase; expected GPT2BPETokenizer, prepare the"):
        load_dataset_tokenizer(str(tmp_path / "out"), types=("GPT2BPETokenizer",))
    vocab = str(tmp_path / "out-vocab.txt")
    with pytest.raises(ValueError, match="--merge-file is given, but a BertWordPieceCase has only a vocabulary"):
        load_dataset_tokenizer(str(tmp_path / "out"), vocab, vocab)
    (tmp_path / "out.json").unlink()
    assert load_dataset_tokenizer(str(tmp_path / "out"), vocab, types=MASKED_TYPES).lowercase

"""WordPiece and RoBERTa's BPE: the ids of the library's own tokenizers, vocabularies that the text alone decides."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import BertWordPieceTokenizer

from tempo_megatron.data.tokenizer_types import (
    CasedWordPieceTokenizer,
    LowerCaseWordPieceTokenizer,
    RobertaTokenizer,
)

TEXTS = [
    "The tensor keeps every naïve value; tensors keep values.",
    "漢字 and 漢字, [MASK] <mask>",
    "keeping kept keeps",
]
TRICKY = [
    "",
    "Naïve TENSOR values",
    "[MASK] [CLS] <mask> <s>",
    "漢字x",
    "a" * 101,
    "\ufeff\t zero\u200bwidth",
    "##ed ed",
]
CLASSES = [LowerCaseWordPieceTokenizer, CasedWordPieceTokenizer]


@pytest.mark.parametrize("cls", CLASSES)
def test_word_piece_gives_the_ids_of_the_library(cls, tmp_path: Path) -> None:
    ours = cls.train(TEXTS * 5, 200, str(tmp_path))
    assert ours.vocab_size <= 200 and ours.pad == 0
    theirs = BertWordPieceTokenizer(str(tmp_path / "vocab.txt"), lowercase=cls.lowercase)
    for text in [*TEXTS, *TRICKY]:
        # Theirs takes the names of special tokens for these tokens; ours never makes one of a text.
        if not any(name in text for name in ours.special_tokens.values()):
            assert ours.tokenize(text) == theirs.encode(text, add_special_tokens=False).ids
        special = {ours.pad, ours.cls, ours.sep, ours.mask}
        assert not special & set(ours.tokenize(text))
    assert "keep" in ours.vocab and any(token.startswith("##") for token in ours.vocab)
    assert ours.tokenize((TEXTS[0] + " ") * 20_000) == ours.tokenize(TEXTS[0]) * 20_000


def test_words_begin_where_they_begin(tmp_path: Path) -> None:
    word_piece = LowerCaseWordPieceTokenizer.train(TEXTS * 5, 100, str(tmp_path))
    ids = word_piece.tokenize("tensors keep")
    starts = [word_piece.starts_word(token_id) for token_id in ids]
    assert starts[0] and sum(starts) == 2
    roberta = RobertaTokenizer.train(TEXTS * 5, 300, str(tmp_path))
    ids = roberta.tokenize("a tensor\nkeeps")
    text = [roberta.inv_vocab[token_id] for token_id in ids]
    assert [roberta.starts_word(token_id) for token_id in ids] == [token[0] in "ĠĊ" for token in text]


@pytest.mark.parametrize("name", ["LowerCaseWordPieceTokenizer", "RobertaTokenizer"])
def test_a_trained_vocabulary_depends_on_the_texts_alone(name: str, tmp_path: Path) -> None:
    # In another process, whose hash tables have another order.
    script = (
        f"import sys; from tempo_megatron.data.tokenizer_types import {name} as T; "
        f"print(T.train({TEXTS * 5!r}, 300, sys.argv[1]).unique_identifiers)"
    )
    found = set()
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        run = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True)
        found.add(run.stdout)
    assert len(found) == 1


def test_robertas_special_tokens_come_last_and_its_own_files_load(tmp_path: Path) -> None:
    trained = RobertaTokenizer.train(TEXTS * 5, 300, str(tmp_path))
    assert [trained.cls, trained.pad, trained.sep, trained.mask] == list(range(trained.vocab_size))[-4:]
    assert trained.detokenize(trained.tokenize(TEXTS[1])) == TEXTS[1]
    assert not {trained.cls, trained.mask} & set(trained.tokenize("<s> <mask>"))
    published = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 4, "Ġ": 5, "<mask>": 6}
    (tmp_path / "vocab.json").write_text(json.dumps(published), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    loaded = RobertaTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    assert (loaded.cls, loaded.pad, loaded.sep, loaded.mask, loaded.eod) == (0, 1, 2, 6, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n",
            r"has no special token \[MASK\]; add it",
        ),
        (b"[PAD]\na\na\n", "has the token 'a' twice"),
        (b"\xff\xfe", "is not UTF-8 text; --vocab-file takes BERT's vocab.txt"),
    ],
)
def test_a_broken_vocabulary_is_one_sentence(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        CasedWordPieceTokenizer(str(tmp_path / "vocab.txt"))

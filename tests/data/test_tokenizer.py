"""GPT-2's byte-level BPE: the ids of the library's own, of texts that are cut into parts, in linear time."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer, pre_tokenizers

from tempo_megatron.data import corpus
from tempo_megatron.data.tokenizer import (
    END_OF_TEXT,
    LARGEST_VOCABULARY,
    LONGEST_RUN,
    GPT2Tokenizer,
    cut_long_runs,
)

TEXT = "The quick brown fox doesn't jump over 123 lazy dogs.\n\n  def f(x):\n\treturn x  # naïve 漢字\r\n"
# White space of every kind beside letters, where cutting could go wrong.
TRICKY = st.text(alphabet="ab1.' \n\t\r\x0b\x1c\x85\xa0\u2003\u2028\u3000é漢😀<|", max_size=60)

# Every kind of character and what lies between two kinds: controls that only `re` takes for white space, numbers that
# are no digits, marks, contractions.
KINDS = st.text(alphabet="ab1½Ⅷ2 \n\t\x1c\x1f\x85\u3000.=_'s漢字é\u0301😀\u0e01\u0e33", max_size=60)


def repeat(times: list[int]) -> st.SearchStrategy[str]:
    """Up to four texts, each of a few characters so many times."""
    parts = st.lists(st.tuples(KINDS.filter(bool), st.sampled_from(times)), max_size=4)
    return parts.map(lambda parts: "".join(text[:4] * count for text, count in parts))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary")
    GPT2Tokenizer.train([TEXT * 20], 300, str(folder))
    return folder


@pytest.fixture(scope="module")
def tokenizer(trained: Path) -> GPT2Tokenizer:
    return GPT2Tokenizer(str(trained / "vocab.json"), str(trained / "merges.txt"))


def write_files(folder: Path, vocab: object, merges: str | bytes | None) -> tuple[str, str]:
    (folder / "vocab.json").write_text(vocab if isinstance(vocab, str) else json.dumps(vocab), encoding="utf-8")
    if merges is not None:
        (folder / "merges.txt").write_bytes(merges.encode() if isinstance(merges, str) else merges)
    return str(folder / "vocab.json"), str(folder / "merges.txt")


def byte_vocab() -> dict[str, int]:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END_OF_TEXT]
    return {token: token_id for token_id, token in enumerate(tokens)}


def test_training_gives_the_size_asked_for_or_what_the_text_can_fill(tokenizer: GPT2Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.vocab_size == len(tokenizer.vocab) == 300
    assert tokenizer.eod == tokenizer.vocab[END_OF_TEXT] == 299
    assert len(tokenizer.tokenize(TEXT)) < len(TEXT.encode())
    nothing = GPT2Tokenizer.train([], 1000, str(tmp_path))
    assert nothing.vocab_size == 257
    assert nothing.detokenize(nothing.tokenize(TEXT)) == TEXT
    little = GPT2Tokenizer.train(["hello hello"], LARGEST_VOCABULARY, str(tmp_path))
    assert little.vocab_size == 257 + 4  # he, hel, hell, hello


@given(text=st.one_of(st.text(), TRICKY))
def test_every_text_round_trips_with_the_ids_of_the_reference(
    text: str, tokenizer: GPT2Tokenizer, trained: Path
) -> None:
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    reference = ByteLevelBPETokenizer(str(trained / "vocab.json"), str(trained / "merges.txt"))
    assert ids == reference.encode(text).ids


def test_the_end_of_text_inside_a_text_is_ordinary_characters(tokenizer: GPT2Tokenizer) -> None:
    ids = tokenizer.tokenize(f"a{END_OF_TEXT}b")
    assert tokenizer.eod not in ids
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == f"a{END_OF_TEXT}b{END_OF_TEXT}"


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        ("{", "", "vocab.json and .* are not the files of one tokenizer"),
        (["a"], "", "are not the files of one tokenizer"),
        ({"a": -1}, "", "are not the files of one tokenizer"),
        ({"a": 0, "b": 0}, "", "gives one id to several tokens"),
        ({"a": 0}, "", r"has no special token <\|endoftext\|>"),
        (byte_vocab(), "#version: 0.2\na b\n", "of one tokenizer .*Token `ab` out of vocabulary"),
        (byte_vocab(), "#version: 0.2\n\na b c\n", "merges.txt are not the files of one tokenizer"),
        (byte_vocab(), b"\xff\xfe", r"merges.txt are not the files of one tokenizer .*UTF-8"),
        (byte_vocab(), None, r"cannot read the tokenizer file .*merges.txt: No such file"),
    ],
)
def test_files_that_are_no_tokenizer_are_refused(
    vocab: object, merges: str | bytes | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        GPT2Tokenizer(*write_files(tmp_path, vocab, merges))


def test_a_text_that_the_vocabulary_cannot_express_is_refused(tmp_path: Path) -> None:
    vocab = byte_vocab()
    del vocab["Ã"]  # byte 0xc3, the first of most accented letters
    tokenizer = GPT2Tokenizer(*write_files(tmp_path, vocab, ""))
    assert tokenizer.detokenize(tokenizer.tokenize("plain, 漢字")) == "plain, 漢字"
    with pytest.raises(ValueError, match=r"cannot express 'é' .*0xc3"):
        tokenizer.tokenize("café")


def pretokens(text: str) -> list[str]:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return [text[start:end] for _, (start, end) in byte_level.pre_tokenize_str(text)]


@given(text=st.one_of(KINDS, repeat([*range(1, 31)])))
def test_parts_are_the_text_and_what_gpt_2_keeps_together_is_short(text: str) -> None:
    parts = list(cut_long_runs(text, 6))
    assert "".join(parts) == text
    # Two runs of at most 6, and the space in front of them.
    assert max(len(pretoken) for part in parts for pretoken in ["", *pretokens(part)]) <= 13
    # What is cut first at the borders of a piece or segment has the same parts.
    for border in re.finditer(r"(?<!\s)(?=[ \n])", text):
        before, after = (list(cut_long_runs(half, 6)) for half in (text[: border.start()], text[border.start() :]))
        assert [*before[:-1], before[-1] + after[0], *after[1:]] == parts


@given(text=repeat([1, 2, 300, 700]))
def test_a_text_with_long_runs_round_trips(text: str, tokenizer: GPT2Tokenizer) -> None:
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    assert ids == [token for part in cut_long_runs(text) for token in tokenizer.tokenize(part)]


@pytest.mark.parametrize("character", [" ", "a", "1", "=", "漢", "\n", "½", "_", "\x1c"])
def test_a_run_is_cut_only_where_it_is_too_long(character: str) -> None:
    before, after = ("a", "b") if character in "=_\x1c" else (". ." * 700 + "=", "=")
    whole = before + character * LONGEST_RUN + after
    assert list(cut_long_runs(whole)) == [whole]
    assert [len(part) for part in cut_long_runs(character * (LONGEST_RUN + 1))] == [LONGEST_RUN, 1]
    longer = before + character * (2 * LONGEST_RUN + 1) + after
    assert [len(part) for part in cut_long_runs(longer)] == [len(before) + LONGEST_RUN, LONGEST_RUN, 1 + len(after)]


@pytest.mark.slow
def test_ordinary_text_keeps_its_tokens_and_gives_the_vocabulary_of_the_reference(tmp_path: Path) -> None:
    files = corpus.list_stdlib(corpus.LeftOut())
    texts = [Path(file.path).read_text(encoding="utf-8") for file in files[::12]]
    texts += ["漢字仮名交じり文。" * 5000, "Der Fluß, " * 5000, "=" * 200 + "\n" + " " * 300 + "x = 1\n"]
    tokenizer = GPT2Tokenizer.train(texts, 2000, str(tmp_path))
    ids = [part.tolist() for part in tokenizer.tokenize_batch(texts)]
    reference = ByteLevelBPETokenizer()
    reference.train_from_iterator(texts, 1999, min_frequency=2, show_progress=False)
    assert ids == [encoding.ids for encoding in reference.encode_batch(texts)]
    assert tokenizer.vocab == {**reference.get_vocab(), END_OF_TEXT: 1999}


@pytest.mark.parametrize("kind", [" ", "abcdefghijklmnopqrstuvwxyz"])
def test_training_on_an_unbroken_run_takes_time_in_proportion(kind: str, tmp_path: Path) -> None:
    """Uncut, 250,000 of these take 60 s on average; cut, at most 2."""
    text = "".join(random.Random(1).choices(kind, k=250_000))
    started = time.process_time()
    tokenizer = GPT2Tokenizer.train([text], 2000, str(tmp_path))
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert time.process_time() - started < 5

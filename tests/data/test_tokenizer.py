from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer, pre_tokenizers

from tempo_megatron.data import tokenizer as tokenizer_module
from tempo_megatron.data.tokenizer import END_OF_TEXT, GPT2Tokenizer

TEXT = "The quick brown fox doesn't jump over 123 lazy dogs.\n\n  def f(x):\n\treturn x  # naïve 漢字\r\n"
# White space of every kind beside letters, where cutting could go wrong.
TRICKY = st.text(alphabet="ab1.' \n\t\r\x0b\x1c\x85\xa0\u2003\u2028\u3000é漢😀<|", max_size=60)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary")
    GPT2Tokenizer.train([TEXT * 20], 300, str(folder))
    return folder


@pytest.fixture(scope="module")
def tokenizer(trained: Path) -> GPT2Tokenizer:
    return GPT2Tokenizer.load(str(trained / "vocab.json"), str(trained / "merges.txt"))


def write_files(folder: Path, vocab: object, merges: str) -> tuple[str, str]:
    (folder / "vocab.json").write_text(vocab if isinstance(vocab, str) else json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    return str(folder / "vocab.json"), str(folder / "merges.txt")


def byte_vocab() -> dict[str, int]:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END_OF_TEXT]
    return {token: token_id for token_id, token in enumerate(tokens)}


def test_training_gives_the_size_asked_for_and_ends_with_end_of_text(tokenizer: GPT2Tokenizer) -> None:
    assert tokenizer.vocab_size == len(tokenizer.vocab) == 300
    assert tokenizer.eod == tokenizer.vocab[END_OF_TEXT] == 299
    assert len(tokenizer.tokenize(TEXT)) < len(TEXT.encode())


def test_training_twice_gives_the_same_files(trained: Path, tmp_path: Path) -> None:
    GPT2Tokenizer.train(iter([TEXT * 20]), 300, str(tmp_path))
    for name in ("vocab.json", "merges.txt"):
        assert (tmp_path / name).read_bytes() == (trained / name).read_bytes()


def test_training_on_nothing_gives_the_bytes(tmp_path: Path) -> None:
    tokenizer = GPT2Tokenizer.train([], 1000, str(tmp_path))
    assert tokenizer.vocab_size == 257
    assert tokenizer.detokenize(tokenizer.tokenize(TEXT)) == TEXT


@given(text=st.one_of(st.text(), TRICKY))
def test_every_text_round_trips_with_the_ids_of_the_reference(
    text: str, tokenizer: GPT2Tokenizer, trained: Path
) -> None:
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    reference = ByteLevelBPETokenizer(str(trained / "vocab.json"), str(trained / "merges.txt"))
    assert ids == reference.encode(text).ids


@given(text=TRICKY)
def test_cutting_a_long_text_does_not_change_its_tokens(text: str, tokenizer: GPT2Tokenizer) -> None:
    whole = tokenizer.tokenize(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "_SEGMENT_CHARS", 2)
        assert tokenizer.tokenize(text) == whole
        assert [ids.tolist() for ids in tokenizer.tokenize_batch([text, "", text])] == [whole, [], whole]


def test_long_texts_really_are_cut() -> None:
    text = "word " * 300_000
    segments = list(tokenizer_module._cut_segments(text))
    assert "".join(segments) == text
    assert len(segments) > 3


def test_the_end_of_text_inside_a_text_is_ordinary_characters(tokenizer: GPT2Tokenizer) -> None:
    ids = tokenizer.tokenize(f"a{END_OF_TEXT}b")
    assert tokenizer.eod not in ids
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == f"a{END_OF_TEXT}b{END_OF_TEXT}"


def test_detokenize_refuses_an_id_of_the_padding(tokenizer: GPT2Tokenizer) -> None:
    with pytest.raises(ValueError, match="token id 300 is not in the vocabulary"):
        tokenizer.detokenize([0, 300])


def test_identifiers_follow_the_content_of_the_files(trained: Path, tokenizer: GPT2Tokenizer, tmp_path: Path) -> None:
    vocab, merges = (trained / "vocab.json").read_text(), (trained / "merges.txt").read_text()
    same = GPT2Tokenizer.load(*write_files(tmp_path, vocab, merges))
    assert same.unique_identifiers == tokenizer.unique_identifiers
    other = GPT2Tokenizer.load(*write_files(tmp_path, vocab, merges.rsplit("\n", 2)[0]))
    assert other.unique_identifiers != tokenizer.unique_identifiers


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        ("{", "", "vocab.json is not JSON"),
        (["a"], "", "does not map tokens to ids"),
        ({"a": "1"}, "", "does not map tokens to ids"),
        ({"a": -1}, "", "does not map tokens to ids"),
        ({}, "", "does not map tokens to ids"),
        ({"a": 0, "b": 0}, "", "gives one id to several tokens"),
        ({"a": 0}, "", r"has no token <\|endoftext\|>"),
        (byte_vocab(), "#version: 0.2\na b\n", "line 2 of .* merges 'a' and 'b', but .* has no token 'ab'"),
        (byte_vocab(), "zz a\n", "has no token 'zz'"),
        (byte_vocab(), "#version: 0.2\n\na b c\n", "line 3 of .* is not two tokens"),
    ],
)
def test_files_that_are_no_tokenizer_are_refused(vocab: object, merges: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        GPT2Tokenizer.load(*write_files(tmp_path, vocab, merges))


def test_a_missing_or_binary_tokenizer_file_is_refused(tmp_path: Path) -> None:
    vocab_file, merge_file = write_files(tmp_path, byte_vocab(), "")
    with pytest.raises(ValueError, match=r"cannot read the tokenizer file .*none.json: No such file"):
        GPT2Tokenizer.load(str(tmp_path / "none.json"), merge_file)
    Path(merge_file).write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"merges.txt is not UTF-8"):
        GPT2Tokenizer.load(vocab_file, merge_file)


def test_a_text_that_the_vocabulary_cannot_express_is_refused(tmp_path: Path) -> None:
    vocab = byte_vocab()
    del vocab["Ã"]  # byte 0xc3, the first of most accented letters
    tokenizer = GPT2Tokenizer.load(*write_files(tmp_path, vocab, ""))
    assert tokenizer.detokenize(tokenizer.tokenize("plain, 漢字")) == "plain, 漢字"
    with pytest.raises(ValueError, match=r"cannot express 'é' .*0xc3"):
        tokenizer.tokenize("café")

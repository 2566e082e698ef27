"""Tokenizes by GPT-2's byte-level BPE, as megatron-core's datasets expect it, and trains new vocabularies.

Files are GPT-2's own two: vocab.json (token -> id) and merges.txt (one pair per line, best first). A token is written
in GPT-2's alphabet of 256 printable characters, one per byte, so every text can be expressed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tempo_megatron.data import DataError
from tempo_megatron.words.json_text import decode, parse_json

if TYPE_CHECKING:
    from typing_extensions import Self  # typing's from Python 3.11 on


END_OF_TEXT = "<|endoftext|>"
LARGEST_VOCABULARY = 10_000_000  # ten times the largest published; from 10**9 on the library aborts the process

# Between a character that is not white space and a space or newline there is always a border of two pretokens, so a
# text cut there has the same tokens as the whole. The library keeps about 100 bytes per token of what it encodes at
# once; cutting bounds that.
_CUT = re.compile(r"(?<!\s)(?=[ \n])")
_SEGMENT_CHARS = 1 << 18


class ByteLevelTokenizer:
    """Byte-level BPE; load() reads and checks the two files.

    Special tokens are never produced from text: their names in a text are encoded as ordinary characters.
    """

    special_tokens: ClassVar[dict[str, str]] = {}
    """Each that the vocabulary must have, with what it is for."""

    def __init__(self, vocab: dict[str, int], merges: list[tuple[str, str]], unique_identifiers: dict[str, str]):
        self.vocab = vocab
        self.inv_vocab = {token_id: token for token, token_id in vocab.items()}
        self.vocab_size = max(vocab.values()) + 1
        self.unique_identifiers = unique_identifiers
        self._missing_bytes = {byte for byte, character in _map_bytes_to_characters().items() if character not in vocab}
        self._tokenizer = _build_byte_level(models.BPE(vocab=vocab, merges=merges))
        # The fast one, which tokenizers has from 0.20 on, leaves out the places of the tokens in the text.
        self._encode_batch = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)

    @classmethod
    def load(cls, vocab_file: str, merge_file: str) -> Self:
        """The tokenizer in GPT-2's two files.

        Raises: DataError (a ValueError) where a file cannot be read, is not of GPT-2's format, lacks a special token,
            or where a merge needs a token that the vocabulary lacks.
        """
        vocab_bytes, merge_bytes = read_tokenizer_file(vocab_file), read_tokenizer_file(merge_file)
        vocab = _parse_vocab(vocab_file, vocab_bytes)
        merges = _parse_merges(merge_file, merge_bytes)
        for token, purpose in cls.special_tokens.items():
            if token not in vocab:
                raise DataError(f"{vocab_file} has no token {token}, which {purpose}; add it to the file")
        for number, (left, right) in merges.items():
            for token in (left, right, left + right):
                if token not in vocab:
                    raise DataError(
                        f"line {number} of {merge_file} merges {left!r} and {right!r}, but {vocab_file} has no token "
                        f"{token!r}; give the two files of one tokenizer"
                    )
        identifiers = {
            "class": cls.__name__,
            "vocab_sha256": hashlib.sha256(vocab_bytes).hexdigest(),
            "merge_sha256": hashlib.sha256(merge_bytes).hexdigest(),
        }
        return cls(vocab, list(merges.values()), identifiers)

    def tokenize(self, text: str) -> list[int]:
        """The ids of one text, without an end of document.

        Raises: DataError (a ValueError) where the vocabulary lacks a byte of the text.
        """
        ids: list[int] = self.tokenize_batch([text])[0].tolist()
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Per text its ids, int32, [number of tokens]. Raises as tokenize does."""
        for text in texts if self._missing_bytes else ():
            self._check_expressible(text)
        ids: list[list[np.ndarray]] = [[] for _ in texts]
        for batch in cut_batches(texts, cut_long_runs):
            encodings = self._encode_batch([part for _, part in batch], add_special_tokens=False)
            for (index, _), encoding in zip(batch, encodings, strict=True):
                ids[index].append(np.array(encoding.ids, dtype=np.int32))
        return [np.concatenate(parts) for parts in ids]

    def detokenize(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not whole UTF-8 characters become U+FFFD.

        Raises: DataError (a ValueError) where an id is not in the vocabulary.
        """
        known = [int(token_id) for token_id in ids]
        unknown = next((token_id for token_id in known if token_id not in self.inv_vocab), None)
        if unknown is not None:
            raise DataError(f"token id {unknown} is not in the vocabulary of {len(self.vocab)} tokens")
        return self._tokenizer.decode(known, skip_special_tokens=False)

    def _check_expressible(self, text: str) -> None:
        missing = self._missing_bytes.intersection(text.encode("utf-8"))
        if missing:
            character = next(c for c in text if missing.intersection(c.encode("utf-8")))
            raise DataError(
                f"the vocabulary cannot express {character!r} (it lacks the token of byte 0x{min(missing):02x}); use "
                "the vocabulary of a byte-level BPE, or none to train one"
            )

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, folder: str) -> Self:
        """A new byte-level BPE of vocab_size tokens, written to folder/vocab.json and merges.txt.

        As in GPT-2's own vocabulary, the special tokens have the last ids. The result depends on the texts alone; it
        has fewer than vocab_size tokens where no pair of tokens is left that occurs twice.

        Raises: DataError (a ValueError) or OSError where the files cannot be written.
        """
        vocab_file, merge_file = (str(Path(folder, name)) for name in ("vocab.json", "merges.txt"))
        train_byte_level(texts, vocab_size - len(cls.special_tokens), folder)
        vocab = json.loads(Path(vocab_file).read_text(encoding="utf-8"))
        for token in cls.special_tokens:
            vocab[token] = len(vocab)
        Path(vocab_file).write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
        return cls.load(vocab_file, merge_file)


class GPT2Tokenizer(ByteLevelTokenizer):
    """GPT-2's: `<|endoftext|>` ends every document.

    The attributes are those that megatron-core's GPTDatasetConfig asks of its tokenizer.
    """

    special_tokens: ClassVar[dict[str, str]] = {END_OF_TEXT: "ends every document"}

    @property
    def eod(self) -> int:
        return self.vocab[END_OF_TEXT]

    @property
    def eos(self) -> int:
        return self.eod


def train_byte_level(texts: Iterable[str], vocab_size: int, folder: str) -> None:
    """Train a byte-level BPE without special tokens and write folder/vocab.json and merges.txt."""
    assert 256 <= vocab_size <= LARGEST_VOCABULARY
    tokenizer = _build_byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        initial_alphabet=sorted(_map_bytes_to_characters().values()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for text in texts for part in cut_long_runs(text)), trainer)
    try:
        tokenizer.model.save(folder)
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"cannot write the vocabulary in {folder} ({error}); free some space") from error


def _build_byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _map_bytes_to_characters() -> dict[int, str]:
    """Byte -> its character: itself where Latin-1 prints it, else the next free one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def cut_batches(texts: Sequence[str], cut: Callable[[str], Iterable[str]]) -> Iterator[list[tuple[int, str]]]:
    """The texts cut into segments and these by `cut`, each part with the index of its text, some four segments' length
    at a time."""
    batch: list[tuple[int, str]] = []
    characters = 0
    for index, text in enumerate(texts):
        for part in (part for segment in _cut_segments(text) for part in cut(segment)):
            batch.append((index, part))
            characters += len(part)
            if characters >= 4 * _SEGMENT_CHARS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def _cut_segments(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > 2 * _SEGMENT_CHARS:
        cut = _CUT.search(text, start + _SEGMENT_CHARS)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def read_tokenizer_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the tokenizer file {path}: {error.strerror}; check the path") from error


def _parse_vocab(path: str, content: bytes) -> dict[str, int]:
    try:
        vocab = parse_json(decode(content))
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}); --vocab-file takes GPT-2's vocab.json") from error
    if not (isinstance(vocab, dict) and vocab and all(type(v) is int and v >= 0 for v in vocab.values())):
        raise DataError(f"{path} does not map tokens to ids; --vocab-file takes GPT-2's vocab.json")
    if max(vocab.values()) >= 2**31:
        raise DataError(
            f"{path} gives {max(vocab, key=lambda token: vocab[token])!r} the id {max(vocab.values())}, and the "
            "largest that a data set can hold is 2147483647; --vocab-file takes GPT-2's vocab.json"
        )
    if len(set(vocab.values())) < len(vocab):
        raise DataError(f"{path} gives one id to several tokens; --vocab-file takes GPT-2's vocab.json")
    return vocab


def _parse_merges(path: str, content: bytes) -> dict[int, tuple[str, str]]:
    """Line number -> the two tokens that it merges."""
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text; --merge-file takes GPT-2's merges.txt") from error
    merges = {}
    for number, line in enumerate((line.rstrip("\r") for line in lines), start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not all(pair):
            raise DataError(f"line {number} of {path} is not two tokens; --merge-file takes GPT-2's merges.txt")
        merges[number] = (pair[0], pair[1])
    return merges


# GPT-2 first divides a text into pretokens: letters, digits, other signs, white space. Learning pairs takes time that
# grows with the square of a pretoken's length (0.25 MB of spaces: 90 s), so a run of more than LONGEST_RUN characters
# of one kind is cut. A text without such a run is left whole and has the tokens that it always had.
LONGEST_RUN = 1024

# The kinds are GPT-2's, each a little wider where `re` has no class for it (its \w knows letters and numbers together,
# its \s also has the controls U+001C to U+001F): what GPT-2 keeps together is at most two of these runs.
_RUNS = re.compile(
    r"[^\W\d_]+"  # letters, and numbers such as a fraction
    r"|[^\W_a-zA-Z]+"  # numbers, and letters beyond ASCII
    r"|(?:[^\w\s]|[_\x1c-\x1f])+"  # other signs
    r"|[^\S\x1c-\x1f]+"  # white space
)
_UNBROKEN = re.compile(r"[\S\x1c-\x1f]+|\s+")


def cut_long_runs(text: str) -> Iterator[str]:
    """The parts of `text`, in order: cut LONGEST_RUN characters after a run's beginning, and again, while it goes on.

    A run never reaches over the border between other signs and white space, so a text that is cut at such borders
    first has the same parts.
    """
    start = 0
    for run in _RUNS.finditer(text) if _may_have_long_run(text) else ():
        for cut in range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN):
            yield text[start:cut]
            start = cut
    yield text[start:]


def _may_have_long_run(text: str) -> bool:
    """Quick, and never wrongly False: a long run covers one of the windows of half its length from end to end."""
    step = LONGEST_RUN // 2
    return len(text) > LONGEST_RUN and any(_UNBROKEN.fullmatch(text, at, at + step) for at in range(0, len(text), step))

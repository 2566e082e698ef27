"""Tokenizes by GPT-2's byte-level BPE, as megatron-core's datasets expect it, and trains new vocabularies.

The files are GPT-2's own two: vocab.json (token -> id) and merges.txt (one pair per line, best first). A token is
written in GPT-2's alphabet of 256 printable characters, one per byte, so every text can be expressed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tempo_megatron.data import DataError

if TYPE_CHECKING:
    from typing_extensions import Self  # typing's from Python 3.11 on


END_OF_TEXT = "<|endoftext|>"
LARGEST_VOCABULARY = 10_000_000  # ten times the largest published; from 10**9 on the library aborts the process


class TextTokenizer:
    """The base of all tokenizers; their class methods `load` and `train` read and make their files.

    Special tokens are never produced from text: their names in a text are encoded as ordinary characters.

    Args:
        vocab: token -> id.
        tokenizer: the library's.
        unique_identifiers: class and checksums of the files, by name.
    """

    special_tokens: ClassVar[dict[str, str]] = {}
    """The tokens that the vocabulary must have, each with its purpose."""
    eod: int | None = None
    """The token that ends every document; None if documents end without one."""
    cuts_texts: ClassVar[bool] = True
    """Whether a text may be cut before a space or newline that follows no white space, without changing its tokens."""

    def __init__(self, vocab: dict[str, int], tokenizer: Tokenizer, unique_identifiers: dict[str, str]):
        self.vocab = vocab
        self.inv_vocab = {token_id: token for token, token_id in vocab.items()}
        self.vocab_size = max(vocab.values()) + 1
        self.unique_identifiers = unique_identifiers
        self._tokenizer = tokenizer
        # The fast function, which tokenizers has from 0.20 on, does not compute where in the text a token is.
        self._encode_batch = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)

    def tokenize(self, text: str) -> list[int]:
        """Returns the ids of one text, without special tokens. Raises as tokenize_batch does."""
        ids: list[int] = self.tokenize_batch([text])[0].tolist()
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, int32, [number of tokens].

        Raises: DataError (a ValueError) if a byte-level vocabulary lacks a byte of a text.
        """
        parts = [(index, part) for index, text in enumerate(texts) for part in self._cut(text)]
        ids: list[list[np.ndarray]] = [[] for _ in texts]
        encodings = self._encode_batch([part for _, part in parts], add_special_tokens=False)
        for (index, _), encoding in zip(parts, encodings, strict=True):
            ids[index].append(np.array(encoding.ids, dtype=np.int32))
        return [np.concatenate(own) for own in ids]

    def _cut(self, text: str) -> Iterable[str]:
        """Cuts a text where its tokens do not change."""
        return (text,)

    def detokenize(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`. Bytes that are not whole UTF-8 characters become U+FFFD.

        Raises: DataError (a ValueError) if an id is not in the vocabulary.
        """
        known = [int(token_id) for token_id in ids]
        unknown = next((token_id for token_id in known if token_id not in self.inv_vocab), None)
        if unknown is not None:
            raise DataError(f"token id {unknown} is not in the vocabulary of {len(self.vocab)} tokens")
        return self._tokenizer.decode(known, skip_special_tokens=False)


class ByteLevelTokenizer(TextTokenizer):
    """Byte-level BPE over a vocab.json and a merges.txt."""

    def __init__(self, vocab: dict[str, int], merges: list[tuple[str, str]], unique_identifiers: dict[str, str]):
        super().__init__(vocab, _build_byte_level(models.BPE(vocab=vocab, merges=merges)), unique_identifiers)
        self._missing_bytes = {byte for byte, character in _map_bytes_to_characters().items() if character not in vocab}

    @classmethod
    def load(cls, vocab_file: str, merge_file: str) -> Self:
        """Reads and checks GPT-2's two files.

        Raises: DataError (a ValueError) if a file cannot be read or is not of GPT-2's format, if a special token is
            missing, or if a merge needs a token that the vocabulary lacks.
        """
        vocab_bytes, merge_bytes = read_tokenizer_file(vocab_file), read_tokenizer_file(merge_file)
        try:
            vocab, merges = models.BPE.read_file(vocab_file, merge_file)
            models.BPE(vocab, merges)
        except Exception as error:  # the library raises nothing narrower
            cause = str(error).removeprefix("Error while reading vocab & merges files: ")
            raise DataError(
                f"{vocab_file} and {merge_file} are not the files of one tokenizer ({cause}); --vocab-file and "
                "--merge-file take GPT-2's vocab.json and merges.txt"
            ) from error
        if len(set(vocab.values())) < len(vocab):
            raise DataError(f"{vocab_file} gives one id to several tokens; --vocab-file takes GPT-2's vocab.json")
        if vocab and max(vocab.values()) >= 2**31:
            raise DataError(
                f"{vocab_file} gives {max(vocab, key=lambda token: vocab[token])!r} the id {max(vocab.values())}, and "
                "the largest that a data set can hold is 2147483647; --vocab-file takes GPT-2's vocab.json"
            )
        for token, purpose in cls.special_tokens.items():
            if token not in vocab:
                raise DataError(f"{vocab_file} has no token {token}, which {purpose}; add it to the file")
        identifiers = {
            "class": cls.__name__,
            "vocab_sha256": hashlib.sha256(vocab_bytes).hexdigest(),
            "merge_sha256": hashlib.sha256(merge_bytes).hexdigest(),
        }
        return cls(vocab, merges, identifiers)

    def _cut(self, text: str) -> Iterable[str]:
        if missing := self._missing_bytes and self._missing_bytes.intersection(text.encode("utf-8")):
            character = next(c for c in text if missing.intersection(c.encode("utf-8")))
            raise DataError(
                f"the vocabulary cannot express {character!r} (it lacks the token of byte 0x{min(missing):02x}); use "
                "the vocabulary of a byte-level BPE, or none to train one"
            )
        return cut_long_runs(text)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, folder: str) -> Self:
        """Trains a byte-level BPE of vocab_size tokens and writes it to folder/vocab.json and merges.txt.

        As in GPT-2's own vocabulary, the special tokens have the last ids. The result depends on the texts alone. It
        has fewer than vocab_size tokens if no pair of tokens is left that occurs twice.

        Raises: DataError (a ValueError) or OSError if the files cannot be written.
        """
        vocab_file, merge_file = (str(Path(folder, name)) for name in ("vocab.json", "merges.txt"))
        train_byte_level(texts, vocab_size - len(cls.special_tokens), folder)
        vocab = json.loads(Path(vocab_file).read_text(encoding="utf-8"))
        for token in cls.special_tokens:
            vocab[token] = len(vocab)
        Path(vocab_file).write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
        return cls.load(vocab_file, merge_file)


class GPT2Tokenizer(ByteLevelTokenizer):
    """GPT-2's tokenizer: `<|endoftext|>` ends every document. megatron-core's datasets also read it as `eos`."""

    special_tokens: ClassVar[dict[str, str]] = {END_OF_TEXT: "ends every document"}

    def __init__(self, vocab: dict[str, int], merges: list[tuple[str, str]], unique_identifiers: dict[str, str]):
        super().__init__(vocab, merges, unique_identifiers)
        self.eod = self.eos = vocab[END_OF_TEXT]


def train_byte_level(texts: Iterable[str], vocab_size: int, folder: str) -> None:
    """Trains a byte-level BPE without special tokens and writes folder/vocab.json and merges.txt."""
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
    """Maps a byte to itself if Latin-1 can print it, else to the next free character from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def read_tokenizer_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the tokenizer file {path}: {error.strerror}; check the path") from error


# GPT-2 first divides a text into pretokens: letters, digits, other signs, white space. The time to learn pairs grows
# with the square of a pretoken's length (0.25 MB of spaces take 90 s), so a run of more than LONGEST_RUN characters of
# one kind is cut. A text without such a run keeps its tokens.
LONGEST_RUN = 1024

# The kinds are GPT-2's, some a little wider because `re` has no such class: its \w does not tell letters from numbers,
# and its \s includes the controls U+001C to U+001F. One of GPT-2's pretokens covers at most two of these runs.
_RUNS = re.compile(
    r"[^\W\d_]+"  # letters, and numbers such as a fraction
    r"|[^\W_a-zA-Z]+"  # numbers, and letters beyond ASCII
    r"|(?:[^\w\s]|[_\x1c-\x1f])+"  # other signs
    r"|[^\S\x1c-\x1f]+"  # white space
)
_UNBROKEN = re.compile(r"[\S\x1c-\x1f]+|\s+")


def cut_long_runs(text: str) -> Iterator[str]:
    """Yields the parts of `text`, in order. A run is cut after every LONGEST_RUN characters.

    No run goes from other signs into white space, so a text that is divided there (see corpus.py) has the same parts.
    """
    start = 0
    for run in _RUNS.finditer(text) if _may_have_long_run(text) else ():
        for cut in range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN):
            yield text[start:cut]
            start = cut
    yield text[start:]


def _may_have_long_run(text: str) -> bool:
    """Tests quickly whether a long run is possible: it would fill one of the windows of half its length."""
    step = LONGEST_RUN // 2
    return len(text) > LONGEST_RUN and any(_UNBROKEN.fullmatch(text, at, at + step) for at in range(0, len(text), step))

"""Tokenizes as megatron-core's datasets expect it: by GPT-2's byte-level BPE, or by a tokenizer.json of Hugging Face.

GPT-2's own two files are vocab.json (token -> id) and merges.txt (one pair per line, best first). A token is written in
GPT-2's alphabet of 256 printable characters, one per byte, so every text can be expressed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tempo_megatron.beside import first_line
from tempo_megatron.data import DataError
from tempo_megatron.words.json_text import decode, parse_json

if TYPE_CHECKING:
    from typing_extensions import Self  # typing's from Python 3.11 on


END_OF_TEXT = "<|endoftext|>"
FILES = ("tokenizer.json", "tokenizer_config.json")
"""Of Hugging Face's tokenizers, in a model's folder."""
LARGEST_VOCABULARY = 10_000_000  # ten times the largest published; from 10**9 on the library aborts the process
_LARGEST_ID = 2**31 - 1  # that a data set can hold


class TextTokenizer:
    """The base of all tokenizers, read from `files`.

    Special tokens are never produced from text: their names in a text are encoded as ordinary characters.

    Raises: DataError (a ValueError) if a file cannot be read or is not of its format, or lacks a special token.
    """

    suffixes: ClassVar[tuple[str, ...]]
    """Of its files beside a data set, in the order of --vocab-file and --merge-file."""
    default_size: ClassVar[int] = 0
    """Of a vocabulary that is trained: the published model's. 0 if none can be trained."""
    smallest_size: ClassVar[tuple[int, str]] = 0, ""
    """Of a vocabulary that is trained, and why it cannot be smaller."""
    special_tokens: ClassVar[Mapping[str, str]] = {}
    """The tokens that the vocabulary must have, by the attributes that get their ids."""
    eod: int | None = None
    """The token that ends every document; None if documents end without one."""
    cuts_texts: ClassVar[bool] = True
    """Whether a text may be cut before a space or newline that follows no white space, without changing its tokens."""

    def __init__(self, *files: str):
        contents = [_read(path) for path in files]
        self.files = files
        self._tokenizer = self._build(files, contents)
        # By id: the library's own order differs between processes, and Megatron draws random tokens by their place.
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab: dict[str, int] = dict(sorted(vocab.items(), key=lambda item: item[1]))
        for name, token in self.special_tokens.items():
            if token not in self.vocab:
                raise DataError(f"{files[0]} has no special token {token}; add it to the file")
            setattr(self, name, self.vocab[token])
        if self.eod is not None:
            self.eos = self.eod
        self.inv_vocab = {token_id: token for token, token_id in self.vocab.items()}
        self.vocab_size = max(self.inv_vocab) + 1
        digests = [hashlib.sha256(content).hexdigest() for content in contents]
        self.digests = dict(zip(("vocab_sha256", "merge_sha256"), digests, strict=False))
        self.unique_identifiers = {"class": type(self).__name__, **self.digests}
        # The fast function, which tokenizers has from 0.20 on, does not compute where in the text a token is.
        self._encode_batch = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)

    def _build(self, files: Sequence[str], contents: Sequence[bytes]) -> Tokenizer:
        raise NotImplementedError

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
        """Returns the text of `ids`. Bytes that are not whole UTF-8 characters become U+FFFD."""
        return self._tokenizer.decode([int(token_id) for token_id in ids], skip_special_tokens=False)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the tokenizer file {path}: {error.strerror}; check the path") from error


class ByteLevelTokenizer(TextTokenizer):
    """Byte-level BPE over a vocab.json and a merges.txt."""

    suffixes = "-vocab.json", "-merges.txt"

    def _build(self, files: Sequence[str], contents: Sequence[bytes]) -> Tokenizer:
        vocab_file, merge_file = files
        try:
            vocab, merges = models.BPE.read_file(vocab_file, merge_file)
            model = models.BPE(vocab, merges)
        except Exception as error:  # the library raises nothing narrower
            cause = str(error).removeprefix("Error while reading vocab & merges files: ")
            raise DataError(
                f"{vocab_file} and {merge_file} are not the files of one tokenizer ({cause}); --vocab-file and "
                "--merge-file take GPT-2's vocab.json and merges.txt"
            ) from error
        if len(set(vocab.values())) < len(vocab):
            raise DataError(f"{vocab_file} gives one id to several tokens; --vocab-file takes GPT-2's vocab.json")
        if max(vocab.values(), default=0) > _LARGEST_ID:
            raise DataError(f"{vocab_file} has an id beyond {_LARGEST_ID}; --vocab-file takes GPT-2's vocab.json")
        self._lacks_bytes = not vocab.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
        return _build_byte_level(model)

    def _cut(self, text: str) -> Iterable[str]:
        for character in dict.fromkeys(text) if self._lacks_bytes else ():
            ((signs, _),) = _SPELLING.pre_tokenize_str(character)
            for byte, sign in zip(character.encode(), signs, strict=True):
                if sign not in self.vocab:
                    raise DataError(
                        f"the vocabulary cannot express {character!r} (it lacks the token of byte 0x{byte:02x}); use "
                        "the vocabulary of a byte-level BPE, or none to train one"
                    )
        return cut_long_runs(text)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, folder: str) -> Self:
        """Trains a byte-level BPE, which depends on the texts alone, and writes it to folder/vocab.json and merges.txt.

        As in GPT-2's own vocabulary, the special tokens have the last ids. It has fewer than vocab_size tokens if no
        pair is left that occurs twice. Raises: DataError (a ValueError) or OSError if the files cannot be written.
        """
        num_pieces = vocab_size - len(cls.special_tokens)
        assert 256 <= num_pieces <= LARGEST_VOCABULARY
        tokenizer = _build_byte_level(models.BPE())
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=num_pieces, min_frequency=2, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator((part for text in texts for part in cut_long_runs(text)), trainer)
        try:
            vocab_file, merge_file = tokenizer.model.save(folder)
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f"cannot write the vocabulary in {folder} ({error}); free some space") from error
        vocab = json.loads(Path(vocab_file).read_text(encoding="utf-8"))
        for token in cls.special_tokens.values():
            vocab[token] = len(vocab)
        Path(vocab_file).write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
        return cls(vocab_file, merge_file)


class GPT2Tokenizer(ByteLevelTokenizer):
    """GPT-2's tokenizer: `<|endoftext|>` ends every document. megatron-core's datasets also read it as `eos`."""

    default_size, smallest_size = 50257, (257, "256 bytes and one")
    special_tokens: ClassVar[Mapping[str, str]] = {"eod": END_OF_TEXT}


class HuggingFaceTokenizer(TextTokenizer):
    """The tokenizer of a model's folder, such as Llama's or Qwen's.

    The eos_token of tokenizer_config.json ends every document. No special token is added, and the name of one in a text
    is ordinary text. Texts are not cut, whatever their length: what may be cut without changing tokens depends on the
    tokenizer.
    """

    suffixes = "-tokenizer.json", "-tokenizer_config.json"
    cuts_texts: ClassVar[bool] = False

    def __init__(self, *files: str):
        super().__init__(*files)
        self.eod = self.eos = self.vocab[self._eos_token]

    def _build(self, files: Sequence[str], contents: Sequence[bytes]) -> Tokenizer:
        tokenizer_file, config_file = files
        try:
            tokenizer = Tokenizer.from_buffer(contents[0])
        except Exception as error:  # the library raises nothing narrower
            raise DataError(
                f"{tokenizer_file} is not a tokenizer.json ({first_line(error)}); give a folder that transformers saved"
            ) from error
        try:
            config = parse_json(decode(contents[1]))
        except ValueError as error:
            raise DataError(f"{config_file} is not JSON ({error}); give the model's own") from error
        named = config.get("eos_token") if isinstance(config, dict) else None
        eos_token = named.get("content") if isinstance(named, dict) else named
        if not isinstance(eos_token, str):
            raise DataError(f'{config_file} has no "eos_token", which ends every document; add it to the file')
        if tokenizer.token_to_id(eos_token) is None:
            raise DataError(
                f"{config_file} names the eos_token {eos_token!r}, which {tokenizer_file} does not have; give "
                "the two files of one tokenizer"
            )
        self._eos_token = eos_token
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True
        return tokenizer


_SPELLING = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _build_byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


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


def cut_long_runs(text: str, longest: int = LONGEST_RUN) -> Iterator[str]:
    """Yields the parts of `text`, in order. A run is cut after every `longest` characters.

    No run goes from other signs into white space, so a text that is divided there (see corpus.py) has the same parts.
    """
    start, window = 0, longest // 2
    # A long run fills one of the windows of half its length, which is a quick test.
    windows = range(0, len(text), window) if len(text) > longest else ()
    may_have = any(_UNBROKEN.fullmatch(text, at, at + window) for at in windows)
    for run in _RUNS.finditer(text) if may_have else ():
        for cut in range(run.start() + longest, run.end(), longest):
            yield text[start:cut]
            start = cut
    yield text[start:]

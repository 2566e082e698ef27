"""Lists the tokenizers that data sets are made with, by Megatron-LM's names for --tokenizer-type.

RobertaBPETokenizer is ours: Megatron-LM has no byte-level BPE with the special tokens of a masked language model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tempo_megatron.data import DataError
from tempo_megatron.data.masked_tokenizers import (
    CasedWordPieceTokenizer,
    LowerCaseWordPieceTokenizer,
    RobertaTokenizer,
)
from tempo_megatron.data.tokenizer import GPT2Tokenizer


class TextTokenizer(Protocol):
    """What data preparation and the trainer ask of every tokenizer."""

    vocab_size: int
    unique_identifiers: dict[str, str]

    @property
    def eod(self) -> int | None:
        """The token that ends every document; None where documents end without one."""

    def tokenize(self, text: str) -> list[int]: ...
    def tokenize_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...


class MaskedTokenizer(TextTokenizer, Protocol):
    """What a masked language model asks besides."""

    inv_vocab: dict[int, str]
    cls: int
    sep: int
    mask: int
    pad: int

    def starts_word(self, token_id: int) -> bool:
        """Whether a word begins with the token, as far as the token itself tells."""


@dataclass(frozen=True, slots=True)
class TokenizerType:
    """A kind of tokenizer: its class, the suffixes of its files beside a data set, and what a trained one has."""

    cls: Any
    suffixes: tuple[str, ...]
    vocab_size: int
    """Of a new vocabulary, where none is asked for: that of the published model."""
    smallest: int
    smallest_reason: str
    of_masked: bool = True
    """Whether it has the special tokens of a masked language model."""


_BPE_FILES, _WORD_PIECE_FILES = ("-vocab.json", "-merges.txt"), ("-vocab.txt",)
_ALPHABET = "an alphabet and the special tokens"
GPT2_BPE = "GPT2BPETokenizer"
TYPES = {
    GPT2_BPE: TokenizerType(GPT2Tokenizer, _BPE_FILES, 50257, 257, "256 bytes and one", of_masked=False),
    "BertWordPieceLowerCase": TokenizerType(LowerCaseWordPieceTokenizer, _WORD_PIECE_FILES, 30522, 128, _ALPHABET),
    "BertWordPieceCase": TokenizerType(CasedWordPieceTokenizer, _WORD_PIECE_FILES, 28996, 128, _ALPHABET),
    "RobertaBPETokenizer": TokenizerType(RobertaTokenizer, _BPE_FILES, 50265, 260, "256 bytes and four"),
}
MASKED_TYPES = tuple(name for name, kind in TYPES.items() if kind.of_masked)


def load_tokenizer(name: str, paths: Sequence[str]) -> Any:
    """The tokenizer of type `name` in its files: vocab.json and merges.txt, or vocab.txt alone.

    Raises: DataError (a ValueError) as its class does.
    """
    return TYPES[name].cls.load(*paths)


def train_tokenizer(name: str, texts: Iterable[str], vocab_size: int, folder: str) -> Any:
    """A new tokenizer of type `name` with at most vocab_size tokens; its files go into `folder`.

    Raises: DataError (a ValueError) or OSError where they cannot be written.
    """
    return TYPES[name].cls.train(texts, vocab_size, folder)


def list_given_files(name: str, vocab_file: str | None, merge_file: str | None) -> tuple[str, ...]:
    """The files of a tokenizer of type `name` that were named; none of them, or all.

    Raises: DataError (a ValueError) where one is missing, or one is named that the type does not have.
    """
    if len(TYPES[name].suffixes) == 1:
        if merge_file is not None:
            raise DataError(f"--merge-file is given, but a {name} has only a vocabulary; leave it out")
        return () if vocab_file is None else (vocab_file,)
    if vocab_file is None and merge_file is None:
        return ()
    if vocab_file is None or merge_file is None:
        given, missing = ("--vocab-file", "--merge-file") if vocab_file else ("--merge-file", "--vocab-file")
        raise DataError(f"{given} is given without {missing}; a tokenizer needs both files")
    return vocab_file, merge_file

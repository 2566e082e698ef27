"""Lists the tokenizers that data sets are made with, by Megatron-LM's names for --tokenizer-type.

RobertaBPETokenizer is our own name: Megatron-LM has no byte-level BPE with a masked language model's special tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tempo_megatron.data import DataError
from tempo_megatron.data.huggingface_tokenizer import HuggingFaceTokenizer
from tempo_megatron.data.masked_tokenizers import (
    CasedWordPieceTokenizer,
    LowerCaseWordPieceTokenizer,
    RobertaTokenizer,
)
from tempo_megatron.data.tokenizer import GPT2Tokenizer


@dataclass(frozen=True, slots=True)
class TokenizerType:
    """A kind of tokenizer: its class, the suffixes of its files beside a data set, and the sizes of its vocabulary."""

    cls: Any
    """A TextTokenizer; cls.load(*files) reads one and cls.train(texts, vocab_size, folder) makes one."""
    suffixes: tuple[str, ...]
    vocab_size: int
    """The default of --vocab-size: the published model's."""
    smallest: int
    smallest_reason: str
    of_masked: bool = True
    """Whether it has the special tokens of a masked language model."""
    is_trained: bool = True
    """Whether a vocabulary can be trained here."""


_BPE_FILES, _WORD_PIECE_FILES = ("-vocab.json", "-merges.txt"), ("-vocab.txt",)
_HUGGING_FACE_FILES = ("-tokenizer.json", "-tokenizer_config.json")
_ALPHABET = "an alphabet and the special tokens"
GPT2_BPE = "GPT2BPETokenizer"
HUGGING_FACE = "HuggingFaceTokenizer"
TYPES = {
    GPT2_BPE: TokenizerType(GPT2Tokenizer, _BPE_FILES, 50257, 257, "256 bytes and one", of_masked=False),
    "BertWordPieceLowerCase": TokenizerType(LowerCaseWordPieceTokenizer, _WORD_PIECE_FILES, 30522, 128, _ALPHABET),
    "BertWordPieceCase": TokenizerType(CasedWordPieceTokenizer, _WORD_PIECE_FILES, 28996, 128, _ALPHABET),
    "RobertaBPETokenizer": TokenizerType(RobertaTokenizer, _BPE_FILES, 50265, 260, "256 bytes and four"),
    HUGGING_FACE: TokenizerType(HuggingFaceTokenizer, _HUGGING_FACE_FILES, 0, 0, "", of_masked=False, is_trained=False),
}
MASKED_TYPES = tuple(name for name, kind in TYPES.items() if kind.of_masked)


def list_given_files(name: str, vocab_file: str | None, merge_file: str | None) -> tuple[str, ...]:
    """Returns the files of a tokenizer of type `name` that the user named: none of them, or all.

    Raises: DataError (a ValueError) if one is missing, or if one is named that the type does not have.
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

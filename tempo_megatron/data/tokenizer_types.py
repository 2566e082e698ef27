"""Lists the tokenizers that data sets are made with, by Megatron-LM's names for --tokenizer-type.

RobertaBPETokenizer is our own name: Megatron-LM has no byte-level BPE with a masked language model's special tokens.
"""

from __future__ import annotations

from typing import Any

from tempo_megatron.data import DataError
from tempo_megatron.data.masked_tokenizers import (
    CasedWordPieceTokenizer,
    LowerCaseWordPieceTokenizer,
    RobertaTokenizer,
)
from tempo_megatron.data.tokenizer import GPT2Tokenizer, HuggingFaceTokenizer

GPT2_BPE = "GPT2BPETokenizer"
HUGGING_FACE = "HuggingFaceTokenizer"
TYPES: dict[str, Any] = {
    GPT2_BPE: GPT2Tokenizer,
    "BertWordPieceLowerCase": LowerCaseWordPieceTokenizer,
    "BertWordPieceCase": CasedWordPieceTokenizer,
    "RobertaBPETokenizer": RobertaTokenizer,
    HUGGING_FACE: HuggingFaceTokenizer,
}
MASKED_TYPES: tuple[str, ...] = ("BertWordPieceLowerCase", "BertWordPieceCase", "RobertaBPETokenizer")


def list_given_files(name: str, vocab_file: str | None, merge_file: str | None) -> tuple[str, ...]:
    """Returns the files of a tokenizer of type `name` that the user named: none of them, or all.

    Raises: DataError (a ValueError) if one is missing, or if one is named that the type does not have.
    """
    if len(TYPES[name].suffixes) == 1 and merge_file is not None:
        raise DataError(f"--merge-file is given, but a {name} has only a vocabulary; leave it out")
    if len(TYPES[name].suffixes) == 2 and (vocab_file is None) != (merge_file is None):
        given, missing = ("--vocab-file", "--merge-file") if vocab_file else ("--merge-file", "--vocab-file")
        raise DataError(f"{given} is given without {missing}; a tokenizer needs both files")
    return tuple(path for path in (vocab_file, merge_file) if path is not None)

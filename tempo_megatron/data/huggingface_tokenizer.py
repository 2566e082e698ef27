"""Tokenizes as a model of Hugging Face does: by its tokenizer.json, with the end of a document that it names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tokenizers import Tokenizer

from tempo_megatron.beside import first_line
from tempo_megatron.data import DataError
from tempo_megatron.data.tokenizer import TextTokenizer
from tempo_megatron.words.json_text import decode, parse_json

FILES = ("tokenizer.json", "tokenizer_config.json")
"""Their names in a model's folder."""


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
        self._eos_token = named.get("content") if isinstance(named, dict) else named
        if not isinstance(self._eos_token, str):
            raise DataError(f'{config_file} has no "eos_token", which ends every document; add it to the file')
        if tokenizer.token_to_id(self._eos_token) is None:
            raise DataError(
                f"{config_file} names the eos_token {self._eos_token!r}, which {tokenizer_file} does not have; give "
                "the two files of one tokenizer"
            )
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True
        return tokenizer

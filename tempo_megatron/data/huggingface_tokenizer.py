"""Tokenizes as a model of Hugging Face does: by its tokenizer.json, with the end of a document that it names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tokenizers import Tokenizer

from tempo_megatron.beside import first_line
from tempo_megatron.data import DataError
from tempo_megatron.data.tokenizer import TextTokenizer, read_tokenizer_file
from tempo_megatron.words.json_text import decode, parse_json

if TYPE_CHECKING:
    from typing_extensions import Self  # typing's from Python 3.11 on

FILES = ("tokenizer.json", "tokenizer_config.json")
"""Their names in a model's folder."""


class HuggingFaceTokenizer(TextTokenizer):
    """The tokenizer of a model's folder, such as Llama's or Qwen's.

    The eos_token of tokenizer_config.json ends every document. No special token is added, and the name of one in a text
    is ordinary text. Texts are not cut, whatever their length: what may be cut without changing tokens depends on the
    tokenizer.
    """

    cuts_texts: ClassVar[bool] = False

    def __init__(self, tokenizer: Tokenizer, eos_token: str, unique_identifiers: dict[str, str]):
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True
        super().__init__(tokenizer.get_vocab(with_added_tokens=True), tokenizer, unique_identifiers)
        self.eod = self.eos = self.vocab[eos_token]

    @classmethod
    def load(cls, tokenizer_file: str, config_file: str) -> Self:
        """Reads and checks tokenizer.json and tokenizer_config.json.

        Raises: DataError (a ValueError) if a file cannot be read or is not of its format, or if the end of a document
            is missing in one of them.
        """
        contents = [read_tokenizer_file(path) for path in (tokenizer_file, config_file)]
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
                f"{config_file} names the eos_token {eos_token!r}, which {tokenizer_file} does not have; give the two "
                "files of one tokenizer"
            )
        identifiers = {
            "class": cls.__name__,
            **{
                f"{name}_sha256": hashlib.sha256(content).hexdigest()
                for name, content in zip(("vocab", "merge"), contents, strict=True)
            },
        }
        return cls(tokenizer, eos_token, identifiers)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, folder: str) -> Self:
        """Raises DataError: it has none of its own."""
        raise DataError("a HuggingFaceTokenizer is not trained; give the folder of one with --tokenizer-model")


def find_tokenizer_files(folder: str) -> tuple[str, str]:
    """Returns the paths of FILES in a model's folder. Raises DataError (a ValueError) if one is missing."""
    for name in FILES:
        if not Path(folder, name).is_file():
            raise DataError(f"--tokenizer-model {folder} has no {name}; give a folder that transformers saved")
    tokenizer_file, config_file = (str(Path(folder, name)) for name in FILES)
    return tokenizer_file, config_file

"""Turns text into the token files that Megatron trains on: documents, tokenizer, `.bin` and `.idx`."""

from tempo_megatron.extras import check_installed

check_installed("data preparation", "train", "tokenizers", "tqdm", "megatron.core")


class DataError(ValueError):
    """Something about the user's own data, vocabulary or disk: the text says what was found and what to do."""

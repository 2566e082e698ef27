"""What the tests of data preparation share: a run of it, and its documents as Megatron's own class reads them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from megatron.core.datasets.indexed_dataset import IndexedDataset

from tempo_megatron.data.dataset_files import load_dataset_tokenizer
from tempo_megatron.data.prepare_data import main


def prepare(prefix: Path, *arguments: object, **sizes: int) -> None:
    command = [*map(str, arguments), "--output-prefix", str(prefix), "--workers", "1"]
    assert main(command if "--vocab-file" in command else [*command, "--vocab-size", "300"], **sizes) == 0


def read_documents(prefix: Path) -> list[str]:
    """Every document as text, read by Megatron's own class; the end of document is checked and taken off."""
    data, tokenizer = IndexedDataset(str(prefix)), load_dataset_tokenizer(str(prefix))
    borders = data.document_indices
    texts = []
    for first, end in pairwise(borders):
        ids = [int(token) for sequence in data[int(first) : int(end)] for token in sequence]
        assert ids.count(tokenizer.eod) == 1 and ids[-1] == tokenizer.eod
        texts.append(tokenizer.detokenize(ids[:-1]))
    return texts

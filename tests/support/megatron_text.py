"""A small indexed dataset of sentences, and a vocabulary for it, as pretrain_bert.py and pretrain_t5.py read them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_NUM_WORDS = 100


def write_text(folder: Path) -> str:
    """200 documents of 4 to 10 sentences; the arguments that name them."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    vocabulary = [*_SPECIAL, *(f"word{i}" for i in range(_NUM_WORDS))]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    builder = IndexedDatasetBuilder(str(folder / "text.bin"), dtype=np.int32)
    chance = random.Random(1234)
    for _ in range(200):
        for _ in range(chance.randint(4, 10)):
            words = chance.choices(range(len(_SPECIAL), len(vocabulary)), k=chance.randint(4, 12))
            builder.add_item(torch.tensor(words, dtype=torch.int32))
        builder.end_document()
    builder.finalize(str(folder / "text.idx"))
    cache = folder / "cache"
    return (
        f"--data-path {folder}/text --split 100,0,0 --legacy-tokenizer --tokenizer-type BertWordPieceLowerCase "
        f"--vocab-file {folder}/vocab.txt --data-cache-path {cache}"
    )

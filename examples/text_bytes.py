"""Real text for the examples: modules of Python's own library, as bytes, which need no tokenizer."""

from __future__ import annotations

import ast
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

VOCAB_SIZE, MASK, PAD = 259, 257, 258
_IGNORED = -100


class Bytes(Dataset[dict[str, Tensor]]):
    """Samples of `length` bytes; with `masked` a seventh of them hidden, and only those are labels."""

    def __init__(self, num_samples: int, length: int, masked: bool = False) -> None:
        files = sorted((Path(ast.__file__).parent / "asyncio").glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[: num_samples * length]
        self._samples = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, length)
        self._masked = masked

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self._samples[index]
        if not self._masked:
            return {"input_ids": ids, "labels": ids}
        is_hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(index)) < 1 / 7
        return {"input_ids": ids.masked_fill(is_hidden, MASK), "labels": ids.masked_fill(~is_hidden, _IGNORED)}

    def list_batches(self, size: int) -> list[dict[str, Tensor]]:
        """Returns all samples as batches of ids and labels [size, length]."""
        return [default_collate([self[start + each] for each in range(size)]) for start in range(0, len(self), size)]

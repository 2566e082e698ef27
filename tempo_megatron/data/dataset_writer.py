"""PREFIX.bin and PREFIX.idx, byte for byte as megatron-core's IndexedDatasetBuilder writes them.

Written here because importing megatron-core takes seconds and prints warnings about packages that tokenizing does
without.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from tempo_megatron.data.dataset_files import DTYPES, INDEX_HEADER, INDEX_MAGIC

_FIRST_SIZE_IN_32_BITS = 65500  # megatron-core's own limit: its readers expect what it would have chosen


def choose_token_dtype(vocab_size: int) -> type[np.integer]:
    """The dtype in which megatron-core stores the tokens of such a vocabulary."""
    return np.uint16 if vocab_size < _FIRST_SIZE_IN_32_BITS else np.int32


class DatasetWriter:
    """Writes the tokens as they come; finish() writes the index, without which nothing loads. For a with block."""

    def __init__(self, bin_path: str, dtype: type[np.integer]):
        self._dtype = np.dtype(dtype)
        self._stream = open(bin_path, "wb")  # noqa: SIM115 (closed by finish(), else at the end of the with block)
        self._lengths = [np.empty(0, np.int32)]
        self._ends = [np.array([False])]

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):  # of a full disk, a second time
            self._stream.close()

    def add(self, ids: np.ndarray, lengths: Sequence[int], ends: Sequence[bool]) -> None:
        """Append sequences.

        Args:
            ids: [sum of lengths], the sequences one after the other.
            lengths: tokens of each sequence.
            ends: whether the sequence is the last one of its document.

        Raises: OSError.
        """
        assert ids.dtype == self._dtype and ids.size == sum(lengths) and len(lengths) == len(ends)
        self._stream.write(np.ascontiguousarray(ids).data)
        self._lengths.append(np.array(lengths, np.int32))
        self._ends.append(np.array(ends, bool))

    def finish(self, idx_path: str) -> None:
        """Close the tokens and write their index. Raises: OSError."""
        self._stream.close()
        lengths = np.concatenate(self._lengths)
        offsets = np.zeros(lengths.size, np.int64)
        np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
        # The number of the first sequence of each document, and last the number of all sequences.
        borders = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(np.concatenate(self._ends)).astype(np.int64)])
        code = next(code for code, dtype in DTYPES.items() if self._dtype == dtype)
        with open(idx_path, "wb") as stream:
            stream.write(INDEX_HEADER.pack(INDEX_MAGIC, 1, code, lengths.size, borders.size))
            for part in (lengths, offsets * self._dtype.itemsize, borders):
                stream.write(part.tobytes())

"""Writes a data set, PREFIX.bin and PREFIX.idx, by megatron-core's IndexedDatasetBuilder in a folder beside its place.

PartialOutput renames the files at the end. A kill at any time leaves the old data set, the new one, or none: nothing
loads without the index, which is removed first and renamed last. PREFIX.json says that the other files are ours. It is
renamed first, so that the next run may replace what a killed one has renamed.
"""

from __future__ import annotations

import fcntl
import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from tempo_megatron.data import DataError
from tempo_megatron.data.dataset_files import find_foreign_files
from tempo_megatron.disk import flush_to_disk


def choose_token_dtype(vocab_size: int) -> type[np.integer]:
    """Returns the dtype in which megatron-core stores the tokens of such a vocabulary."""
    dtype: type[np.integer] = _import_megatron().DType.optimal_dtype(vocab_size)
    return dtype


class DatasetWriter:
    """Writes tokens as they come; finish() writes the index, without which nothing loads. A context manager."""

    def __init__(self, bin_path: str, dtype: type[np.integer]):
        self._builder = _import_megatron().IndexedDatasetBuilder(bin_path, dtype=dtype)

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):  # a full disk has raised before
            self._builder.data_file.close()

    def add(self, ids: np.ndarray, lengths: Sequence[int], ends: Sequence[bool]) -> None:
        """Appends sequences.

        Args:
            ids: [sum of lengths], the sequences one after the other.
            lengths: tokens of each sequence.
            ends: whether the sequence is the last one of its document.

        Raises: OSError.
        """
        import torch

        for sequence, is_end in zip(torch.from_numpy(ids).split(list(lengths)), ends, strict=True):
            self._builder.add_item(sequence)
            if is_end:
                self._builder.end_document()

    def finish(self, idx_path: str) -> None:
        """Closes the file of tokens and writes their index. Raises: OSError."""
        self._builder.finalize(idx_path)


def _import_megatron() -> Any:
    """Imports megatron-core's module of data sets, which takes seconds, without what it says of optional packages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


# The files of a data set, in the order of the renames.
SUFFIXES = (
    *(".json", "-vocab.txt", "-vocab.json", "-merges.txt", "-tokenizer.json", "-tokenizer_config.json"),
    *(".bin", ".idx"),
)
_LOCK = "prepare_data.lock"  # a folder that holds it is one of ours


class PartialOutput:
    """The folder PREFIX.partial, as a context manager. Its files have names that no reader of data sets looks for.

    A second process that writes to the same prefix is refused. Only files that a killed process left are removed.

    Args:
        prefix: of the data set.
        suffixes: of the files that will be written.
        obsolete: of files that the new data set does not have; publish() removes those that prepare_data made.
        overwrite: whether to replace files that prepare_data did not make.

    Raises: DataError if the place cannot be written, or holds files that prepare_data did not make.
    """

    def __init__(
        self,
        prefix: str,
        suffixes: Sequence[str] = SUFFIXES,
        *,
        obsolete: Sequence[str] = (),
        overwrite: bool = False,
    ):
        self.prefix, self.folder = prefix, prefix + ".partial"
        self._suffixes, self._obsolete, self._overwrite = suffixes, obsolete, overwrite

    def __enter__(self) -> PartialOutput:
        parent, name = os.path.split(self.prefix)
        if not name or os.path.isdir(self.prefix):
            raise DataError(f"--output-prefix {self.prefix} is a directory; add the beginning of a file name to it")
        if not os.path.isdir(parent or "."):
            raise DataError(f"--output-prefix {self.prefix}: there is no directory {parent}; make it first")
        folder = next((self.prefix + suffix for suffix in SUFFIXES if os.path.isdir(self.prefix + suffix)), None)
        if folder is not None:
            raise DataError(f"--output-prefix {self.prefix}: {folder} is a directory; choose another prefix")
        try:
            self._refuse_strangers()
            self._lock()
            try:
                self._check_is_free()
                self._empty()
            except BaseException:
                self._leave()
                raise
        except OSError as error:
            raise DataError(
                f"--output-prefix {self.prefix}: cannot write in {parent or '.'} "
                f"({error.filename or self.folder}: {error.strerror}); choose another place"
            ) from error
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):
            self._empty()
        self._leave()

    def locate(self, suffix: str) -> str:
        """Returns where to write the file that will become PREFIX + suffix."""
        return os.path.join(self.folder, suffix[1:])

    def publish(self) -> None:
        """Renames every file; an old data set of the same prefix is gone from the first step on."""
        written = [suffix for suffix in SUFFIXES if os.path.exists(self.locate(suffix))]
        assert set(written) <= set(self._suffixes)
        self._check_is_free()  # again, because writing may have taken hours
        for suffix in written:
            flush_to_disk(self.locate(suffix))
        obsolete = {self.prefix + suffix for suffix in self._obsolete}
        obsolete -= set(find_foreign_files(self.prefix, self._obsolete))
        parent = os.path.dirname(self.prefix) or "."
        for path in (self.prefix + SUFFIXES[-1], *sorted(obsolete)):
            if os.path.lexists(path):
                os.remove(path)
                flush_to_disk(parent)
        for suffix in written:
            os.replace(self.locate(suffix), self.prefix + suffix)
            flush_to_disk(parent)

    def _check_is_free(self) -> None:
        foreign = find_foreign_files(self.prefix, self._suffixes)
        if foreign and not self._overwrite:
            raise DataError(
                f"{foreign[0]} exists and was not made by prepare_data; choose another --output-prefix, or replace it "
                "with --overwrite"
            )

    def _refuse_strangers(self) -> None:
        names = set(os.listdir(self.folder)) if os.path.lexists(self.folder) else set()
        strangers = names - {_LOCK, *(suffix[1:] for suffix in SUFFIXES)} if _LOCK in names else names
        if strangers:
            raise DataError(
                f"{os.path.join(self.folder, min(strangers))} was not made by prepare_data, which needs that folder "
                "for itself; move it away, or choose another --output-prefix"
            )

    def _lock(self) -> None:
        lock = os.path.join(self.folder, _LOCK)
        while True:
            os.makedirs(self.folder, exist_ok=True)
            try:
                self._lock_fd = os.open(lock, os.O_WRONLY | os.O_CREAT, 0o644)
            except FileNotFoundError:
                continue  # another process has just removed the folder
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(self._lock_fd)
                raise DataError(
                    f"another process is writing {self.prefix}; wait for it, or choose another --output-prefix"
                ) from error
            if os.path.exists(lock) and os.path.samestat(os.stat(lock), os.fstat(self._lock_fd)):
                return
            os.close(self._lock_fd)

    def _empty(self) -> None:
        for suffix in SUFFIXES:
            with suppress(FileNotFoundError):
                os.remove(self.locate(suffix))

    def _leave(self) -> None:
        """Unlocks the folder for other processes, and removes it if it is empty."""
        with suppress(OSError):
            if os.listdir(self.folder) == [_LOCK]:
                os.remove(os.path.join(self.folder, _LOCK))
                os.rmdir(self.folder)
        os.close(self._lock_fd)

"""Writes output that is either whole or not there, whenever the process is killed."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from tempo_megatron.data.data_error import DataError
from tempo_megatron.data.dataset_files import find_foreign_files, stamp_file
from tempo_megatron.disk import flush_to_disk

# What a data set consists of, in the order in which the files get their names. Without .idx nothing loads, so it is
# the first to go and the last to come.
SUFFIXES = ("-vocab.txt", "-vocab.json", "-merges.txt", ".bin", ".json", ".idx")

# A folder with this file is one of ours. The other one lists the files that are getting their names.
_LOCK, _PUBLISHED = "prepare_data.lock", "published.json"
_OWN_NAMES = {*(suffix[1:] for suffix in SUFFIXES), _LOCK, _PUBLISHED}


class PartialOutput:
    """The folder PREFIX.partial, in which the files of a data set are written before they get their names.

    One process at a time: a second one that writes to the same prefix is refused. What a killed one left behind is
    removed, and only that. The files have names that no reader of data sets looks for.

    Args:
        prefix: PREFIX.
        suffixes: of the files that will be written.
        obsolete: of the files that the new data set does not have; publish() removes those that prepare_data made.
        overwrite: whether they may replace files that prepare_data did not make.
    """

    def __init__(
        self,
        prefix: str,
        suffixes: Sequence[str] = SUFFIXES,
        *,
        obsolete: Sequence[str] = (),
        overwrite: bool = False,
    ):
        self.prefix = prefix
        self.folder = prefix + ".partial"
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
        except OSError as error:
            raise self._explain(error) from error
        try:
            self._check_is_free()
            self._remove_leftovers()
        except OSError as error:
            os.close(self._lock_fd)
            raise self._explain(error) from error
        except DataError:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(OSError):
            for name in _OWN_NAMES - {_LOCK}:
                self._remove(os.path.join(self.folder, name))
        self._leave()

    def locate(self, suffix: str) -> str:
        """Where to write the file that will be called PREFIX + suffix."""
        return os.path.join(self.folder, suffix[1:])

    def publish(self) -> None:
        """Give every file its name; the data set that had it before is gone from the first step on."""
        written = [suffix for suffix in SUFFIXES if os.path.exists(self.locate(suffix))]
        assert set(written) <= set(self._suffixes)
        self._check_is_free()  # once more: writing may have taken hours
        for suffix in written:
            flush_to_disk(self.locate(suffix))
        foreign = find_foreign_files(self.prefix, self._obsolete, self._read_published())
        obsolete = {self.prefix + suffix for suffix in self._obsolete}.difference(foreign)
        self._write_published({suffix: stamp_file(self.locate(suffix)) for suffix in written})
        parent = os.path.dirname(self.prefix) or "."
        if os.path.lexists(self.prefix + SUFFIXES[-1]):
            os.remove(self.prefix + SUFFIXES[-1])
            flush_to_disk(parent)
        for suffix in written:
            os.replace(self.locate(suffix), self.prefix + suffix)
            flush_to_disk(parent)
        for path in obsolete:
            with suppress(FileNotFoundError):
                os.remove(path)

    def _check_is_free(self) -> None:
        """Raises: DataError where a file that would be replaced is not one that prepare_data made."""
        foreign = find_foreign_files(self.prefix, self._suffixes, self._read_published())
        if foreign and not self._overwrite:
            raise DataError(
                f"{foreign[0]} exists and was not made by prepare_data; choose another --output-prefix, or replace it "
                "with --overwrite"
            )

    def _refuse_strangers(self) -> None:
        """Raises: DataError where the folder holds something that prepare_data did not put there."""
        names = set(os.listdir(self.folder)) if os.path.lexists(self.folder) else set()
        strangers = names - _OWN_NAMES if _LOCK in names else names
        if strangers:
            raise DataError(
                f"{os.path.join(self.folder, min(strangers))} was not made by prepare_data, which needs that folder "
                "for itself; move it away, or choose another --output-prefix"
            )

    def _explain(self, error: OSError) -> DataError:
        return DataError(
            f"--output-prefix {self.prefix}: cannot write in {os.path.dirname(self.prefix) or '.'} "
            f"({error.filename or self.folder}: {error.strerror}); choose another place"
        )

    def _read_published(self) -> dict[str, Any]:
        """What a killed run was giving names to; nothing where none was, or where its list is cut off."""
        try:
            with open(os.path.join(self.folder, _PUBLISHED), encoding="utf-8") as stream:
                content = json.load(stream)
        except (FileNotFoundError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def _write_published(self, stamps: dict[str, list[int]]) -> None:
        path = os.path.join(self.folder, _PUBLISHED)
        with open(path, "w", encoding="utf-8") as stream:
            json.dump(stamps, stream)
        flush_to_disk(path)
        flush_to_disk(self.folder)

    def _lock(self) -> None:
        while True:
            os.makedirs(self.folder, exist_ok=True)
            lock = os.path.join(self.folder, _LOCK)
            try:
                self._lock_fd = os.open(lock, os.O_WRONLY | os.O_CREAT, 0o644)
            except FileNotFoundError:
                continue  # the process that had it removed the folder just now
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

    def _remove_leftovers(self) -> None:
        """Delete what a killed run wrote, and what it had named unless the index, the last one, has its name."""
        if not os.path.lexists(self.prefix + SUFFIXES[-1]):
            for suffix, stamp in self._read_published().items():
                if os.path.lexists(self.prefix + suffix) and stamp_file(self.prefix + suffix) == stamp:
                    os.remove(self.prefix + suffix)
        for name in sorted(_OWN_NAMES - {_LOCK, _PUBLISHED}):
            self._remove(os.path.join(self.folder, name))
        self._remove(os.path.join(self.folder, _PUBLISHED))

    def _leave(self) -> None:
        """Let another process have the folder, and remove it where nothing else is in it."""
        with suppress(OSError):
            if os.listdir(self.folder) == [_LOCK]:
                os.remove(os.path.join(self.folder, _LOCK))
                os.rmdir(self.folder)
        os.close(self._lock_fd)

    @staticmethod
    def _remove(path: str) -> None:
        with suppress(FileNotFoundError):
            os.remove(path)

"""Output that is either whole or not there, whenever the process that writes it is killed."""

from __future__ import annotations

import fcntl
import os
import shutil
from types import TracebackType

from tempo_megatron.data.data_error import DataError

# What a data set consists of, in the order in which the files get their names. Without .idx nothing loads, so it is
# the first to go and the last to come.
SUFFIXES = ("-vocab.json", "-merges.txt", ".bin", ".json", ".idx")


class PartialOutput:
    """The folder PREFIX.partial, in which the files of a data set are written before they get their names.

    One process at a time: a second one that writes to the same prefix is refused. What a killed one left behind is
    removed. The files have names that no reader of data sets looks for.
    """

    def __init__(self, prefix: str):
        self.prefix = prefix
        self.folder = prefix + ".partial"

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
            self._lock()
            self._remove_leftovers()
        except OSError as error:
            raise DataError(
                f"--output-prefix {self.prefix}: cannot write in {parent or '.'} ({error.filename or self.folder}: "
                f"{error.strerror}); choose another place"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock_fd)

    def path(self, suffix: str) -> str:
        """Where to write the file that will be called PREFIX + suffix."""
        return os.path.join(self.folder, suffix[1:])

    def publish(self) -> None:
        """Give every file its name; the data set that had it before is gone from the first step on."""
        written = [suffix for suffix in SUFFIXES if os.path.exists(self.path(suffix))]
        for suffix in written:
            _to_disk(self.path(suffix))
        parent = os.path.dirname(self.prefix) or "."
        if os.path.lexists(self.prefix + SUFFIXES[-1]):
            os.remove(self.prefix + SUFFIXES[-1])
            _to_disk(parent)
        for suffix in written:
            os.replace(self.path(suffix), self.prefix + suffix)
            _to_disk(parent)

    def _lock(self) -> None:
        while True:
            os.makedirs(self.folder, exist_ok=True)
            lock = os.path.join(self.folder, "lock")
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
        try:
            for leftover in os.listdir(self.folder):
                if leftover != "lock":
                    os.remove(os.path.join(self.folder, leftover))
        except OSError:
            os.close(self._lock_fd)
            raise


def _to_disk(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""What has to be on the disk before a file may get its name, so that a kill leaves it whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def flush_to_disk(path: str | Path) -> None:
    """Flush one file, or the names in one folder, from this machine's memory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_all_to_disk(folder: Path) -> None:
    """Flush every file below `folder`, and the folders themselves."""
    for entry in _walk(folder):
        flush_to_disk(entry)


def _walk(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            yield from _walk(entry)
        else:
            yield entry
    yield folder

"""What has to be on the disk before a file may get its name, so that a kill leaves it whole or not there."""

from __future__ import annotations

import os
from pathlib import Path


def flush_to_disk(path: str | Path) -> None:
    """Flush one file, or the names in one folder, from this machine's memory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_all_to_disk(folder: Path) -> None:
    """Flush every file below `folder`, and the folders themselves, each after what it holds."""
    for entry in [*sorted(folder.rglob("*"), reverse=True), folder]:
        flush_to_disk(entry)

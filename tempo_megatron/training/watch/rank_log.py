"""Writes the log of one rank: what it did when its run failed."""

from __future__ import annotations

import datetime
import os
import socket
from pathlib import Path


class RankLog:
    """What one rank writes when its run fails: to a file of its own in --log-dir, once that is known.

    Args:
        rank: of this process.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.path: Path | None = None

    def set_folder(self, folder: str | None) -> None:
        self.path = None if folder is None else Path(folder).resolve() / f"rank_{self.rank:05d}.log"

    def write(self, text: str) -> bool:
        """Append `text` under a line of when and where; whether there is a file and it took it."""
        if self.path is None:
            return False
        head = f"{datetime.datetime.now().isoformat(' ', 'seconds')} rank {self.rank} on {socket.gethostname()}"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{head}, process {os.getpid()}:\n{text.rstrip()}\n")
        except OSError:
            return False
        return True

"""Finds the launchers above this rank's process, and writes this rank's log when its run fails.

Nothing here imports torch, so that a rank can report a wrong command line before that takes its time.
"""

from __future__ import annotations

import datetime
import itertools
import os
import socket
from pathlib import Path

import psutil

_PROGRAMS = ("deepspeed", "ds", "deepspeed.pt", "torchrun")
_MODULES = ("deepspeed.launcher.", "torch.distributed.run", "torch.distributed.launch")


def find_launchers() -> list[psutil.Process]:
    """Lists the launchers above this process, up to the first ancestor that is none.

    `deepspeed` starts a launcher on each node, which starts the ranks and survives when `deepspeed` is killed.
    """
    return list(itertools.takewhile(lambda process: is_launcher(process.cmdline()), psutil.Process().parents()))


def is_launcher(words: list[str]) -> bool:
    """Whether a command line is a launcher of DeepSpeed's or torch's, rather than a script that calls one."""
    modules = [after for option, after in itertools.pairwise(words[:9]) if option == "-m"]
    is_program = any(Path(word).name in _PROGRAMS for word in words[:2])
    return is_program or any(module.startswith(_MODULES) for module in modules)


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class RankLog:
    """The file in --log-dir, once that is known, to which one rank writes when its run fails."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.path: Path | None = None

    def set_folder(self, folder: str | None) -> None:
        self.path = None if folder is None else Path(folder).resolve() / f"rank_{self.rank:05d}.log"

    def write(self, text: str) -> bool:
        """Appends `text` under a line with time, rank and host; returns whether it could be written."""
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

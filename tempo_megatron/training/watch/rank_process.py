"""Finds the launchers above this rank's process, and writes this rank's log when its run fails.

Nothing here imports torch, so that a rank can report a wrong command line before that takes its time.
"""

from __future__ import annotations

import datetime
import os
import socket
from pathlib import Path

from tempo_megatron.training.watch.heartbeat_process import read_stat, read_state

_PROGRAMS = ("deepspeed", "ds", "deepspeed.pt", "torchrun")
_MODULES = ("deepspeed.launcher.", "torch.distributed.run", "torch.distributed.launch")


def find_launchers() -> list[tuple[int, str]]:
    """Lists (pid, start time) of each launcher above this process, up to the first ancestor that is none.

    `deepspeed` starts a launcher on each node, which starts the ranks and survives when `deepspeed` is killed.
    """
    found = []
    pid = os.getppid()
    while pid > 1 and is_launcher(_read_words(pid)):
        found.append((pid, read_state(pid)[1]))
        pid = int(read_stat(pid)[1])
    return found


def is_launcher(words: list[str]) -> bool:
    """Whether a command line is a launcher of DeepSpeed's or torch's, rather than a script that calls one."""
    names = [Path(word).name for word in words[:2]]
    if any(name in _PROGRAMS for name in names):
        return True
    modules = [after for option, after in zip(words[:8], words[1:9], strict=False) if option == "-m"]
    return any(module.startswith(_MODULES) for module in modules)


def _read_words(pid: int) -> list[str]:
    try:
        content = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(word) for word in content.split(b"\0")[:-1]]


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

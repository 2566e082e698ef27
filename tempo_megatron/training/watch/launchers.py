"""Finds the launcher processes of a rank, so that the rank can stop when they have died."""

from __future__ import annotations

import os
from pathlib import Path

from tempo_megatron.training.watch.heartbeat_process import read_state

_PROGRAMS = ("deepspeed", "ds", "deepspeed.pt", "torchrun")
_MODULES = ("deepspeed.launcher.", "torch.distributed.run", "torch.distributed.launch")


def find_launchers() -> list[tuple[int, str]]:
    """Process and start time of each launcher above this process, up to the first ancestor that is none.

    `deepspeed` starts a launcher on each node, which starts the ranks, and does not end it when it is killed itself.
    """
    found = []
    pid = os.getppid()
    while pid > 1 and is_launcher(_read_words(pid)):
        found.append((pid, read_state(pid)[1]))
        pid = _read_parent(pid)
    return found


def is_launcher(words: list[str]) -> bool:
    """Whether a command line is one of DeepSpeed's or torch's launchers, not a script that calls one."""
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


def _read_parent(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[1])

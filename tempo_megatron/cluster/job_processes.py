"""Finds and ends the processes of a started job on this host, by the word in their environment.

Like host.py this file's text runs on other hosts by ssh: the standard library only, nothing of this package.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

# In the environment of every process of a job that `tempo-megatron launch` started.
JOB_VARIABLE = "TEMPO_LAUNCH_ID"


def find_processes(job: str) -> dict[int, tuple[int, bool]]:
    """Of each process of the job on this host: its parent, and whether it is a rank or a child of one."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        # It may end while it is looked at, and that of another user is not readable.
        with contextlib.suppress(OSError, IndexError):
            with open(f"/proc/{name}/environ", "rb") as file:
                variables = file.read().split(b"\0")
            if f"{JOB_VARIABLE}={job}".encode() not in variables or int(name) == os.getpid():
                continue
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b") ")[2].split()[:2]
            if state != b"Z":
                found[int(name)] = (int(parent), any(variable.startswith(b"RANK=") for variable in variables))
    return found


def ask_ranks_to_stop(job: str, asked: set[int]) -> list[int]:
    """SIGTERM to each rank, which saves and ends; not to what it started, nor to its launcher, nor to those in `asked`.

    Returns whom it was sent to: ranks that only start now are asked later.
    """
    processes = find_processes(job)
    ranks = [
        pid
        for pid, (parent, is_rank) in processes.items()
        if is_rank and not processes.get(parent, (0, False))[1] and pid not in asked
    ]
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    return ranks


def end_processes(job: str, seconds: float = 3.0) -> list[int]:
    """End all processes of the job, with SIGKILL where SIGTERM does not end them. Returns which there were."""
    first = find_processes(job)
    deadline = time.monotonic() + seconds
    left = first
    for pid in left:
        _send(pid, signal.SIGTERM)
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = find_processes(job)
    deadline += 2  # even SIGKILL waits for a process that the kernel holds
    while left and time.monotonic() < deadline:
        for pid in left:
            _send(pid, signal.SIGKILL)
        time.sleep(0.05)
        left = find_processes(job)
    return list(first)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def obey() -> None:
    """What this file's text does on another host: `stop JOB ASKED...` or `end JOB`; prints whom it signalled."""
    order, job, *asked = sys.argv[1:]
    print("processes", *(ask_ranks_to_stop(job, set(map(int, asked))) if order == "stop" else end_processes(job)))

"""Finds and ends the processes of a started job on this host, by a variable in their environment.

Like host.py, this file is sent as text to other hosts by ssh: it needs the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

# `tempo-megatron launch` sets it in the environment of every process of a job.
JOB_VARIABLE = "TEMPO_LAUNCH_ID"


def find_processes(job: str) -> dict[int, tuple[int, bool]]:
    """Maps each process of the job on this host to its parent and whether it is a rank or a child of one."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        # A process may end meanwhile, and those of other users are not readable.
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
    """Sends SIGTERM to each rank that is not in `asked`; a rank then saves and ends. Children of ranks and the launcher
    get none. Returns the ranks that got one: those that start later have to be asked later.
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
    """Ends all processes of the job, by SIGKILL if SIGTERM does not help. Returns which processes there were."""
    first = find_processes(job)
    deadline = time.monotonic() + seconds
    left = first
    for pid in left:
        _send(pid, signal.SIGTERM)
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = find_processes(job)
    deadline += 2  # even SIGKILL has to wait for a process inside the kernel
    while left and time.monotonic() < deadline:
        for pid in left:
            _send(pid, signal.SIGKILL)
        time.sleep(0.05)
        left = find_processes(job)
    return list(first)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def run_request() -> None:
    """Runs `stop JOB ASKED...` or `end JOB` from the command line on another host; prints the processes signalled."""
    request, job, *asked = sys.argv[1:]
    print("processes", *(ask_ranks_to_stop(job, set(map(int, asked))) if request == "stop" else end_processes(job)))

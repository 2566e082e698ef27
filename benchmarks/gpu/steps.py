"""Runs the steps of a plan in a worker process, each within a limit of its own, and writes each answer as it is known.

A step that fails, hangs, crashes or runs out of memory is one line and stops nothing: where the worker does not answer
in time it is killed with all that it started, and another goes on with the next step. What a folder has an answer for
already is not run again, so that a second call continues where the first ended.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from measurements import append_records, read_records

PASSED, FAILED, NOT_ENDED, LEFT_OUT = "passed", "failed", "not ended", "left out"
_SPAWN = multiprocessing.get_context("spawn")
START_S = 120.0
"""In which a worker imports what it needs and finds its GPU."""


class Wrong(Exception):  # noqa: N818  # an answer, no accident
    """A result that is not what it should be, in one line."""


class LeftOut(Exception):  # noqa: N818
    """The reason why a step cannot run on this machine."""


class Step(NamedTuple):
    name: str
    part: str
    """right, memory or fast."""
    expected_s: float
    run: Callable[[], Mapping[str, Any]]
    """Returns the fields of its record, among them `answer`, one line; raises Wrong."""

    @property
    def limit_s(self) -> float:
        """The seconds after which it counts as hung."""
        return max(30.0, 3 * self.expected_s)


MakeSteps = Callable[[], Sequence[Step]]


class Worker:
    """A process that runs steps by their names.

    Args:
        make_steps: called in the process; it must be picklable.
        log: the file that takes what the process prints.
    """

    def __init__(self, make_steps: MakeSteps, log: Path) -> None:
        self._connection, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_work, args=(theirs, make_steps, log))
        self._process.start()
        theirs.close()
        self._is_new = True
        if not self._connection.poll(START_S):
            self.kill()

    def run(self, name: str, limit_s: float) -> dict[str, Any] | None:
        """Returns the outcome and the fields of a step; None if the process ended before it began."""
        try:
            self._connection.send(name)
            if self._is_new:
                self._is_new = not self._connection.recv()
        except (EOFError, OSError):
            return None
        if not self._connection.poll(limit_s):
            self.kill()
            return {"outcome": NOT_ENDED, "answer": f"did not end within {limit_s:.0f} s"}
        try:
            answer: dict[str, Any] = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(10)
            return {"outcome": FAILED, "answer": f"the process ended with {self._process.exitcode}"}
        return answer

    def kill(self) -> None:
        """Ends the process and all that it started."""
        if self._process.pid is not None and self._process.is_alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._process.join(10)
        self._connection.close()


def run_plan(
    steps: Sequence[Step],
    make_steps: MakeSteps,
    folder: Path,
    seconds: float,
    about: Mapping[str, Any],
    patience: float = 1.0,
) -> int:
    """Runs, within `seconds`, the steps of which `folder` has no answer yet; returns how many had no time.

    Args:
        make_steps: makes the same steps in the worker.
        about: what every record says of the machine and the software.
        patience: multiplies the steps' limits, for a machine that is busy with other work.
    """
    path, start = folder / "first.jsonl", time.monotonic()
    answered = {record["step"] for record in read_records(path)}
    worker, num_left = None, 0
    try:
        for step in steps:
            left_s = seconds - (time.monotonic() - start)
            if step.name in answered:
                continue
            if step.expected_s > left_s:
                num_left += 1
                continue
            began, found = time.monotonic(), None
            for _ in range(2):  # a worker whose GPU had failed has ended after its last answer
                worker = worker or Worker(make_steps, folder / "first.log")
                found = worker.run(step.name, min(patience * step.limit_s, left_s))
                if found is None or found["outcome"] == NOT_ENDED:
                    worker.kill()
                    worker = None
                if found is not None:
                    break
            found = found or {"outcome": FAILED, "answer": "two processes ended before it began"}
            took_s = time.monotonic() - began
            append_records(
                path, [{"step": step.name, "part": step.part, **found, "seconds": round(took_s, 2), **about}]
            )
            elapsed = time.monotonic() - start
            print(f"[{elapsed:4.0f} s] {step.part}: {step.name}: {found['outcome']}, {found['answer']}", flush=True)
    finally:
        if worker is not None:
            worker.kill()
    if num_left:
        print(f"{num_left} steps had no time left; the same call with --resume {folder} runs them", flush=True)
    return num_left


def _work(connection: Any, make_steps: MakeSteps, log: Path) -> None:
    """The worker: answers the names that it gets until nobody asks any more, or its GPU has failed."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(output, stream.fileno())
    steps = {step.name: step for step in make_steps()}
    connection.send(_is_gpu_alive())
    while True:
        try:
            name = connection.recv()
        except EOFError:
            return
        print(f"== {name}", flush=True)
        connection.send(_answer(steps[name]))
        if not _is_gpu_alive():
            return


def _answer(step: Step) -> dict[str, Any]:
    import torch

    try:
        return {"outcome": PASSED, **step.run()}
    except Wrong as wrong:
        return {"outcome": FAILED, "answer": str(wrong)}
    except LeftOut as reason:
        return {"outcome": LEFT_OUT, "answer": str(reason)}
    except Exception as error:  # a kernel that does not compile, an illegal access, no memory
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        what = "out of memory" if is_memory else type(error).__name__
        return {"outcome": FAILED, "answer": f"{what}: {lines[0] if lines else ''}"[:300]}
    finally:
        with contextlib.suppress(Exception):  # of a GPU that has failed; the worker ends then
            if "torch._dynamo" in sys.modules:
                torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()


def _is_gpu_alive() -> bool:
    import torch

    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True

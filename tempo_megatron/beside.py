"""Calls a function in a Python process of its own, beside a run.

Planning, measuring and explaining need process groups, random states and memory that the run has for itself. The other
process sees no GPU and takes one thread.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import os
import pickle
import resource
import subprocess
import sys
import traceback
from typing import Any


class Beside:
    """The call of `target`, "package.module:function", with `args`, which can be pickled; it begins at once."""

    def __init__(self, target: str, *args: Any) -> None:
        self.target = target
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already; wait() says how
            self._process.stdin.write(base64.b64encode(pickle.dumps((target, args))))
            self._process.stdin.close()
        self._process.stdin = None

    def wait(self, seconds: float | None = None) -> Any:
        """What the function returns.

        Raises ValueError with the sentence of one that our code has raised there; RuntimeError, whose last line is that
        of the traceback, for any other end; subprocess.TimeoutExpired after `seconds`.
        """
        try:
            output, errors = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise
        lines = output.splitlines()
        if self._process.returncode or not lines:
            text = errors.decode(errors="replace").strip()[-4000:]
            raise RuntimeError(f"{self.target} ended with exit code {self._process.returncode}\n{text}".strip())
        is_sentence, found = pickle.loads(base64.b64decode(lines[-1]))
        if is_sentence:
            raise ValueError(found)
        return found


def is_ours(error: BaseException) -> bool:
    """Whether our own code has raised the error: its text is then a sentence for the user."""
    frame = list(traceback.walk_tb(error.__traceback__))[-1][0]
    return str(frame.f_globals.get("__name__", "")).startswith(("tempo_megatron", "tempo_kernels"))


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or the name of its class if it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def main() -> None:
    """Read a target and its arguments from stdin; write to stdout what it returns, or the sentence that it raises."""
    # A limit that the run has reached is not this process's.
    resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)
    target, args = pickle.loads(base64.b64decode(sys.stdin.buffer.read()))
    module, _, name = target.partition(":")
    try:
        reply = False, getattr(importlib.import_module(module), name)(*args)
    except ValueError as error:
        if not is_ours(error):
            raise
        reply = True, str(error)
    print(base64.b64encode(pickle.dumps(reply)).decode(), flush=True)


if __name__ == "__main__":
    main()

"""A lock that a killed build has left ends a run with a sentence, instead of letting it wait for ever.

DeepSpeed compiles some of its operations at their first use. torch lets one process build and the others wait until
the file `lock` is gone, whoever wrote it and whenever. It keeps the file open while it builds.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator

from torch.utils.file_baton import FileBaton

_PATIENCE_SECONDS = 10.0
# Another machine, or another container, may hold the lock where several share a home; no build takes that long.
_STALE_SECONDS = 600.0
_LOOK_SECONDS = 2.0


class StaleLockError(ValueError):
    """A lock that nobody holds."""


@contextlib.contextmanager
def refuse_stale_locks() -> Iterator[None]:
    """In this context what waits for another process's build raises StaleLockError where no process can be
    building, also where DeepSpeed makes another error of it."""
    original = FileBaton.wait
    FileBaton.wait = _wait  # type: ignore[assignment,method-assign]
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, StaleLockError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            raise cause from None
        raise
    finally:
        FileBaton.wait = original  # type: ignore[method-assign]


def _wait(baton: FileBaton) -> None:
    path, start, has_spoken, looked = baton.lock_file_path, time.monotonic(), False, 0.0
    while (age := _find_age(path)) is not None:
        now = time.monotonic()
        if now - looked >= _LOOK_SECONDS:
            looked, holders = now, find_holders(path)
            if not holders and age > _STALE_SECONDS and now - start > _LOOK_SECONDS:
                raise StaleLockError(
                    f"{path} has been there for {age / 60:.0f} minutes and no process of this machine holds it: a "
                    "build that was killed has left it; remove it and start again"
                )
            if not has_spoken and now - start > _PATIENCE_SECONDS:
                has_spoken = True
                who = f"process {holders[0]} builds there" if holders else "no process of this machine holds it"
                print(
                    f"waiting until {path} is gone ({who}); where nothing builds on another machine, remove it",
                    file=sys.stderr,
                    flush=True,
                )
        time.sleep(baton.wait_seconds)


def _find_age(path: str) -> float | None:
    """Seconds since a file was written; None where there is none."""
    try:
        return time.time() - os.stat(path).st_mtime
    except FileNotFoundError:
        return None


def find_holders(path: str) -> list[int]:
    """The processes that have a file open, among those that this user may look at."""
    wanted = os.path.realpath(path)
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                folder = f"/proc/{entry}/fd"
                if any(_read_link(f"{folder}/{each}") == wanted for each in os.listdir(folder)):
                    found.append(int(entry))
    return found


def _read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""

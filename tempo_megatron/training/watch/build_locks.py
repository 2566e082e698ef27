"""Ends a run with one sentence if a killed build has left its lock, instead of waiting for ever.

DeepSpeed compiles some of its operations at their first use. torch lets one process build; the others wait until the
file `lock` is gone, however old it is. The builder keeps the file open, which other processes of the machine can see.
For processes of other machines that share the folder, the builder also touches its lock while it builds.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

from torch.utils.file_baton import FileBaton

_PATIENCE_SECONDS = 10.0  # after which a waiting process says so
_STALE_SECONDS = 600.0  # no build takes that long
_TOUCH_SECONDS = 5.0
_QUIET_SECONDS = 20.0  # a lock that is not touched for this long has no builder on another machine either
_LOOK_SECONDS = 2.0


class StaleLockError(ValueError):
    """A lock that no process holds."""


@contextlib.contextmanager
def refuse_stale_locks() -> Iterator[None]:
    """Raises StaleLockError, even if DeepSpeed wraps it, instead of waiting for a build that no process does.

    A build of this process touches its lock.
    """
    wait, try_acquire = FileBaton.wait, FileBaton.try_acquire

    def try_acquire_and_touch(baton: FileBaton) -> bool:
        if not try_acquire(baton):
            return False
        assert baton.fd is not None
        touch = threading.Thread(target=_touch, args=(baton.lock_file_path, os.dup(baton.fd)), daemon=True)
        touch.start()
        return True

    FileBaton.wait = _wait  # type: ignore[assignment,method-assign]
    FileBaton.try_acquire = try_acquire_and_touch  # type: ignore[assignment,method-assign]
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
        FileBaton.wait, FileBaton.try_acquire = wait, try_acquire  # type: ignore[method-assign]


def _touch(path: str, descriptor: int) -> None:
    """Touches a lock, which stays open as `descriptor`, until it is gone from `path`."""
    try:
        while os.stat(path).st_ino == os.fstat(descriptor).st_ino:
            os.utime(descriptor)
            time.sleep(_TOUCH_SECONDS)
    except OSError:
        pass  # it is gone
    finally:
        os.close(descriptor)


def _wait(baton: FileBaton) -> None:
    path, start, has_spoken, looked = baton.lock_file_path, time.monotonic(), False, 0.0
    touched, touched_at = None, start
    while os.path.exists(path):
        now = time.monotonic()
        if now - looked >= _LOOK_SECONDS:
            looked, holders = now, find_holders(path)
            written = _find_time(path)
            if written != touched:
                touched, touched_at = written, now
            if written is not None and not holders and now - start > _LOOK_SECONDS:
                age, quiet = time.time() - written, now - touched_at
                if age > _STALE_SECONDS or quiet > _QUIET_SECONDS:
                    since = f"{age / 60:.0f} minutes" if age > _STALE_SECONDS else f"{quiet:.0f} s"
                    raise StaleLockError(
                        f"{path} has been there for {since} and no process of this machine holds it, nor does one of "
                        "another machine touch it: a build that was killed has left it; remove it and start again"
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


def _find_time(path: str) -> float | None:
    """Returns when a file was written, or None if it is gone. Opening it makes NFS ask its server."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return None


def find_holders(path: str) -> list[int]:
    """Lists the processes that have a file open, among those that this user may inspect."""
    wanted = os.path.realpath(path)
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
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
